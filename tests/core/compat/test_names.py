"""What versions of vLLM name otherwise, decided by the files that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.core.compat import names


@pytest.mark.parametrize(
    ("scheduler", "inert"),
    [
        ("self.local_prefill_interval = interval", False),
        ("self.prefill_schedule_interval = interval", True),  # before 0.33, for data parallel engines only
    ],
)
def test_intervals_between_prompts_act_where_the_scheduler_keeps_them(
    scheduler: str, inert: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "scheduler.py"
    file.write_text(scheduler)
    monkeypatch.setattr(names, "source_path", lambda module: file)
    assert bool(names.without_effect("prefill_schedule_interval")) == inert
    assert names.without_effect("max_num_seqs") == ""
    monkeypatch.setattr(names, "source_path", lambda module: None)
    assert names.without_effect("prefill_schedule_interval") == ""
