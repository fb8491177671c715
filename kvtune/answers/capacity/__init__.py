"""How many sessions fit an engine: the share of an infinite cache's hits that its pool keeps, by sessions at once.

In: a load of sessions (`kvtune/requests/loads/sessions.py`), an engine's settings. Out: `Capacity`, from exact replays
at the numbers that a search names. Starts simulators, no engine.
"""
