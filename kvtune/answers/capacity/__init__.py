"""How many sessions fit an engine: the share of an infinite cache's hits that its pool keeps, by sessions at once.

In: a load of sessions (`kvtune/requests/loads/sessions.py`), an engine's settings. Out: `Capacity`, from estimates
over all numbers of sessions and exact replays at those that are printed. Starts simulators, no engine.
"""
