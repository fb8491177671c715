"""Counts the objects that cause collections, by type and allocation site. In engine processes.

Counts are bounded, saved as one JSON file per process, and merged by `engine/culprits.py`.

    census.py       level types: the young generation by type, outside the pause
    sites.py        level sites: tracemalloc between two sampled collections
    step_sites.py   level sites: what one sampled step of EngineCore makes
    tally.py        bounded counts, and their file
"""
