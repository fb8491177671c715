"""Which KV blocks are kept and for how long: the pool, the windows, the layouts. Runs in EngineCore.

Pinning: `windows.py` chooses which window blocks of a prompt get a hash (so that a later prompt can resume there) and
gives each a grade (why it is kept). `queues.py` holds the free blocks. A policy of `core/policies` chooses the queue of
each grade, and the queue to evict from.

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

`packed.py` makes vLLM use the aggregate rule of `kvtune.data.layout` by wrapping three functions: the one that sizes
hybrid blocks (state pages are then not padded), the list of layouts (only block-outermost ones stay), and the
grouping of layers (a group gets its layers' common spec).
"""
