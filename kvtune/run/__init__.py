"""The record of one run: a header and tables of numbers. The contract between measuring and analysis.

In: nothing. Out: `Run(header, tables)`. Imports `errors` and `files` only.
Imported by: analysis, bounds, capacity, cli, doctor, engine, explain, fake_device, probe, report, show, sim, tap, tune,
vllm, watch.
All times of a run are on one clock (CLOCK_MONOTONIC, the same in all processes of a machine), in seconds since the
measuring phase began. Names contain units (`step_us`). docs/run-file.md describes the file.

    types.py     Run, Header, the tables and their columns, SCHEMA
    extras.py    results that only some runs have, as typed optional parts of the header
    file.py      read_run, write_run: a zip of header.json and one .npy array per column; upgrades of older schemas
    machine.py   the machine that a run ran on
    limits.py    cores and memory that this process may use: the machine's, or its container's
    cpu.py       CPU features that change vLLM's decisions (KVTUNE_AVX512_BF16)
    slo.py       limits in milliseconds: `ttft=500,tpot=50`
    scratch.py   temporary folders, removed when no process uses them, also after a kill
    config.py    Defaults of options from a file: `kvtune.toml`, or `[tool.kvtune]` in pyproject.toml
    folder.py    The run files of a folder: which there are, which is the newest, and which files belong to each
    step_work.py how long a step takes by the work in it: a fit to the steps of a recorded run
    durations.py how long engine runs took on this machine, from the run files of a folder
    engines.py   A run of several engines (`--data-parallel-size`), each with its own scheduler and KV cache
    columns.py   A column of a run file: one .npy array, read without numpy's own reader
    signature.py The line by which kvtune knows what it wrote beside a run or a study: `kvtune VERSION, run ID`
    known.py     the fields of a header's free-form parts that analyses read, checked when a run is read
    ranges.py    Ranges of the numbers in a run file or a study: part of their types
"""
