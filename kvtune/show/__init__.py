"""Draws an answer: one Document as a terminal's text, as a page, as Markdown. Runs in the command's process.

In: a `Document` (parts.py): a headline, then sections of facts, tables, notes, charts. Out: text. It knows nothing of
vLLM, of runs or of commands: a package whose command answers something makes the Document.
Imported by: bounds, capacity, cli, report.

    parts.py     Document, Section, Grid, Chart: what is drawn
    charts.py    how charts are drawn; thinning that keeps extremes
    screen.py    a Document on a terminal
    page.py      the frame of every page
    markdown.py  a Document as Markdown
    templates/   Jinja2, autoescape
    assets/      one style sheet, one script
"""
