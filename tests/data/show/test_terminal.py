"""Tables and lines of text that fit a terminal."""

from __future__ import annotations

import pytest

from kvtune.data.show.terminal import Column, FittedTable, folded

COLUMNS = (
    Column("process", folds=True),
    Column("pauses"),
    Column("CPU time", rank=2),
    Column("frozen", rank=1),
    Column("verdict", right=False, folds=True),
)
ROWS = (
    ("front end", "1,234 ms", "1,300 ms", "704,701", "no difference shown"),
    ("EngineCore", "5 ms", "6 ms", "1", "better"),
)
TABLE = FittedTable(COLUMNS, ROWS, gap=2)


@pytest.mark.parametrize(
    ("width", "dropped"),
    [(80, ""), (55, ""), (46, "CPU time"), (38, "frozen, CPU time"), (33, "frozen, CPU time")],
)
def test_columns_are_dropped_in_the_order_of_their_ranks_and_named(width: int, dropped: str) -> None:
    lines = TABLE.lines(width)
    assert max(map(len, lines)) <= width
    named = [line for line in lines if "no room for" in line]
    assert sorted(named[0][14:-1].split(", ")) == sorted(dropped.split(", ")) if dropped else not named
    assert "1,234 ms" in "\n".join(lines)
    assert ("704,701" in "\n".join(lines)) is ("frozen" not in dropped)


def test_where_nothing_fits_each_row_is_a_few_lines() -> None:
    lines = TABLE.lines(16)
    assert lines[:5] == ["process", "front end", "  pauses 1,234", "ms", "  CPU time 1,300"]
    assert "  frozen 704,701" in lines


def test_a_head_longer_than_its_numbers_is_broken_rather_than_a_column_dropped() -> None:
    table = FittedTable(
        (Column("figure"), Column("tiny-gemma3_rounds_stock_20261122"), Column("b")), [("x", "1", "2")]
    )
    knob = FittedTable((Column("x"), Column("prefix_cache_retention_interval")), [("a", "1")])
    assert [line.split()[-1] for line in knob.lines(16)[:4]] == [
        "prefix_",
        "cache_",
        "retention_",
        "interval",
    ]
    lines = table.lines(26)
    assert "no room" not in " ".join(lines) and lines[-1].split() == ["x", "1", "2"]


def test_a_long_line_is_folded_under_its_last_column() -> None:
    line = (
        "  note  retention     kept at the end of a prompt only: see `kvtune tune MODEL` and --some-long-flag"
    )
    assert folded(line, 60) == [
        "  note  retention     kept at the end of a prompt only: see",
        "                      `kvtune tune MODEL` and",
        "                      --some-long-flag",
    ]
    assert folded("short", 60) == ["short"]


def test_a_command_longer_than_the_line_is_not_cut() -> None:
    assert folded("next: `kvtune profile tiny-gemma3 --on sim` does", 20) == [
        "next:",
        "`kvtune profile tiny-gemma3 --on sim`",
        "does",
    ]
