"""The engine without a model: vLLM's own EngineCore on an executor that computes nothing, on a virtual clock.

In: a `Workload` and `SimSettings` (model or captured KV specs, vLLM's flags, core, mode, step cost). Out: the same
`Run` as a real engine's, `source = "sim"`. vLLM is imported inside functions, or in modules marked *.
docs/simulator.md describes it for people.
Imported by: cli, doctor, explain, tune.

    simulators.py (parent) <-JSON lines-> worker.py* (imports vLLM once, forks for each job)
       |
    replay.py   front_end.py -> requests.py* -> EngineCore.step_fn -> journal.py -> record.py -> Run
       |                                    |        ^
    build.py* VllmConfig + specs            v        | futures move the VirtualClock (clock.py)
       meta_model.py* or kv_specs.py*  executor.py* -+ a step's length: cost.py

    simulators.py   one simulator process, jobs in parallel, runs back
    worker.py       the simulator process
    settings.py     SimSettings, MODES: plain data that crosses the pipe
    profile.py      `kvtune profile --on sim`: one replay from job to run file
    build.py        EngineCore on the executor that computes nothing
    meta_model.py   a model on torch's meta device, asked for its KV specs
    kv_specs.py     captured KV specs -> vLLM's (probe/kv_specs.py writes them)
    replay.py       the loop: requests in, steps, answers out
    requests.py     a workload's requests as vLLM's, without making a token
    front_end.py    the way of a request to the engine and of its answers back
    delay.py        how long these ways take, fitted to a recorded run
    executor.py     a token for every request whose prompt is in, after a virtual time
    cost.py         how long a step takes, fitted to a recorded run
    clock.py        virtual time
    journal.py      what a replay notes while it runs
    record.py       journal -> Run
    fast/           many steps at once, exact
    verdicts/       an observer that says where every prompt token went

    not there            in its place                                   why decisions stay the same
    weights, kernels     a token for every request whose prompt is in   vLLM schedules by lengths, not by tokens
    tokens               a bytearray that only counts                   tokens are read where they are hashed
    token hashes         hashes of spans; equal prompts, equal answers  equal spans = equal tokens
    time                 VirtualClock, moved by step costs              order of arrivals and steps is kept
    client, ZMQ, loop    a Feed behind fitted transport delays          a nominal cost has none
    memory profiling     the pool's size, by flag or captured           same pool
"""
