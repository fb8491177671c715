"""The optimized KV core: subclasses of vLLM's own classes, loaded into an unmodified vLLM as a plugin.

In: settings from the environment. Out: vLLM's own objects with other classes, and a record of which parts are on.
Runs in vLLM's processes, and in the processes with vLLM that `sim` and `doctor` start. The `kvtune` command's own
process reads `settings.py` and `state.py` only. docs/core.md explains each part and its switch.
"Stock" is vLLM's own code. A "grade" says why a block is kept. An "extra" is a block that stock would not keep.
Imported by: analysis, doctor, engine, explain, fake_device, probe, report, sim, tune.

    plugin.py      the entry point: installs each part whose symbols this vLLM has unchanged
    settings.py    KNOBS, CoreSettings: every switch and knob with its help, default and legal values
    state.py       which parts are on in this process; the probe copies it into the run file
    breaker.py     the first error in the core's bookkeeping: stock decides from then on
    freeze.py      the garbage collector: frozen heaps, thresholds, collections while the engine waits
    cache/         which blocks are kept: the pool's queues, sliding windows, packed layouts
    policies/      which free block is evicted next: one policy a file, numbers only
    steps/         the short path of steps that only decode
    tokens/        sampled tokens as arrays between worker and scheduler
    outputs/       outputs as columns from EngineCore to AsyncLLM's callers
    cpu_tier/      host memory as a second tier, on a CPU engine

After the first error in the core's code (pool, windows, steady path, tokens, columns), every object is vLLM's own again
for good, and the state notes why: `breaker.py`.
"""
