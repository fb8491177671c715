"""Outputs of steps that decode, as columns from EngineCore to the caller. EngineCore and the front end of AsyncLLM.

    EngineCore                                   front end
      outputs of a step, one object a request      the columns, put into the requests' states in one loop
        | plain tokens alone?                        | only callers that have something to take are woken
        v                                            v
      ONE output: slots, tokens  ----socket---->   a caller takes what came since it last took

The front end tells each EngineCore that it reads columns by aborting a request that cannot exist. An
EngineCore without this part ignores that, as it ignores every unknown id. An EngineCore sends columns to no
client that has not said so, and every other output as stock does. So each side also works with a stock one on
the other side.

message.py     the one output that carries a step's columns
outlet.py      EngineCore: which outputs are plain, and the slots of their requests
rows.py        which requests are served by column, and what a caller takes
columns.py     the front end: columns into the requests' states
metrics.py     inter-token latencies of a step, counted at once
install.py     what is replaced in vLLM; the switch
"""
