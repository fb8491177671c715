"""The audit reports each kind of damage to a pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from bench import audit
from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.settings import parse
from kvtune.plugin.probe.gc import CollectorProbe
from kvtune.plugin.probe.ring import Ring
from kvtune.plugin.probe.steps import StepProbe
from tests.plugin.core.pool_rig import BOTH, SETTINGS, SHAPES, Engine, tokens

pytestmark = pytest.mark.vllm


def test_each_kind_of_damage_is_reported() -> None:
    """An audit that cannot fail would be worthless."""
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["first"]))
    engine.serve(tokens(1, 60))
    engine.add(tokens(2, 60), 20)
    engine.step()
    assert audit.check(engine.scheduler) == []
    pool, queues = engine.pool, engine.pool.free_block_queue
    used = next(block for block in pool.blocks if block.ref_cnt == 1 and not block.is_null)
    free = queues.get_all_free_blocks()[0]

    def finds(text: str) -> None:
        assert any(text in line for line in audit.check(engine.scheduler)), audit.check(engine.scheduler)

    used.ref_cnt -= 1
    finds("is in 0 queues")
    finds("places in block tables")
    used.ref_cnt = -1
    finds("ref_cnt -1")
    used.ref_cnt = 1
    free.ref_cnt = 1
    finds("with ref_cnt 1 is in 1 queues")
    free.ref_cnt = 0
    queues.queue_of[free.block_id] ^= 1
    finds("its queue byte says")
    queues.queue_of[free.block_id] ^= 1
    queues.num_free_blocks += 1
    finds("blocks counted as free")
    queues.num_free_blocks -= 1
    hashed = next(block for block in pool.blocks if block.block_hash is not None)
    key = hashed._block_hash
    hashed._block_hash = b"another" + bytes(8)
    finds("is not found under its hash")
    finds("under a hash that it does not have")
    hashed._block_hash = key
    assert audit.check(engine.scheduler) == []


@BOTH
def test_audit_after_each_step_is_counted_and_can_stop(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtune.base.errors import KvtuneError

    engine = Engine(replace(SHAPES["hybrid"], asynchronous=asynchronous), CoreSettings())
    audit.watch(engine.scheduler)
    engine.serve(tokens(1, 60))
    counters = state.state()["counters"]
    assert counters["audits"] > 3
    assert "audit_violations" not in counters
    engine.pool.free_block_queue.num_free_blocks += 1
    engine.add(tokens(2, 20), 9)
    for _ in range(2):  # asynchronous: the second step updates what the first scheduled
        engine.step()
    assert state.state()["counters"]["audit_violations"] >= 1
    monkeypatch.setenv("KVTUNE_AUDIT", "raise")
    with pytest.raises(KvtuneError, match="audit: "):
        engine.step()


def test_the_audit_goes_on_where_the_probe_times_the_scheduler_too(tmp_path: Path) -> None:
    """As in an engine with both: the core's plugin comes first, then the probe's."""
    engine = Engine(SHAPES["hybrid"], CoreSettings())
    audit.watch(engine.scheduler)
    ring = Ring(tmp_path / "ring.bin")
    StepProbe(ring, collector=CollectorProbe(ring)).wrap_scheduler(engine.scheduler)
    before = state.state()["counters"].get("audits", 0)
    engine.serve(tokens(1, 60))
    assert state.state()["counters"]["audits"] > before + 3
