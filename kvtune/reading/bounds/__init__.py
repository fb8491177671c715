"""Upper bounds: what a load is, and how much of it a cache of a given size could hit. No vLLM, no engine.

In: a `Workload` or trace, pool sizes. Out: lengths, sessions, pauses and reuse; hit rates of an infinite cache, the
offline optimum, the best policy we know and LRU.
"""
