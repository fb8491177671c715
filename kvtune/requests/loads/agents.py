"""Draws sessions of coding agents from published quantiles.

The shapes are those of 31 recorded sessions (callanjfox/kv-cache-tester, Apache-2.0, docs/workloads.md): each quantity
is its median times the recorded quantile's ratio to the recorded median.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtune.requests.loads.draws import numbers
from kvtune.requests.loads.sessions import Node, Session
from kvtune.requests.types import Span

AT = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
THINK = (0.5, 0.5, 0.6, 1.0, 2.6, 16.0, 45.0, 320.0, 1200.0)
TURNS = (0.2, 0.2, 0.6, 1.0, 1.9, 2.9, 3.5, 3.7, 5.3)
CONTEXT = (0.55, 0.59, 0.91, 1.0, 1.58, 3.1, 3.4, 5.0, 5.5)
NEW = (0.03, 0.05, 0.25, 1.0, 3.8, 11.0, 21.7, 51.0, 80.0)
OUTPUT = (0.1, 0.36, 0.64, 1.0, 1.7, 3.6, 6.1, 16.6, 30.0)
"""Ratios to the median at `AT`. `NEW`: tokens of tools' results and of the user in a turn."""

AGENTS_AT_ONCE = 3
AGENT_TURNS = 10
AGENT_PROMPT = 0.5


@dataclass(frozen=True, slots=True)
class Medians:
    """Medians of what is drawn. `window`: longer ones are compacted; `subagents`: share of turns with some."""

    turns: int
    context: int
    tools: int
    output: int
    think: float
    window: int
    subagents: float


def agents(different: int, medians: Medians, seed: int) -> tuple[Session, ...]:
    """Draw `different` sessions."""
    return tuple(_session(number, numbers(seed, number), medians) for number in range(different))


def _session(number: int, drawn: Iterator[float], medians: Medians) -> Session:
    nodes: list[Node] = []
    first = max(1, round(medians.context * ratio(CONTEXT, next(drawn))))
    shared = min(first, medians.context // 2)
    nodes.append(
        Node(first, _tokens(medians.output, OUTPUT, drawn), head=(Span(1, 0, shared),) if shared else ())
    )
    before = 0
    for _ in range(max(1, round(medians.turns * ratio(TURNS, next(drawn)))) - 1):
        after: tuple[int, ...] = (before,)
        pause_s = round(medians.think * ratio(THINK, next(drawn)), 3)
        if next(drawn) < medians.subagents:
            after, pause_s = _agents(nodes, before, medians, drawn), 1.0
        grown = nodes[before].tokens + nodes[before].output
        parent, tokens = before, grown + _tokens(medians.tools, NEW, drawn)
        if tokens > medians.window:  # compacted: a summary after the tokens that all sessions share
            parent, tokens, grown = 0, first, shared
        nodes.append(Node(tokens, _tokens(medians.output, OUTPUT, drawn), after, pause_s, parent, grown))
        before = len(nodes) - 1
    return Session(f"agent-{number}", tuple(nodes))


def _agents(nodes: list[Node], before: int, medians: Medians, drawn: Iterator[float]) -> tuple[int, ...]:
    """Append up to AGENTS_AT_ONCE sub-agents that begin after request `before`; return their last requests."""
    ends = []
    for _ in range(1 + int(next(drawn) * AGENTS_AT_ONCE)):
        after, tokens, common = (
            before,
            max(1, round(medians.context * AGENT_PROMPT * ratio(CONTEXT, next(drawn)))),
            0,
        )
        parent = -1
        for _ in range(1 + int(next(drawn) * 2 * AGENT_TURNS)):
            pause_s = round(min(medians.think, 5.0) * ratio(THINK, next(drawn) * 0.75), 3)
            nodes.append(
                Node(
                    tokens,
                    _tokens(medians.output, OUTPUT, drawn),
                    (after,),
                    pause_s,
                    parent,
                    common,
                    sub=True,
                )
            )
            parent = after = len(nodes) - 1
            common = nodes[parent].tokens + nodes[parent].output
            tokens = common + _tokens(medians.tools, NEW, drawn)
        ends.append(parent)
    return tuple(ends)


def _tokens(median: int, ratios: Sequence[float], drawn: Iterator[float]) -> int:
    return max(1, round(median * ratio(ratios, next(drawn))))


def ratio(ratios: Sequence[float], share: float) -> float:
    """Return the ratio to the median at this share of all, by interpolation of logarithms."""
    above = next((number for number in range(1, len(AT)) if share < AT[number]), len(AT) - 1)
    low, high = AT[above - 1], AT[above]
    part = (share - low) / (high - low)
    return math.exp((1 - part) * math.log(ratios[above - 1]) + part * math.log(ratios[above]))
