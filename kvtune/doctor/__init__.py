"""What this machine has, and what a model's settings come to. No engine, no weights.

In: nothing, or a MODEL with vLLM's flags. Out: findings, each with a level and the next thing to do.
Imported by: cli.

    finding.py       one finding: level, subject, text, hint
    diagnosis.py     all of them together; levels decide the exit code
    environment.py   the machine: Python, vLLM, devices, plugins, ptrace, memory, disk; VARIABLES. Imports no vLLM
    model.py         a model: asks the child process, or config.json and the planner where vLLM is missing
    child.py         the child process: vLLM's configuration, the model on the meta device, a few visits replayed
    facts.py         what either gives: plain data
    rules.py         Facts -> findings, one function a rule
    text.py          lines for a terminal
"""
