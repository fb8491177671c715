"""Checks this machine, and a model's effective settings. Loads no weights; starts vLLM only to measure the host.

In: nothing, or a MODEL with vLLM's flags. Out: findings, each with a level, and what to do about it.
Imported by: cli.

    finding.py       one finding: level, topic, text, hint
    diagnosis.py     all findings; their levels decide the exit code
    environment.py   the machine: Python, vLLM, plugins, ptrace, memory, disk; VARIABLES. Imports no vLLM
    device.py        GPUs and their drivers, or the CPU's cores
    model.py         a model's report: groups, blocks, bytes, the shortest prefix that can hit
    ask_vllm.py      facts from vLLM, by a child process
    child.py         the child process: vLLM's configuration, the model on the meta device, a few prompts replayed
    planned.py       facts that the planner works out from config.json
    facts.py         Facts: plain data, from vLLM or the planner
    rules.py         findings from Facts, one function per rule
    text.py          lines for a terminal
    host.py          How many tokens a second this host can drive at most, measured
"""
