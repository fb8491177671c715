"""The simulator: vLLM's own EngineCore on a virtual clock, with an executor that runs no model.

In: a `Setup` (kvtune/lab/setup/setup.py), whose `Simulated` says how to replay it. Out: the same
`Run` as from a real engine, with `source = "sim"`. Modules marked * import vLLM; others only in functions.
docs/simulator.md is for users.

    simulators.py (parent) <-- dialogue.py --> worker.py* (imports vLLM once, forks for each job)
                                                 |
    build.py*: VllmConfig, KV specs --> replay.py --> player.py: the loop --> journal.py --> record.py --> Run
       lab/device/meta_model.py* or kv_specs.py*      |      |
                          transport.py --> requests.py*|      | steppers, asked in order (fast/stride.py*)
                          (delays: fake_device)                  v
                                    EngineCore --> executor.py* --> a step's length: the set-up's cost; moves clock.py

    missing              stand-in                                       why decisions stay the same
    weights, kernels     one token per step after a request's prompt    vLLM schedules by lengths, not by tokens
    tokens               a bytearray of the right length                vLLM reads tokens only to hash them
    token hashes         hashes of spans; equal prompts, equal answers  equal spans = equal tokens
                         (chains.py: one conversation's are shared)
    time                 VirtualClock, moved by step costs              arrivals and steps keep their order
    client, ZMQ, loop    a Feed with fitted transport delays            a nominal cost has no delays
    memory profiling     the pool's size, by flag or captured           same pool
"""
