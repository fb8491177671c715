"""Makes, checks, finds and serves recipes.

`kvtune/recipe.py` has their format; vLLM's processes read them through `core.settings`.

A recipe holds no sizes of one machine, has a checksum that covers all of it, and may set only what
`recipe.ENGINE_SETTINGS` lists.

    make.py      a confirmed winner -> a recipe with its evidence
    verify.py    a recipe's evidence measured again, and for which model, device and version it may be used
    shelf.py     the recipes at hand; config.yaml and env.sh for plain `vllm serve`
    serving.py   MODEL and recipe -> the command that becomes `vllm serve`
"""
