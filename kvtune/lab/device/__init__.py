"""A device without a model for vLLM's own engine, which `--on sim` and `--on host` use.

In: vLLM's configuration, a step's cost, KV specs captured from a run (else the model is built on torch's meta
device). Out: an executor for vLLM with KV blocks that take no memory, and one token for each request in each step.
`--on sim` adds a virtual clock (kvtune/lab/sim/executor.py). `--on host` runs vLLM's real front end, EngineCore and
scheduler on the real clock: `engine/front_end` gives vLLM's configuration a GPU engine's shape, and everything else
(launcher, driver, probe, ring files, run file) is the same as for a real engine.

    on a GPU                           with --on host
    worker inside EngineCore (uni)     the same: TimedExecutor is called as UniProcExecutor is
    batch queue of two                 the same: asynchronous scheduling, results are futures
    rows of sampled tokens             made by vLLM's own AsyncOutput, from an array, as Model Runner V2 does
    a step's time                      slept in `result()`, counted from when the device was free
    CPU time of the worker's Python    missing: inputs are not prepared and no kernel is launched
"""
