"""`kvtune doctor`: checks this machine, and a model's effective settings. Loads no weights.

A `Diagnosis` holds the findings about both; their levels decide the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtune.answers.doctor.asked import asked as asked_about
from kvtune.answers.doctor.boot import Boot, compared, read_log
from kvtune.answers.doctor.environment import environment
from kvtune.answers.doctor.finding import LEVELS, Finding, Level
from kvtune.answers.doctor.line import checked, read_line
from kvtune.answers.doctor.model import ModelReport, examine_model
from kvtune.answers.states.table import States, states_of
from kvtune.base.commands import command
from kvtune.base.errors import EXIT_FAILED, KvtuneError, UsageError
from kvtune.data.layout.models import SHAPES
from kvtune.data.platforms import LARGE_GPU, Platform
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.platform import engines
from kvtune.lab.setup.setup import Pool, Setup
from kvtune.requests.types import Workload


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What `kvtune doctor` answers: its `--json`. `errors`, `warnings`: how many findings are of that level.

    `states`: what flags keep of recurrent states, for the workload.
    """

    schema: int = 1
    errors: int
    warnings: int
    environment: tuple[Finding, ...]
    settings: tuple[Finding, ...] = ()
    model: ModelReport | None = None
    states: States | None = None

    def exit_code(self, fail_on: Level) -> int:
        """Return 1 if a finding has level `fail_on` or worse, else 0."""
        findings = (*self.environment, *self.settings)
        worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
        return EXIT_FAILED if worst >= LEVELS.index(fail_on) else 0


def diagnosed(
    environment: tuple[Finding, ...], settings: tuple[Finding, ...] = (), model: ModelReport | None = None
) -> Diagnosis:
    levels = [finding.level for finding in (*environment, *settings)]
    return Diagnosis(
        errors=levels.count("error"),
        warnings=levels.count("warning"),
        environment=environment,
        settings=settings,
        model=model,
    )


def shapes() -> Finding:
    """List the published models whose shapes are built in."""
    use = f"`{command('doctor', 'gpt-oss-20b', '--like-device', 'h100')}`, or --on sim --like-device h100"
    return Finding("ok", "models", f"built-in shapes of published models: {', '.join(SHAPES)}", use)


class About(NamedTuple):
    """What is asked about: a model under flags, on the device of --like-device or this one. `findings`: of its line.

    `pool`: what the flags do not say of it. `boot`: the log that the prediction is held against.
    """

    model: str | None
    flags: Sequence[str] = ()
    like: Platform | None = None
    pool: Pool = Pool()
    findings: tuple[Finding, ...] = ()
    boot: Boot | None = None


def asked_of(model: str | None, words: Sequence[str], log: Path | None, like: Platform | None) -> About:
    """Return what to ask, from what follows `--` (MODEL's flags, or a launch line) or from a server's log."""
    boot = read_log(log) if log is not None else None
    if boot is None and (not words or (model is not None and words[0].startswith("-"))):
        return About(model, words, like)
    if boot is None and words[0].startswith("-"):
        why = "what follows -- is read only with MODEL: flags are for one, a launch line begins with its program"
        raise UsageError(why, "add MODEL, or leave what follows -- out")
    line = read_line(words) if boot is None else boot.line
    stands = like is None and engines().kind == "cpu"  # an H100 stands for the device, of any memory
    asked = asked_about(line if model else checked(line), model, memory=not stands and boot is None)
    note = Finding(
        "note", "device", f"as on {LARGE_GPU.title}, whose memory is not assumed", "--like-device NAME"
    )
    findings = (*asked.findings, note) if stands else asked.findings
    return About(asked.model, asked.flags, LARGE_GPU if stands else like, asked.pool, findings, boot)


def examine(
    about: About, folder: Path, workload: Workload | None = None, *, ask: bool = True, lab: Lab = LAB
) -> Diagnosis:
    """Check this machine and, if a model is asked about, that model under vLLM's flags.

    `folder`: where runs would be written. `workload`, `ask`: as for `examine_model`.
    """
    machine = environment(folder)
    model, engine_args, like = about.model, about.flags, about.like
    if model is None:
        return diagnosed((*machine, shapes()))
    report, settings = examine_model(model, engine_args, workload, like, ask=ask, pool=about.pool)
    settings = (*about.findings, *(compared(about.boot, report) if about.boot else ()), *settings)
    if workload is None or not report.hybrid or not report.caching:
        return diagnosed(machine, settings, report)
    try:
        setup = Setup(model=model, engine_args=list(engine_args), platform=like, core="kvtune").sized()
        with lab.simulators(model, like) as simulators:
            states = states_of(setup, workload, simulators.outcomes)
    except KvtuneError as error:
        why = Finding("note", "states", f"not replayed for the workload: {error.message}", error.hint)
        return diagnosed(machine, (*settings, why), report)
    return msgspec.structs.replace(diagnosed(machine, settings, report), states=states)
