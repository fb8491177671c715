"""Searches over settings: sweeps, tuning, and the recipes that tuning writes.

In: a model, a workload, vLLM's flags. Out: trials (journalled), a verdict, a recipe. docs/tuning.md is for users. The
data of a study (`Trial`, `StudyResult`, .., its set-up in files) is in `answers/tune/result.py`; `report` draws from
it.

    a sweep, a guard: lists of plans ---+
    search.py: Optuna asks, is told ----+--> trials/run.py `Trials`: each plan once, where the set-up's device says:
    simplify.py, recipes/verify.py -----+        replays, two at once; or engines, one after the other
    confirm.py: stock, A, B, B, A, .. --+             |
                                                 trials/journal.py: a trial is on disk before anyone hears of it
    recipes/make.py <-- the winner -------------------+
"""
