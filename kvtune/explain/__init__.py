"""Where every prompt token of a run went, and which setting would have made it a hit.

In: a `Run`. Out: an explanation and remedies, each of them replayed. Where the run's own hits differ from the
replay's, the explanation says so and stores nothing in the run.
Imported by: cli.

    explanation.py   has the run replayed with `SimSettings(verdicts=True)` and adds its causes up
    remedies.py      settings that might help the largest causes; nothing is printed that was not replayed
    text.py          lines for a terminal, JSON
"""
