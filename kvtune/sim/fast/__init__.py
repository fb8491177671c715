"""Steppers that take many steps at once, with the decisions of single steps. Simulator's process only.

`choose.py` picks them once per replay, in this order; the player asks them in order, and EngineStepper comes last.

    choose.py        which steppers a replay gets
    mixed.py         steps that also prefill, stop or leave requests waiting: plain decodes are set aside, and vLLM
                     schedules the others. Exact: vLLM looks at the running requests in that order, too
    stride.py        plain decode steps from event to event, up to an arrival or an end. Exact: same calls in same order
    leap.py          a stride's steps at once (modes jump and coarse). Same hits and times, other block ids
    jump.py          k decode steps as one, while requests wait for blocks (modes jump and coarse). Same hits and times,
                     other block ids: vLLM takes k - 1 tokens as accepted drafts. Synchronous scheduling only
    blocked.py       the same by strides, for asynchronous scheduling
    in_flight.py     the batch that asynchronous scheduling has in flight, whose rows a stride advances
    pace.py          when the turns of a stride happen, and when their steps end
    pool.py          stock's loops over blocks, inlined. Every field of every block is stock's
    steady_path.py   the core's steady-decode path, as these steppers use it

`python tests/tools/bench/sim.py --trace FILE --without mixed` measures what a stepper saves.
"""
