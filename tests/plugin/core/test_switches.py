"""Each switch turns off one idea of the core: stock's code runs there, and every other idea stays active."""

from __future__ import annotations

import copyreg
import warnings
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.outputs import ModelRunnerOutput

    from kvtune.plugin.core import freeze, plugin, state
    from kvtune.plugin.core.cache import adopt
    from kvtune.plugin.core.cache.manager import KeepingManager
    from kvtune.plugin.core.cache.pool import PolicyPool
    from kvtune.plugin.core.cache.windows import KeepingWindowManager
    from kvtune.plugin.core.settings import parse
    from kvtune.plugin.core.steps import empty, scheduler
    from kvtune.plugin.core.tokens import install as tokens
    from kvtune.plugin.vllm.plugin_state import STATE

from tests.plugin.core.pool_rig import BOTH, HYBRID
from tests.plugin.core.steady_rig import build

pytestmark = pytest.mark.vllm


def in_force(asynchronous: bool, **texts: str) -> dict[str, bool]:
    """By switch: whether an engine that is built with these settings runs that idea's code."""
    settings = parse(texts)
    try:
        for part in (adopt, tokens, scheduler, freeze):
            part.install(settings)  # type: ignore[attr-defined]
        built: Any = build(replace(HYBRID, asynchronous=asynchronous))
        manager = built.kv_cache_manager
        windows = [
            group
            for group in manager.coordinator.single_type_managers
            if isinstance(group, SlidingWindowManager)
        ]
        pool = manager.block_pool
        in_place = {
            "pool": isinstance(pool, PolicyPool),
            "pinning": all(isinstance(group, KeepingWindowManager) for group in windows),
            "output_window": isinstance(manager, KeepingManager) and manager.keeps_output,
            "steady": hasattr(built, "steady_steps"),
            "empty_blocks": isinstance(manager, empty.NoopSlots),
            "rows": ModelRunnerOutput in copyreg.dispatch_table,
            "freeze": state.state()["parts"]["freeze"],
        }
        assert type(pool) in (BlockPool, PolicyPool) and isinstance(manager, KVCacheManager)
    finally:
        for part in (freeze, scheduler, tokens, adopt):
            STATE.remove(part.PART)
    return in_place


ALL = ("pool", "pinning", "output_window", "steady", "empty_blocks", "rows", "freeze")
TAKES_ALONG = {"pool": {"pinning", "output_window"}, "pinning": {"output_window"}}


@BOTH
def test_every_idea_is_in_force_by_default(asynchronous: bool) -> None:
    assert in_force(asynchronous) == dict.fromkeys(ALL, True)


@BOTH
@pytest.mark.parametrize("switch", ALL)
def test_a_switch_turns_its_idea_off_and_no_other(switch: str, asynchronous: bool) -> None:
    off = {switch} | TAKES_ALONG.get(switch, set())
    assert in_force(asynchronous, **{f"core.{switch}": "false"}) == {name: name not in off for name in ALL}


@BOTH
def test_nothing_is_left_when_everything_is_off(asynchronous: bool) -> None:
    assert not any(in_force(asynchronous, **dict.fromkeys(ALL, "false")).values())


def test_a_vllm_without_its_function_for_freezing_runs_without_frozen_heaps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("vllm.utils.gc_utils.freeze_gc_heap")
    plugin._install("freeze", parse({"collect_at_wait": True}), [], strict=False)
    found = state.state()
    assert found["parts"] == {"freeze": False, "collect_at_wait": False}
    assert "freeze could not be put in: ImportError" in found["notes"][0]
    assert not [patch for patch in STATE.patches.installed() if patch.part == freeze.PART]
