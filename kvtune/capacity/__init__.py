"""How many sessions fit an engine: the share of an infinite cache's hits that its pool keeps, by sessions at once.

In: a load of sessions (`kvtune/workload/sessions.py`), an engine's settings. Out: `Capacity`, from estimates over all
numbers of sessions and exact replays at those that are printed. Starts simulators, no engine.
Imported by: cli, tune.

    estimate.py   an LRU cache over whole conversations: milliseconds, within two points above 75 %
    search.py     the largest N for a share, and the N at which a device has no room left, by estimates
    replays.py    exact replays of N sessions, and the figures of one
    remedies.py   what moves the answer: settings of the engine that are worth a replay
    replicas.py   how many engines behind a router a load needs
    question.py   the whole account: search, replays, remedies
    result.py     the answer as data
    document.py   What `kvtune capacity` says of its answer: a headline, then the curve, what moves it
"""
