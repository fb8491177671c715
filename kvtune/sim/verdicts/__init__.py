"""Where every prompt token of a replay went: hit, or exactly one cause of miss. Simulator's process only.

The observer wraps methods of one scheduler's own objects and changes no decision, so it sees stock and the kvtune core
alike. At each new request's lookup it asks vLLM's own lookup code again, on pools that hold more:

    0 ...... hit ........ alone ...... ever ......... reachable ... whole ...... seen ... prompt
       hits  | lagging_group | evicted | not_retained | last_token | partial_block | cold
             this engine   the group   no eviction   every window   no token to   token by
                           that holds  ever          and state      recompute     token
                           least                     kept

    causes.py     boundaries -> tokens by cause; they cover a prompt exactly
    listener.py   the lookups, and the pools that hold more
    observer.py   the replay's observer behind `SimSettings(verdicts=True)`
"""
