"""Results on a terminal, with rich: the page's sections in their terse form.

summary.py      a run: its first screen, or every section
comparison.py   a comparison: terminal, Markdown, JSON
runs.py         the list of runs
recipe.py       the output of `kvtune recipe show`
"""
