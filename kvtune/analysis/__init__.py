"""From a run to its figures: pure functions, frozen results.

In: a `Run`, and its `Workload` where causes of misses are asked for. Out: frozen results. No I/O, except that
`rebuild.py` reads trace files. Imports nothing of vLLM.
Imported by: cli, evidence, report, tune.

    latency.py      first token, between tokens, whole request; throughputs; arrays of each for drawings
    cache.py        hits and causes of miss, overall and per round
    gc.py           collections and pauses per process. Here a pause becomes a figure
    ledger.py       collections joined to the steps and token gaps that they held up
    step_time.py    where EngineCore's time went; what a collection adds to a step
    host.py         what Python around the model costs
    culprits.py     which objects cause collections, by type and line
    memory.py       resident memory per process
    leaks.py        whether a process grows
    goodput.py      requests a second that kept every limit of the SLO
    verdict.py      what limits this run, and what to try
    summary.py      all of it in one object: the `--json` contract, every field always there, never NaN
    processes.py    keys of processes: `front_end`, `engine_core`, `worker_0`
    spread.py       mean, median, 99th percentile; the interval between two means
    rebuild.py      a run's workload, made again from its header
    admission.py    requests that overtook others where the core admits by cached prefix
    study.py        what a sweep or a search tried and what came of it: data of `tune`, drawn by `report`
    comparison/     two sides of runs beside each other

A prompt's tokens, by what an infinite cache held when it was sent; hits cut off the left, so all adds up exactly:

    0 ........ hit ........|.. not_cached ..|. last_token .|. partial_block .|.... cold .... prompt's end
                           h             usable        full blocks         seen
"""
