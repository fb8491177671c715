"""The figures of a run: pure functions with frozen results.

In: a `Run`, and its `Workload` to classify misses. Out: frozen results. No I/O, except that `rebuild.py` reads trace
files. Imports nothing of vLLM.
Imported by: capacity, cli, doctor, explain, report, tune.

    run.py          RunAnalysis: one run with every result below, each computed once
    latency.py      first token, between tokens, whole request; throughputs; arrays of each for drawings
    cache.py        hits and causes of miss, overall and per round
    gc.py           collections and pauses per process, and the steps that they delayed
    step_time.py    what EngineCore's step time is made of; steps that a collection paused
    host/           what the host costs, what the device hides of it, and how much the host can drive
    culprits.py     which objects cause collections, by type and line
    memory.py       resident memory per process, and whether it grows; GPUs' use, memory, power; bytes of the KV pool
    goodput.py      requests a second that met every limit of the SLO
    verdict.py      the limit of this run, a setting to try, and the command for it
    summary.py      the `--json` object: every field always present, never NaN
    figures.py      every figure that runs are judged by: title, unit, which way is better, meaning
    processes.py    keys and titles of processes: `front_end`, `engine_core`, `worker_0`
    spread.py       mean, median, 99th percentile; intervals of differences of means and of slopes
    rebuild.py      a run's workload, rebuilt from its header
    study.py        the trials of a sweep or a search, and the outcome: data of `tune`, drawn by `report`
    preemption.py   tokens computed twice after preemptions: Run -> Preemption
    fleet.py        engines that shared a load, and other routings: Run -> Fleet
    offload.py      hits and copies of a host-memory tier: Run -> Offload
    again.py        the `kvtune` command that repeats a run, as it was or with other settings
    replayed.py      which settings help, from replays of a run (`header.extra.replayed`)
    looks.py        a recorded server over time: a stretch of it, its worst minute, restarts, stalls, floods
    stalls/         slow token gaps, and the one largest cause of each
    comparison/     two runs, or repeats of two settings, side by side; ablations; --fail-on

A prompt's tokens, compared with an infinite cache at sending time. Hits and misses add up to the prompt:

    0 ........ hit ........|.. not_cached ..|. last_token .|. partial_block .|.... cold .... prompt's end
                           h             usable        full blocks         seen
"""
