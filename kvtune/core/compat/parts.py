"""Which parts of the core can load into the installed vLLM, and why the others stand aside. Imports nothing of vLLM.

A part loads where one known version of vLLM has exactly the symbols that it needs: the installed version's own manifest
where there is one, else any. So a new vLLM keeps what it has not changed. The others run as vLLM's own code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvtune.core.compat import manifest as compat
from kvtune.core.compat.symbols import PARTS, Symbol

OLDEST = "0.29.0"
"""Probes, run files and pages were tried from this version on."""
INSTEAD = "vLLM's own code runs in place of "
"""What the line about parts that stand aside says; the page finds it by this."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Of the installed vLLM: its version, and each part that stands aside, with the symbol that is the reason."""

    version: str
    known: bool
    aside: dict[str, str]

    def line(self, asked: Collection[str] = tuple(PARTS)) -> str:
        """One line for the parts that were asked for and stand aside; empty when none does."""
        reasons: dict[str, list[str]] = {}
        for part, why in self.aside.items():
            if part in asked:
                reasons.setdefault(why, []).append(part)
        if not reasons:
            return ""
        parts = "; ".join(f"{', '.join(some)} ({why})" for why, some in reasons.items())
        return f"{self.about()}: {INSTEAD}{parts}"

    def about(self) -> str:
        """The version, and whether kvtune knows it."""
        return unknown(self.version) or f"vLLM {self.version}"


def standing() -> Standing:
    """Compare the installed vLLM, symbol by symbol, with what the parts need."""
    version = compat.installed_version()
    versions = compat.known_versions()
    known = version in versions
    manifests = [compat.read(v) for v in ([version] if known else nearest_first(version, versions))]
    source = compat.Source()
    aside: dict[str, str] = {}
    for name, part in PARTS.items():
        why = next((f"{other} stands aside" for other in part.requires if other in aside), "")
        # The part's own reason says more than that of the part it rests on.
        why = _difference(source, manifests, part.symbols()) or why
        if why:
            aside[name] = why
    return Standing(version, known, aside)


def unknown(version: str) -> str:
    """One line for a version without a manifest; empty for one with."""
    known = compat.known_versions()
    version = version.partition("+")[0]
    if version in known:
        return ""
    return f"vLLM {version or '(none)'} is not one that kvtune knows ({', '.join(known)})"


def differing(parts: Collection[str]) -> str:
    """The first reason for which one of these parts would stand aside; empty where all can load."""
    aside = standing().aside
    return next((aside[part] for part in parts if part in aside), "")


def _difference(source: compat.Source, manifests: list[compat.Manifest], symbols: Iterable[Symbol]) -> str:
    """The first difference from the first manifest, unless a manifest has none."""
    wanted = tuple(symbols)
    first = ""
    for manifest in manifests:
        why = next((w for symbol in wanted if (w := source.difference(manifest, symbol))), "")
        if not why:
            return ""
        first = first or why
    return first


def nearest_first(version: str, versions: list[str]) -> list[str]:
    """Known versions: the newest that is not newer than this one, then older ones, then newer ones."""
    mine = compat.release(version)
    older = [v for v in versions if compat.release(v) <= mine]
    return older[::-1] + [v for v in versions if v not in older]
