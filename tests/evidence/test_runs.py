"""What `kvtune evidence --fresh` discards: what an earlier call kept to resume from, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtune.errors import UsageError
from kvtune.evidence.runs import JOURNAL, discard
from kvtune.run.rows import add_row

TURNS = "turns-0123456789ab.json"


def test_only_what_evidence_wrote_is_discarded(tmp_path: Path) -> None:
    add_row(tmp_path / JOURNAL, {"key": "a", "repeat": 0, "path": "a.kvrun"})
    (tmp_path / TURNS).write_text(json.dumps({"stock": [{"wall_s": 1.0}]}))
    mine = ("turns-mine.json", "turns-ba9876543210.json", "a.kvrun")
    for name in mine:
        (tmp_path / name).write_text("mine")
    discard(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(mine)


def test_a_journal_of_somebody_else_stays_and_is_named(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("mine")
    with pytest.raises(UsageError, match=r"evidence\.jsonl is not a journal"):
        discard(tmp_path)
    assert (tmp_path / JOURNAL).read_text() == "mine"
