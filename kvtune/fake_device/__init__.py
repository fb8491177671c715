"""A device without a model for vLLM's own engine, which `--on sim` and `--on host` use.

In: vLLM's configuration, a step's cost, KV specs captured from a run (else the model is built on torch's meta device).
Out: an executor for vLLM with KV blocks that take no memory, and one token for each request in each step. `--on sim`
adds a virtual clock (kvtune/sim/executor.py). `--on host` runs vLLM's real front end, EngineCore and scheduler on the
real clock: `engine/front_end` gives vLLM's configuration a GPU engine's shape, and everything else (launcher, driver,
probe, ring files, run file) is the same as for a real engine.
Imported by: analysis, capacity, cli, doctor, engine, explain, report, sim, tune.

    settings.py     Timed, the device: what the launcher writes into the work folder, and the executor reads
    cost.py         StepCost: how long a step takes by the work in it
    fit.py          the length of a step, fitted to a recorded run
    delay.py        transport delays, measured in a recorded run
    shape.py        vLLM's configuration in a GPU engine's shape: asynchronous scheduling, executor, pool
    executor.py*    vLLM's executor without a model
    timed.py*       TimedExecutor: results are ready after the step's time on the real clock
    blocks.py       a model's KV specs and pool, with a GPU's block size where this machine is none
    stages.py       the layers of each rank of a pipeline
    meta_model.py   a model's KV specs, from torch's meta device
    kv_specs.py     vLLM's KV specs, from captured ones (probe/kv_specs.py captures them)
    copies.py       How long copies between the KV cache and a tier of host memory take
    forward.py      Reads what `vllm bench forward --output-json FILE` writes (vLLM 0.33), and fits a step's cost to it
    tier.py*        A host-memory tier for an engine without a model: vLLM's own connector

    on a GPU                           with --on host
    worker inside EngineCore (uni)     the same: TimedExecutor is called as UniProcExecutor is
    batch queue of two                 the same: asynchronous scheduling, results are futures
    rows of sampled tokens             made by vLLM's own AsyncOutput, from an array, as Model Runner V2 does
    a step's time                      slept in `result()`, counted from when the device was free
    CPU time of the worker's Python    missing: inputs are not prepared and no kernel is launched
"""
