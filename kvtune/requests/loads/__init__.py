"""What is sent to an engine, and when: the same spec gives the same tokens on every machine.

In: a spec `name:key=value,..` or a trace file. Out: a `Workload`: requests whose prompts are spans of seeded token
streams (no tokens yet). Imports `children`, `errors`, `files` and `units` only.
docs/workloads.md lists the workloads for people.
"""
