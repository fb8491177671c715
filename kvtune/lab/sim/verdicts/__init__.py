"""Counts every prompt token of a replay as a hit or under exactly one cause of miss. Simulator's process only.

The listener wraps methods of one scheduler's objects and changes no decision; it works with stock and with the kvtune
core. At each new request's lookup it repeats vLLM's own lookup on better and better caches. Each finds more tokens:

    0 ...... hit ........ alone ...... ever ......... reachable ... whole ...... seen ... prompt
       hits  | lagging_group | evicted | not_retained | last_token | partial_block | cold
             this engine   the group   no eviction   every window   no token to   token by
                           that holds  ever          and state      recompute     token
                           least                     kept

Speculative decoding adds two causes: `draft_group` before `lagging_group`, and `eagle_drop` before `last_token`.
"""
