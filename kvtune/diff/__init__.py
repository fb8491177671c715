"""What another version of vLLM changes for models and a load, before it is deployed: `kvtune diff OLD NEW`.

In: two versions, made into environments once, or environments that are there; models, or a load. Out: a `Diff`, which
is `--json`, and its Document. Each version is asked in a process of its own environment, without an engine.
Imported by: cli.

    environments.py   an environment of a version, made from the registries; a folder's; a checkout's
    answers.py        what is asked, and what a version answers. Plain data
    child.py          the process that answers, with the other environment's vLLM
    asking.py         asks two versions at once
    replays.py        a load through both versions' schedulers, and where they part
    result.py         Diff: plain data
    differences.py    a Diff from two answers. Pure
    limits.py         --fail-on
    document.py       a Diff as a Document
"""
