"""The instruments of a profiled engine.

In: the environment (`KVTUNE_PROBE`, `KVTUNE_RUN_DIR`), set by `engine/profile.py` and `engine/launch.py`. Out: one ring
file and one status file per engine process, psutil samples, py-spy files; `engine/record.py` merges them.
A probe that fails switches itself off and reports why.
Imported by: doctor, engine, fake_device, sim.

In vLLM's processes:
    plugin.py      starts the instruments in a process of vLLM, if KVTUNE_PROBE is set
    instruments.py the instruments of one process: what a level starts, also after a fork
    records.py     the kinds of records, what each holds and when it is written
    ring.py        fixed 128-byte records in a memory-mapped, preallocated file; each ends with its sequence number
    gc.py          collector callbacks: one record a collection. Here a pause is measured
    steps.py       spans around EngineCore's step, `schedule` and `update_from_output`
    pool.py        evicted blocks by queue (in the simulator too)
    heap.py        how many objects the collector watches
    digest.py      one number for a step's decisions, the same function in a real engine and in a replay
    describe.py    groups, block sizes and pool of the KV cache, once
    kv_specs.py    KV cache specs as JSON, for the simulator
    status.py      which process this is and what runs in it, written by its own thread
    phase.py       which phase the run is in: one mapped byte
    lifetime.py    no engine process survives the one that started it
    recorder.py    `kvtune serve`: live traffic as a trace, counters on /metrics
    objects/       which objects cause collections (levels types, sites)
    work.py        the work in a step, read from its SchedulerOutput alone: prompt tokens
    preempted.py   tokens computed twice after preemptions, by request and cause (in the simulator too)
    offload.py     watches the host-memory tier: copies each way, requests that wait for them
In ours:
    process.py     psutil: memory, CPU time and threads, in a thread of the launcher
    device.py      NVML: use, memory, power, clocks and PCIe traffic of GPUs, in another thread
    stacks.py      py-spy on each EngineCore and worker

    level    adds                                                               where
    light    pauses, trigger lines, heap size, steps, net allocations a phase   gc.py, heap.py, steps.py
    types    census of the young generation at every 16th collection            objects/census.py
    sites    a second pass: tracemalloc around sampled collections and steps    objects/sites.py, objects/step_sites.py
"""
