"""Many steps in one call, with the decisions of single steps. Simulator's process only.

what is not run one by one                          what stands in for it     why decisions stay the same
single plain decode steps                           strides (stride.py)       same calls of the KV manager, same order
a stride's steps, where one full-attention group    leaps (leap.py)           hits and times only; other block ids
  lives in stock's pool (modes jump, coarse)
k decode steps while no request comes or goes       jumps (jump.py)           vLLM takes k - 1 tokens as accepted drafts
requests that only decode, in steps that prefill    mixed.py                  they head the list and are served first
stock's loops over blocks                           pool.py                   every field of every block is stock's
"""
