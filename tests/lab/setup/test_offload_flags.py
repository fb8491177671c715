"""A tier that cannot be, in one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtune.base.errors import UsageError
from kvtune.lab.setup import offload_flags
from kvtune.lab.setup.offload_flags import (
    check_room,
    check_tier,
    joined,
    tier_given,
    without_tier,
)

GIB = 1 << 30


@pytest.mark.parametrize("given", ["0", "-1", "0.0", "nan", "inf", "much"])
def test_a_tier_of_no_size_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match=f"--kv-offloading-size {given} is no size") as refused:
        check_tier(["--kv-offloading-size", given])
    assert "GiB" in refused.value.hint


def test_a_tier_of_a_size_and_none_are_fine() -> None:
    check_tier(["--kv-offloading-size=0.5"])
    check_tier(["--block-size", "32"])


def test_a_tier_that_the_machine_has_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_flags, "free_memory_bytes", lambda: 3 * GIB)
    check_room(["--kv-offloading-size", "2.9"], cpu_build=True)
    with pytest.raises(UsageError, match=r"--kv-offloading-size 4 does not fit: 3 GiB") as refused:
        check_room(["--kv-offloading-size", "4"], cpu_build=True)
    assert "smaller tier" in refused.value.hint


def with_folder(folder: Path) -> list[str]:
    extra = {"secondary_tiers": [{"type": "fs", "root_dir": str(folder)}]}
    return ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})]


def test_a_folder_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "made"
    check_room(with_folder(folder), cpu_build=False)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(UsageError, match=rf"{folder} has no room: 4 KiB") as refused:
        check_room(with_folder(folder), cpu_build=False)
    assert "root_dir" in refused.value.hint


def test_a_folder_behind_a_cpu_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="host memory only"):
        check_room(with_folder(tmp_path), cpu_build=True)


def transfer(connector: str = "OffloadingConnector", **extra: object) -> list[str]:
    fields = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(fields)]


def test_of_two_command_lines_the_second_wins_setting_by_setting() -> None:
    first = ["--seed", "1", *transfer(eviction_policy="arc", store_threshold=2)]
    second = ["--kv_transfer_config", '{"kv_connector_extra_config": {"eviction_policy": "lru"}}']
    both = joined(first, second)
    assert tier_given(both) == {"eviction_policy": "lru", "store_threshold": 2}
    assert both[:3] == ["--seed", "1", "--kv-transfer-config"] and len(both) == 4
    assert joined(first, ["--seed", "2"]) == [*first, "--seed", "2"]
    broken = ["--kv-transfer-config", "{"]
    assert joined(broken, second) == [*broken, *second], "vLLM's parser says what is wrong with it"


def test_settings_of_a_connector_given_one_by_one_are_not_combined_with_others() -> None:
    dotted = ["--kv-transfer-config.kv_connector_extra_config.eviction_policy", "arc"]
    for first, second in ((dotted, transfer(store_threshold=2)), (transfer(store_threshold=2), dotted)):
        with pytest.raises(UsageError, match="cannot be combined") as refused:
            joined(first, second)
        assert "JSON" in refused.value.hint
    assert joined(dotted, ["--seed", "2"]) == [*dotted, "--seed", "2"]


def test_an_engine_without_its_tier_keeps_another_connector() -> None:
    assert without_tier(["--seed", "1", "--kv-offloading-size", "4", *transfer()]) == ["--seed", "1"]
    assert without_tier(transfer("Mine")) == transfer("Mine")
