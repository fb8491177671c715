"""Makes, checks, finds and serves recipes.

`kvtune/data/recipe.py` defines the file format; vLLM's processes read recipes through `core.settings`.

A recipe holds no machine-specific sizes, has a checksum over its whole content, and of vLLM's settings may set only
those of `ENGINE` in `kvtune/data/knobs.py`.
"""
