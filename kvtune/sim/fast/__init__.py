"""Steppers that take many steps at once, with the decisions of step after step. Simulator's process only.

A stride is a sequence of plain decode steps taken in one call. `choose.py` picks the steppers once per replay; the
player tries them in order, and EngineStepper (one step of vLLM's own EngineCore) comes last.

    choose.py        which steppers a replay gets
    stride.py        plain decode steps from event to event, up to an arrival or an end. Exact: same calls in same order
    leap.py          a stride's steps at once (mode jump). Same hits and times, other block ids
    in_flight.py     the batch that asynchronous scheduling has in flight, whose rows a stride advances
    pace.py          when the turns of a stride happen, and when their steps end
    pool.py          stock's loops over blocks, inlined. Every field of every block is stock's
    steady_path.py   the core's steady-decode path, as these steppers use it

`python tests/tools/bench/sim.py --trace FILE --without stride` measures the time that strides save.
"""
