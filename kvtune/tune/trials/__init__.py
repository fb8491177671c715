"""Trials: one setting, run once, in simulation or on the engine.

If flags give the pool in blocks and a trial changes the block size, the pool keeps its size in tokens.

    setup.py       model, workload and flags -> `Setup`, checked before anything starts
    flags.py       which settings are the core's, which vLLM's, and whether a file may give them
    simulated.py   trials in the simulator
    engine.py      a trial on the real engine
    journal.py     JSON lines under a lock; a torn last line is cut off, so a study continues after any crash
"""
