"""The figures of a run: pure functions with frozen results.

In: a `Run`, and its `Workload` to classify misses. Out: frozen results. No I/O, except that `rebuild.py` reads trace
files. Imports nothing of vLLM.

A prompt's tokens, compared with an infinite cache at sending time. Hits and misses add up to the prompt:

    0 ........ hit ........|.. not_cached ..|. last_token .|. partial_block .|.... cold .... prompt's end
                           h             usable        full blocks         seen
"""
