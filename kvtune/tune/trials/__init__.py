"""Trials: one setting, run once, in simulation or on the engine.

If flags give the pool in blocks and a trial changes the block size, the pool keeps its size in tokens.

    bench.py       model, workload and flags -> `Bench`, checked before anything starts
    flags.py       settings -> vLLM's flags and the core's settings
    simulated.py   trials in the simulator
    like.py        what an engine run shows about the engine that trials simulate
    engine.py      a trial on the real engine
    journal.py     JSON lines under a lock; a torn last line is cut off, so a study continues after any crash
"""
