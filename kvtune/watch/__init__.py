"""A running server seen from outside: its metrics, its KV events, and what they say about its prefix cache.

In: the URL of a stock `vllm serve`. Out: `Snapshot`s for a screen or a script, and a `Run` with `source = "server"`.
Runs in the command's process. Imports no vLLM; sends the server no load and changes nothing.
A *look* reads the counters and events once. A *stretch* is the blocks that one request stores in one step.
Imported by: cli, tap.

    client.py    the one client for what servers say: no redirect, limits of bytes, seconds and nesting
    server.py    questions over HTTP: /metrics, /version, /kv_event_sources, /tokenize
    rendering.py text of a log by the server's renderer, or its /tokenize
    metrics.py   what /metrics says at one moment, and what happened between two
    endpoints.py which addresses of KV events kvtune opens
    events.py    KV events: what they say, checked; a reader that notices what it lost
    blocks.py    which blocks the cache holds and held, rebuilt from the events
    account.py   misses by cause from events alone: whole blocks
    totals.py    the server's misses divided by what the events told, look by look
    requests.py  a log's requests joined with the events: the cause of every prompt token
    served.py    the server's own times of its steps and requests, for a recording
    timeline.py  what a server did from look to look, as rows of a recording
    watching.py  one look after another: metrics and account as a Snapshot
    screen.py    a snapshot as lines that fit a terminal; the live view and its keys
    record.py    what was seen, as a run file
    export.py    the account as Prometheus metrics; the board and the alert rules in dashboards/
"""
