"""The record of one run: a header and tables of numbers. The contract between measuring and analysis.

In: nothing. Out: `Run(header, tables)`. Imports `errors` and `files` only.
All times of a run are on one clock (CLOCK_MONOTONIC, the same in all processes of a machine), in seconds since the
measuring phase began. Names contain units (`step_us`). docs/run-file.md describes the file.
"""
