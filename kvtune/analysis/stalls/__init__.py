"""The slow gaps between a run's tokens, and the cause of each. Pure.

In: a `Run`. Out: `Stalls`: every gap over the limit has one largest cause; the causes' parts add up to the time by
which the gaps exceed the median. A token's way, and the causes that can delay it there:

    EngineCore: [between steps][ schedule | execute | update ] -> front end -> client
                 engine_wait     prefill, batch, device         front_end    client
                 collection, off_cpu: in any process on the way; preemption: steps without the request

    causes.py     the causes: their names, what to try
    gaps.py       gaps between tokens, and the step that made each token
    engine.py     what each step took longer than usual, by cause
    delivery.py   when the front end and the client got a token, and what delayed that
    off_cpu.py    when a process waited for a CPU or was stopped
    spans.py      time that spans cover
    account.py    `stalls(run)`: the gaps' excess by cause, the worst of them
    evidence.py   what the record says about one of the worst: requests, collection, process
    sides.py      slow tokens of a comparison, by side and cause
"""
