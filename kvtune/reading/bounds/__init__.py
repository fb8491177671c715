"""Upper bounds: how much of a workload a cache of a given size could hit. No vLLM, no engine.

In: a `Workload` or trace, pool sizes. Out: hit rates of an infinite cache, the offline optimum, the best policy we know
and LRU.
"""
