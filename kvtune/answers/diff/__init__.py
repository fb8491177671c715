"""What another version of vLLM changes for models and a load, before it is deployed: `kvtune diff OLD NEW`.

In: two versions, made into environments once, or environments that are there; models, or a load. Out: a `Diff`, which
is `--json`, and its Document. Each environment's Python asks its vLLM, without an engine.
"""
