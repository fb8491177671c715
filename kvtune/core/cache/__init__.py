"""Which KV blocks are kept and for how long: the pool, the windows, the layouts. Runs in EngineCore.

Pinning decides here: `windows.py` chooses which window blocks of a prompt get a hash (so that a later prompt can
resume there) and gives each a grade; `queues.py` holds the free blocks; a policy of `core/policies` decides
the queue of a grade and the order of eviction.

    queues.py    the free blocks in queues that a policy orders
    quick.py     vLLM's BlockPool with its loops over blocks inlined; the simulator has it, too
    pool.py      PolicyPool: quick.py's pool with several free queues; tells the policy of hits and evictions
    windows.py   which sliding-window blocks are kept, and their grade
    manager.py   the end of a request: its last window is kept
    adopt.py     swaps classes of exact types in the managers that vLLM built, or says why not
    packed.py    small blocks for models with recurrent states (core.packed)
    audit.py     the pool's invariants: KVTUNE_AUDIT=1 counts violations, KVTUNE_AUDIT=raise stops the engine

The queues of `first`, the default of models with sliding windows:

    a block is                                        and is given out
    in use (ref_cnt > 0)             no queue
    free without a hash              blank            first (newest first, as stock)
    a window at a doubling distance  speculative      then
    slack: for unknown suffixes      far, near        then far, then near
    at an output's end               near             with these
    what stock keeps                 aged             last, oldest first

Which windows a prompt leaves (d = slack): `[spec] [spec] .. [far, near: d] [prompt's end]`, then `[output's end]`.
Speculative windows end at the last multiples of d, 2d, 4d .. before the slack, which prompts with the same
prefix share, whatever their length.

`packed.py` makes vLLM run the aggregate rule of `kvtune.layout` with three wraps: the hybrid block size (state pages
are not padded), the list of layouts (block-outermost only), and groups that name their layers' one spec.
"""
