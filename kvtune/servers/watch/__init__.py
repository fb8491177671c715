"""A running server seen from outside: its metrics, its KV events, and what they say about its prefix cache.

In: the URL of a stock `vllm serve`. Out: `Snapshot`s for a screen or a script, and a `Run` with `source = "server"`.
Runs in the command's process. Imports no vLLM; sends the server no load and changes nothing.
A *look* reads the counters and events once. A *stretch* is the blocks that one request stores in one step.
"""
