"""Steppers that take many steps at once, with the decisions of step after step. Simulator's process only.

A stride is a sequence of plain decode steps taken in one call. `stride.steppers` picks them once per replay; the
player tries them in order, and EngineStepper (one step of vLLM's own EngineCore) comes last.

    stride.py        plain decode steps from event to event, or at once; which steppers a replay gets
    pool.py          stock's loops over blocks, inlined. Every field of every block is stock's
    steady_path.py   the core's steady-decode path, as these steppers use it

`python tests/tools/bench/sim.py --trace FILE --without stride` measures the time that strides save.
"""
