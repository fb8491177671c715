"""Hits and misses are counted by one struct: its sums, and no class has a second."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.data.causes import CAUSES
from kvtune.data.tally import Tally

ROOT = Path(__file__).parents[2]
MISSES = st.dictionaries(st.sampled_from(sorted(CAUSES)), st.integers(0, 500))
TALLIES = st.builds(
    lambda hit, misses: Tally(hit + sum(misses.values()), hit, misses), st.integers(0, 500), MISSES
)
OWN = {
    "kvtune/data/tally.py:Hits",
    "kvtune/servers/watch/counts.py:Counts",
    "kvtune/servers/watch/totals.py:Look",
}
"""The struct; and a server's counters, whose misses get their causes later."""


@given(st.lists(TALLIES, max_size=5), st.sets(st.sampled_from(sorted(CAUSES))))
def test_a_sum_is_as_exact_as_its_parts(tallies: list[Tally], causes: set[str]) -> None:
    whole = Tally.sum(tallies, causes)
    assert whole.query_tokens == sum(tally.query_tokens for tally in tallies)
    assert whole.hit_tokens + sum(whole.misses.values()) == whole.query_tokens
    assert causes <= whole.misses.keys() <= causes | {cause for each in tallies for cause in each.misses}
    assert Tally.sum([whole]) == sum(tallies, Tally())


@given(TALLIES)
def test_shares_are_between_none_and_all_of_the_tokens(tally: Tally) -> None:
    if not tally.query_tokens:
        assert tally.rate is None and tally.seen is None
        return
    assert tally.rate is not None and tally.seen is not None
    least, most = tally.seen
    assert 0.0 <= least <= most <= 1.0 and tally.rate <= most


@pytest.mark.lint
def test_no_other_class_has_fields_for_queries_and_hits() -> None:
    found = set()
    for path in (ROOT / "kvtune").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for node in (each for each in nodes if isinstance(each, ast.ClassDef)):
            lines = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
            named = {target.id for target in lines if isinstance(target, ast.Name)}
            if named & {"query_tokens", "queries"} and named & {"hit_tokens", "hits"}:
                found.add(f"{path.relative_to(ROOT).as_posix()}:{node.name}")
    assert found == OWN
