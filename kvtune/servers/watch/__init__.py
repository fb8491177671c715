"""A running server seen from outside: its metrics, its KV events, and what they say about its prefix cache.

In: the URL of a stock `vllm serve`, or of several. Out: `Snapshot`s for a screen or a script, and a `Run` with `source
= "server"`. Runs in the command's process. Imports no vLLM; sends the servers no load and changes nothing.

A *look* reads the counters and events once. A *stretch* is the blocks that one request stores in one step.

    cache.py     what a rank holds, by its events                    blocks.py has the blocks of one rank
    prompt.py    one prompt: its hit, its chunks, its causes         elsewhere.py, others.py: what other servers had
    account.py   all prompts: when each opens, grows, is judged      lists.py: what they share, for the screen
    totals.py    counters and events joined: the cause of each miss  counts.py: the sums
    requests.py  the same for each line of a log, by the cache alone
    watched.py   one server's life; servers.py a list of them; record.py writes it all as a run

When a miss is counted, and what waits for what: account.py and totals.py say it at their top.
"""
