"""Trials: one setting, run once, in simulation or on the engine.

If flags give the pool in blocks and a trial changes the block size, the pool keeps its size in tokens.
"""
