"""The instruments of a profiled engine.

In: the environment (`KVTUNE_PROBE`, `KVTUNE_RUN_DIR`), set by `lab/engine/profile.py` and `lab/engine/launch.py`.
Out: one ring file and one status file per engine process, psutil samples, py-spy files; `lab/engine/record.py` merges
them. A probe that fails switches itself off and reports why.

    level    adds                                                               where
    light    pauses, trigger lines, heap size, steps, net allocations a phase   gc.py, steps.py
    types    census of the young generation at every 16th collection            objects/census.py
    sites    a second pass: tracemalloc around sampled collections and steps    objects/sites.py, objects/step_sites.py
"""
