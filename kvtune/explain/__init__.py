"""Counts every prompt token of a run as a hit or under one cause of miss, and tries settings against the causes.

In: a `Run`. Out: an explanation and remedies, each of them replayed. Where the run's own hits differ from the
replay's, the explanation says so and stores nothing in the run.
Imported by: cli.

    explanation.py   replays the run with `Simulated(verdicts=True)` and sums up its causes
    speed.py         the step cost of a server of which only its requests' times are known
    replays.py       replays of the run: of its one engine, or of each of several with its own requests
    remedies.py      settings that may help against the largest causes; each is replayed before it is printed
    text.py          lines for a terminal, JSON
    advice.py        the replays that `profile` adds to its run: the other core, and remedies
    log.py           a log of requests: where prompts differ from earlier ones, and their hits if mended
"""
