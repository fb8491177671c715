"""The command line: one module per command, which parses, calls the other packages and prints.

app.py        the typer app, COMMANDS, the split at `--`, the one place that prints a KvtuneError
options.py    options that several commands share, declared once, and checks of their values
settings.py   `--set core.NAME=VALUE`, a recipe, the choice of core
completion.py completions for the Tab key: models, workloads and their keys, knobs, recipes, run files
notices.py    Standard error: `--quiet` drops progress and notes
runs.py       `kvtune runs [PATH]..`: the runs under the output folder, or those named; deletes them after asking
start.py      the entry point, which handles signals first
signals.py    How signals end a command
query.py      a command's options as one object; refuses an option that the call would not read
schema.py      `kvtune schema COMMAND`: the JSON Schema of a command's `--json`
diff.py        `kvtune diff`: what another version of vLLM changes, before it is deployed
watch.py, tap.py, record.py, profile.py, ablate.py, doctor.py, bounds.py, trace.py, capacity.py, explain.py,
explain_log.py, compare.py, report.py, export.py, sweep.py, tune.py, recipe.py, serve.py, prepare.py    a command each
(ablate.py: `profile --ablate`)
views/        progress and results on a terminal
"""
