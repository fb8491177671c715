"""The slow gaps between a run's tokens, and the cause of each. Pure.

In: a `Run`. Out: `Stalls`: every gap over the limit has one largest cause; the causes' parts add up to the time by
which the gaps exceed the median. A token's way, and the causes that can delay it there:

    EngineCore: [between steps][ schedule | execute | update ] -> front end -> client
                 engine_wait     prefill, batch, device         front_end    client
                 collection, off_cpu: in any process on the way; preemption: steps without the request
"""
