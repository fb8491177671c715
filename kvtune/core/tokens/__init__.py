"""Sampled tokens as one array from the worker to the scheduler. Installed by `core.plugin`.

rows.py      rows of sampled tokens: packed as int32, made into lists when first touched
runners.py   where workers (CPU, GPU V1 async, V2) make rows
outputs.py   `OneToken` in the outputs that EngineCore encodes
install.py   packed rows in the pickle of a model's output; the switch
"""
