"""Comparison of runs: which figures differ by more than chance. Pure.

measures.py   the figures that are compared, and the observations that each is made of
compare.py    two runs: checked fields, bootstrap intervals, verdicts
repeats.py    several runs a side: intervals that include the machine's drift, for `compare`, `--ablate` and `tune`
average.py    the mean of the summaries of repeated runs
ablation.py   the effect of each switch: `stored(run)` reads it from the baseline's first run
fail_on.py    `--fail-on 'ttft_ms.mean > +5%'`
"""
