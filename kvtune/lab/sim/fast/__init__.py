"""Steppers that take many steps at once, with the decisions of step after step. Simulator's process only.

A stride is a sequence of plain decode steps taken in one call. `stride.steppers` picks them once per replay; the
player tries them in order, and EngineStepper (one step of vLLM's own EngineCore) comes last. `runs` is the pool,
`tier` its host memory.

`python bench/sim.py --trace FILE --without stride` measures the time that strides save.
"""
