"""What versions of vLLM name otherwise, decided by the files that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.plugin.vllm import names


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
    monkeypatch.setattr(names, "source_path", lambda module: file if "sched" in module.split(".") else None)
    assert bool(names.without_effect("prefill_schedule_interval")) == inert
    assert names.without_effect("max_num_seqs") == ""
    monkeypatch.setattr(names, "source_path", lambda module: None)
    assert names.without_effect("prefill_schedule_interval") == ""


@pytest.mark.parametrize(
    ("setting", "reads"), [("eviction_policy", True), ("blocks_per_chunk", True), ("store_threshold", False)]
)
def test_knobs_of_a_tier_act_where_the_offloading_connector_reads_them(
    setting: str, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "vllm.v1.kv_offload": (tmp_path / "tier" / "__init__.py", ""),
        f"{names.CONNECTORS}.offloading_connector": (tmp_path / "v1" / "offloading_connector.py", ""),
        "spec": (tmp_path / "tier" / "cpu" / "spec.py", 'extra.get("eviction_policy", "lru")'),
        "config": (tmp_path / "v1" / "offloading" / "config.py", 'extra.get("blocks_per_chunk")'),
        "other connector": (tmp_path / "v1" / "other.py", '"store_threshold"'),
    }
    for file, text in places.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(names, "source_path", lambda module: places[module][0])
    assert bool(names.without_effect(setting)) != reads
    monkeypatch.setattr(names, "source_path", lambda module: None)
    assert names.without_effect(setting) == ""


@pytest.mark.vllm
@pytest.mark.parametrize("setting", ["eviction_policy", "blocks_per_chunk", "store_threshold"])
def test_the_installed_vllm_reads_the_knobs_of_a_tier(setting: str) -> None:
    assert names.without_effect(setting) == ""
