"""Decode outputs as columns (arrays) from EngineCore to the caller. Runs in EngineCore and in AsyncLLM's front end.

    EngineCore                                   front end
      outputs of a step, one object a request      the columns, put into the requests' states in one loop
        | plain tokens alone?                        | only callers that have something to take are woken
        v                                            v
      ONE output: slots, tokens  ----socket---->   a caller takes what came since it last took

The front end tells each EngineCore that it reads columns by aborting a request id that cannot exist; a stock EngineCore
ignores unknown ids. EngineCore sends columns only to clients that have told it so, and all other outputs as stock does.
So each side also works with a stock counterpart.
"""
