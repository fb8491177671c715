"""vLLM's front end in a run: AsyncLLM inside the host process, or vLLM's own server with an HTTP client.

In: vLLM's arguments and the work folder. Out: a `FrontEnd` (kvtune/lab/engine/driver.py) that the host warms up,
drives and ends; a `Served` record for each request, and vLLM's own counters in COUNTS_FILE.

    no --api-server-count                    --api-server-count N
    host: AsyncLLM, driver                   host: driver, client.py    <- its CPU time is the client's
      |  core, probe                           |  HTTP, a connection a request, server-sent events
      |                                      API server 1 .. N          <- vllm serve: api_servers.py; core, probe
    EngineCore                               EngineCore

A single API server runs in the `vllm serve` process itself. Several are children of that process, and a new connection
goes to the API server that has fewest. The run file has the same tables in both cases. An HTTP client cannot see which
requests were preempted, when EngineCore made a token, and when the front end received a step's tokens: a note in the
run says so.
"""
