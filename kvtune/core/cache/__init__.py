"""Which KV blocks are kept and for how long: the pool, the windows, the layouts. Runs in EngineCore.

Pinning: `windows.py` chooses which window blocks of a prompt get a hash (so that a later prompt can resume there) and
gives each a grade (why it is kept). `queues.py` holds the free blocks. A policy of `core/policies` chooses the queue of
each grade, and the queue to evict from.

    queues.py    the free blocks in queues that a policy orders
    quick.py     vLLM's BlockPool with its loops over blocks inlined; the simulator has it, too
    pool.py      PolicyPool: quick.py's pool with several free queues; tells the policy of hits and evictions
    windows.py   which sliding-window blocks are kept, and their grade
    manager.py   the end of a request: its last window is kept
    adopt.py     swaps classes of exact types in the managers that vLLM built, or says why not
    packed.py    small blocks for models with recurrent states (core.packed)
    audit.py     the pool's invariants: KVTUNE_AUDIT=1 counts violations, KVTUNE_AUDIT=raise stops the engine

The queues of `first`, the default policy of models with sliding windows. Blocks in use are in no queue.

    a free block                     its queue      given out
    without a hash                   blank          first (newest first, as stock)
    in a window before the slack     speculative    second
    in the slack (for new suffixes)  far, near      third, fourth
    at an output's end               near           fourth
    that stock would keep, too       aged           last, oldest first

The windows that a prompt leaves (d = slack): `[spec] [spec] .. [far, near: d] [prompt's end]`, then `[output's end]`.
Speculative windows end at the last multiples of d, 2d, 4d .. before the slack. Prompts of any length with the same
prefix share them.

`packed.py` makes vLLM use the aggregate rule of `kvtune.layout` by wrapping three functions: the one that sizes hybrid
blocks (state pages are then not padded), the list of layouts (only block-outermost ones stay), and the grouping of
layers (a group gets its layers' common spec).
"""
