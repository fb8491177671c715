"""Results on a terminal, with rich. Draws the `--json` objects, computes nothing.

summary.py      a run
collector.py    the collector's details of a run
ablation.py     the table of `--ablate`
comparison.py   a comparison: terminal, Markdown, JSON
runs.py         The list of runs on a terminal
stalls.py       slow tokens: their causes, and the worst of them one by one
recipe.py       A recipe for people: what it sets, what it is evidence for, how to use it
offload.py      A tier of host memory, for a terminal: the `offload` part of a run's `--json` object
"""
