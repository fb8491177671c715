"""The `--json` object of `kvtune evidence`: `kvtune/evidence` makes it, `kvtune/report` draws it. Plain data."""

from __future__ import annotations

from typing import TypedDict

IDENTITY = "evidence of published results"
"""By which page and results are known (`kvtune/run/signature.py`)."""


class FigureResult(TypedDict):
    """One judged figure of a claim: a ratio with its 95 % interval. `runs` are of each side."""

    title: str
    work: str
    ratio: float | None
    low: float | None
    high: float | None
    runs: int
    direction: str
    published: float | None
    verdict: str
    commands: list[str]


class ClaimResult(TypedDict):
    """`verdict`: how many figures hold, in words. `why`: what failed, and what limits the gain here."""

    name: str
    title: str
    published: str
    verdict: str
    figures: list[FigureResult]
    why: list[str]


class MachineResult(TypedDict):
    """Where the figures were measured."""

    vllm: str
    python: str
    kvtune: str
    cpu: str
    cores: int
    device: str


class EvidenceResult(TypedDict):
    schema: int
    made_at: str
    machine: MachineResult
    scale: str
    gpu: str
    runs: int
    wall_s: float
    command: str
    claims: list[ClaimResult]
