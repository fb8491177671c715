"""The sections of a run's page. To add one, add a module here; no list names the sections.

PLACE      where it stands; a module without one is no section
LIMITS     the verdict's limits that it is about: the costliest limit's section comes first
section    RunAnalysis -> Section, or None where the run has nothing of it
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from kvtune.analysis.run import RunAnalysis
from kvtune.report.parts import Section


def run_sections(analysis: RunAnalysis) -> list[Section]:
    limits = analysis.verdict.limits

    def place(module: ModuleType) -> tuple[float, int]:
        cost = next(
            (at for at, limit in enumerate(limits) if limit in getattr(module, "LIMITS", ())), len(limits)
        )
        return (cost if module.PLACE else -1, module.PLACE)

    made = (module.section(analysis) for module in sorted(modules(), key=place))
    return [section for section in made if section is not None]


def modules() -> Iterator[ModuleType]:
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        if hasattr(module, "PLACE"):
            yield module
