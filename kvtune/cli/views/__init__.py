"""Progress on stderr, results on stdout.

progress.py   a run while it runs
results.py    what `kvtune profile` prints
trials.py     trials while they run, and their table
browser.py    Opens a page in the person's browser: what `--open` does
"""
