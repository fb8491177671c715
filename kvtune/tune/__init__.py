"""Searches over settings: sweeps, tuning, and the recipes that tuning writes.

In: a model, a workload, vLLM's flags. Out: trials (journalled), a verdict, a recipe.
docs/tuning.md is for users.
Imported by: cli.
The data of a study (`Trial`, `StudyResult`, .., its set-up in files) is in `analysis/study.py`; `report` draws from it.

    trials/setup.py, space/     --> settings --> trials/run.py (sim/simulators.py): two at once
                                       |
       search.py (Optuna, seeded) -----+     --> trials/run.py: one profiled run, one at a time
                                                         |
    sweep.py: trials -> trials/journal.py             confirm.py: stock, A, B, B, A, .. stock
                                                         |
                                                      recipes/make.py --> recipe (TOML)
"""
