"""The table of causes is the one list of them, and a split adds up whatever its edges are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.data.causes import (
    CAUSES,
    COMMON,
    INFINITE,
    PUBLISHED,
    cause_meaning,
    cause_title,
)
from kvtune.data.tally import Edges, split
from tests.copies import ROOT, after, copied, python

OF_PROMPT = (
    *(
        "reset",
        "evicted",
        "not_retained",
        "not_cached",
        "last_token",
        "partial_block",
        "tails",
        "other_engine",
    ),
    *("other_replica", "other_salt", "unknown", "diverged", "cold"),
)
"""Causes that a log, and a server's KV events, tell of a prompt, in the order of its tokens (see `Edges`)."""
EDGES = st.lists(st.tuples(st.sampled_from(sorted(CAUSES)), st.integers(-50, 3000)), max_size=8)
NEW = "moved_away"
ENTRY = f'''        Cause(
            "{NEW}",
            "moved to another machine",
            "a rebalancing took the blocks away",
            "server",
            colour="var(--c1)",
        ),
'''


@given(st.integers(0, 2000), st.integers(-10, 2500), EDGES, st.sampled_from(["cold", "unknown"]))
def test_a_split_adds_up_and_no_count_is_negative(
    prompt: int, hit: int, edges: list[tuple[str, int]], rest: str
) -> None:
    tally = split(prompt, hit, edges, rest)
    counts = tally.misses
    assert set(counts) == {rest, *(cause for cause, _ in edges)}
    assert min(counts.values()) >= 0
    assert sum(counts.values()) == tally.missed and tally.hit_tokens == min(max(hit, 0), prompt)


def test_each_edge_names_the_tokens_before_it() -> None:
    edges = [("evicted", 40), ("not_retained", 64), ("last_token", 80), ("partial_block", 90)]
    assert split(100, 16, edges).misses == {
        "evicted": 24,
        "not_retained": 24,
        "last_token": 16,
        "partial_block": 10,
        "cold": 10,
    }
    assert split(100, 70, edges).misses["last_token"] == 10  # a hit beyond an edge leaves that cause nothing


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 64))
def test_an_infinite_cache_recomputes_the_last_token(prompt: int, hit: int, seen: int, unit: int) -> None:
    counts = Edges(unit, min(seen, prompt)).tally(prompt, min(hit, prompt)).misses
    assert set(counts) <= set(INFINITE)
    assert sum(counts.values()) + min(hit, prompt) == prompt
    if seen >= prompt > hit:
        assert "cold" not in counts and counts


def test_every_cause_says_what_it_is() -> None:
    for key, cause in CAUSES.items():
        assert key == cause.key and cause.title and cause.meaning
    assert {*INFINITE, *OF_PROMPT, *PUBLISHED, *COMMON} <= set(CAUSES)
    assert cause_title("from_the_future") == "from the future"
    assert cause_meaning("from_the_future") == ""


@pytest.mark.lint
def test_nobody_else_lists_the_causes() -> None:
    """A literal with four or more causes in kvtune/ is a second list; the table's own subsets are derived."""
    found = []
    for path in (ROOT / "kvtune").rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        if place == "kvtune/data/causes.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            words = [item.value for item in items if isinstance(item, ast.Constant)]
            if sum(word in CAUSES for word in words if isinstance(word, str)) >= 4:
                found.append(f"{place}:{node.lineno}")
    assert found == []


@pytest.mark.lint
def test_a_new_cause_is_one_entry(tmp_path: Path) -> None:
    """In a copy of kvtune with one more cause, a run's page, terminal and `--json` show it with title and meaning."""
    after(copied(tmp_path) / "data" / "causes.py", "    for cause in (\n", ENTRY)
    golden = next((ROOT / "tests" / "golden").rglob("*.kvrun"))
    script = f"""
import dataclasses
import msgspec
from pathlib import Path
from kvtune.data.run.file import read_run, write_run
run = read_run(Path({str(golden)!r}))
table = run.table("requests")
missed = int(table["prompt_tokens"].sum() - table["hit_tokens"].sum())
extra = msgspec.structs.replace(run.header.extra, misses={{"{NEW}": missed}})
header = msgspec.structs.replace(run.header, extra=extra)
run = dataclasses.replace(run, header=header)
write_run(run, Path("run.kvrun"))
"""
    python(tmp_path, "-c", script)
    assert "moved to another machine" in python(tmp_path, "-m", "kvtune", "report", "run.kvrun", "--console")
    python(tmp_path, "-m", "kvtune", "report", "run.kvrun", "-o", "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "moved to another machine" in page and "a rebalancing took the blocks away" in page
