"""vLLM's front end in a run: AsyncLLM inside the host process, or vLLM's own server with an HTTP client.

In: vLLM's arguments and the work folder. Out: a `FrontEnd` (kvtune/engine/driver.py) that the host warms up, drives and
ends; a `Served` record for each request, and vLLM's own counters in COUNTS_FILE.
Imported by: sim.

    no --api-server-count                    --api-server-count N
    host: AsyncLLM, driver                   host: driver, client.py    <- its CPU time is the client's
      |  core, probe                           |  HTTP, a connection a request, server-sent events
      |                                      API server 1 .. N          <- vllm serve: api_servers.py; core, probe
    EngineCore                               EngineCore

A single API server runs in the `vllm serve` process itself. Several are children of that process, and a new connection
goes to the API server that has fewest. The run file has the same tables in both cases. An HTTP client cannot see which
requests were preempted, when EngineCore made a token, and when the front end received a step's tokens: a note in the
run says so.

config.py        vLLM's configuration: from flags, and as a run file describes it
async_llm.py     AsyncLLM in the host process, and the driver that asks it
server.py        starts `vllm serve`, waits until each of its API servers answers, ends it
client.py        the driver that asks a server: HTTP in, times of tokens out
api_servers.py   what `vllm serve` runs in a run: the device's shape, its facts for the host
key.py           lets only that client ask the server
messages.py      what `vllm serve` leaves for the host, and what its answers say of a request
metrics.py       a server's /metrics as the counters of a run
processes.py     what each process of a run is; what a run through a server cannot record
"""
