"""Draws an answer: one Document as a terminal's text, as a page, as Markdown. Runs in the command's process.

In: a `Document` (parts.py): a headline, then sections of facts, tables, notes, charts. Out: text. It knows nothing of
vLLM, of runs or of commands: a package whose command answers something makes the Document.
"""
