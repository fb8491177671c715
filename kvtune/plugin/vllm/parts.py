"""Finds which parts of the core can load into the installed vLLM, and why others cannot.

Imports nothing of vLLM. A part loads if the symbols that it needs are the same as in a known version of vLLM: in the
installed version if that has a manifest, else in any. So a new vLLM loads all parts whose symbols did not change. For
the other parts vLLM's own code runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvtune.data.installed import INSTEAD, installed_version, release
from kvtune.plugin.vllm import manifest
from kvtune.plugin.vllm.symbols import PARTS, Symbol

OLDEST = "0.29.0"
"""The oldest version of vLLM with which probes, run files and pages were tried."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The installed vLLM: its version, and in `left_out` each part that cannot load, with the reason."""

    version: str
    known: bool
    left_out: dict[str, str]

    def line(self, asked: Collection[str] = tuple(PARTS)) -> str:
        """Return one line about the parts that were asked for and cannot load; empty if all can."""
        reasons: dict[str, list[str]] = {}
        for part, why in self.left_out.items():
            if part in asked:
                reasons.setdefault(why, []).append(part)
        if not reasons:
            return ""
        parts = "; ".join(f"{', '.join(some)} ({why})" for why, some in reasons.items())
        return f"{self.about()}: {INSTEAD}{parts}"

    def about(self) -> str:
        """Return the version, with a note if kvtune does not know that version."""
        return unknown(self.version) or f"vLLM {self.version}"


def standing(parts: Collection[str] = tuple(PARTS)) -> Standing:
    """Compare the installed vLLM, symbol by symbol, with what these parts need."""
    version = installed_version()
    versions = manifest.known_versions()
    listed = version in versions
    manifests = [manifest.read(v) for v in ([version] if listed else nearest_first(version, versions))]
    source = manifest.Source()
    left_out: dict[str, str] = {}
    for name in parts:
        if why := _difference(source, manifests, PARTS[name].symbols()):
            left_out[name] = why
    return Standing(version, listed, left_out)


def unknown(version: str) -> str:
    """Return one line about a version without a manifest; empty for a version that has one."""
    versions = manifest.known_versions()
    version = version.partition("+")[0]
    if version in versions:
        return ""
    return f"vLLM {version or '(none)'} is not one that kvtune knows ({', '.join(versions)})"


def differing(parts: Collection[str]) -> str:
    """Return the first reason why one of these parts cannot load; empty if all can."""
    return next(iter(standing(parts).left_out.values()), "")


def _difference(
    source: manifest.Source, manifests: list[manifest.Manifest], symbols: Iterable[Symbol]
) -> str:
    """Return the first difference from the first manifest; empty if any manifest has no difference."""
    wanted = tuple(symbols)
    first = ""
    for version_manifest in manifests:
        why = next(filter(None, (source.difference(version_manifest, symbol) for symbol in wanted)), "")
        if not why:
            return ""
        first = first or why
    return first


def nearest_first(version: str, versions: list[str]) -> list[str]:
    """Sort known versions: first the newest that is not newer than `version`, then older ones, then newer ones."""
    older = [v for v in versions if release(v) <= release(version)]
    return older[::-1] + [v for v in versions if v not in older]
