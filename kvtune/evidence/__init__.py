"""The published results on vLLM's KV cache, measured again on this machine beside stock vLLM.

In: a scale (cpu, gpu). Out: one plain object with a verdict a claim. A case's sides are engines that are loaded
together and run in turns, or whole runs one after the other.
Imported by: cli.

    claims.py      the claims and what was published: data
    cases.py       the work for them on a CPU and on a GPU: data
    turns.py       interleaved A/B: every side's engine loaded, one running (a CPU holds four)
    turn_engine.py one side of it: EngineCore and its worker in a process of its own
    runs.py        whole runs one after the other, with a journal: an interrupted call continues
    judge.py       ratios of pairs of turns, or of runs (Welch), and the verdict
    free_list.py   what a hit costs the free list, by pool size
    answers.py     questions to real weights, core on and off
    reading.py     the texts and questions
    extras.py      rows that are of no engine: the pool alone, planned block sizes, answers
    collect.py     all of it in one object

A new claim: a `Claim` and, where its work is new, a `Case`.
"""
