"""Searches over settings: sweeps, tuning, and the recipes that tuning writes.

In: a model, a workload, vLLM's flags. Out: trials (journalled), a verdict, a recipe.
docs/tuning.md is for users.
Imported by: cli.
The data of a study (`Trial`, `StudyResult`, .., its set-up in files) is in `analysis/study.py`; `report` draws from it.

    trials/setup.py, space/     --> settings --> trials/simulated.py (sim/simulators.py): two at once
                                       |
       search.py (Optuna, seeded) -----+     --> trials/engine.py: one profiled run, one at a time
                                                         |
    sweep.py: trials -> trials/journal.py             confirm.py: stock, A, B, B, A, .. stock
                                                         |
                                                      recipes/make.py --> recipe (TOML)

    sweep.py       named knobs: settings in, trials out
    tune.py        stock on the engine (its pool and step cost are simulated), search, finalists, recipe or "no winner"
    search.py      the search in simulation
    confirm.py     the experiment (`engine/experiment.py`) of stock and the finalists, and what it shows
    guard.py       `--guard W`: other workloads that the settings must not hurt
    objective.py   the figure trials are judged by
    ties.py        which of equal trials is chosen, and why
    simplify.py    knobs that change nothing are left out
    effects.py     what each knob did
    storage.py     Optuna's study, in memory or in a database shared by several machines
    study.py       a journal, read at any moment of its life, as the `StudyView` that its page draws
    space/         what may be searched: knobs, groups, legal values, grids
    trials/        one setting tried once, and the journal
    recipes/       a confirmed winner as a recipe; its evidence measured again; its files for plain vLLM
"""
