"""Progress on stderr, results on stdout.

progress.py   a run while it runs
results.py    what `kvtune profile` prints
trials.py     trials while they run, and their table
browser.py    Opens a page in the person's browser: what `--open` does
trial_table.py The table of trials on a terminal: the baseline is a row, and settings with equal results are one row
plan.py        Before work that takes long: what will run, how many engines start, about how long
ticker.py      A line of progress every ten seconds where there is no terminal to draw on, also while nothing happens
"""
