"""What a cache of a given size could hit at best for a workload. No vLLM, no engine.

In: a `Workload` or trace, pool sizes. Out: hit rates of an infinite cache, the offline optimum, the best policy we know
and LRU.
Imported by: cli, report.

    paths.py      a workload as paths in a prefix tree, cut into pieces by last use
    policies.py   never evicting, Belady's optimum, LRU, two classes with a ghost list
    ladder.py     all of them over pool sizes
    text.py       what `kvtune bounds` reads and prints
"""
