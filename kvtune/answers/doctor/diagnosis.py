"""`kvtune doctor`: checks this machine, and a model's effective settings. Loads no weights.

A `Diagnosis` holds the findings about both; their levels decide the exit code.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvtune.answers.doctor.asked import Asked
from kvtune.answers.doctor.boot import compared
from kvtune.answers.doctor.environment import environment
from kvtune.answers.doctor.finding import LEVELS, Finding, Level
from kvtune.answers.doctor.model import ModelReport, examine_model
from kvtune.answers.doctor.tier import tier_findings, tier_of
from kvtune.answers.states.table import States, states_of
from kvtune.base.commands import command
from kvtune.base.errors import EXIT_FAILED, KvtuneError, UsageError
from kvtune.data.layout.models import SHAPES
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.setup import Setup
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


def examine(
    about: Asked, folder: Path, workload: Workload | None = None, *, ask: bool = True, lab: Lab = LAB
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
    if about.tier:
        try:
            tier = tier_of(report, report.block_bytes, about.tier, about.cost)
            report = msgspec.structs.replace(report, tier=tier)
            settings = (*settings, *tier_findings(tier, report.pool_blocks))
        except UsageError as error:
            settings = (*settings, Finding("warning", "tier", error.message, error.hint))
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
