"""Makes, checks, finds and serves recipes.

`kvtune/recipe.py` defines the file format; vLLM's processes read recipes through `core.settings`.

A recipe holds no machine-specific sizes, has a checksum over its whole content, and of vLLM's settings may set only
those of `ENGINE` in `kvtune/knobs.py`.

    make.py      a confirmed winner -> a recipe with its evidence
    sessions.py  the load that a recipe holds for, from `kvtune capacity`, and replayed again
    verify.py    a recipe's evidence measured again, and for which model, device and version it may be used
    shelf.py     the recipes at hand; config.yaml and env.sh for plain `vllm serve`
    serving.py   MODEL and recipe -> the command that becomes `vllm serve`
"""
