"""The sections of a run's page. To add one, add a module here; no list names the sections.

PLACE      the section's position on the page, ascending; a module without it is not a section
LIMITS     the verdict's limits that the section is about; sections of the costliest limits come first
section    makes the Section of a RunAnalysis, or returns None if the run has no data for it
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from kvtune.data.show.parts import Section
from kvtune.reading.analysis.run import RunAnalysis


def run_sections(analysis: RunAnalysis) -> list[Section]:
    limits = analysis.verdict.limits

    def place(module: ModuleType) -> tuple[float, int]:
        cost = next(
            (number for number, limit in enumerate(limits) if limit in getattr(module, "LIMITS", ())),
            len(limits),
        )
        return (cost if module.PLACE > 1 else -1, module.PLACE)

    made = (module.section(analysis) for module in sorted(modules(), key=place))
    return [section for section in made if section is not None]


def modules() -> Iterator[ModuleType]:
    for module_info in iter_modules(__path__):
        module = import_module(f"{__name__}.{module_info.name}")
        if hasattr(module, "PLACE"):
            yield module
