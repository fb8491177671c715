"""Upper bounds: how much of a workload a cache of a given size could hit. No vLLM, no engine.

In: a `Workload` or trace, pool sizes. Out: hit rates of an infinite cache, the offline optimum, the best policy we know
and LRU.
Imported by: capacity, cli, report, tune.

    paths.py      a workload as paths in a prefix tree, in pieces by last use
    policies.py   infinite cache, Belady's optimum, LRU, two classes with a ghost list
    loads.py      what a load is: sessions, lengths, pauses, reuse
    ladder.py     all of them over pool sizes
    tiers.py      how many hits a second tier could add, for two kinds of tiers, from the trace alone
    document.py   What `kvtune bounds` and `kvtune trace` say of a load: hit rates over pool sizes; lengths
    given.py      Input of `kvtune bounds`: pool sizes, a model's shape; its progress
"""
