"""Progress on stderr, results on stdout.

progress.py   a run while it runs
results.py    what `kvtune profile` prints
trials.py     trials while they run, and what a study prints
browser.py    opens a page in the user's browser, for `--open`
plan.py        Before work that takes long: what will run, how many engines start, about how long
ticker.py      A line of progress every ten seconds where there is no terminal to draw on, also while nothing happens
answer.py      Prints an answer: its struct as JSON, or its Document as Markdown or for a terminal, or writes a page
"""
