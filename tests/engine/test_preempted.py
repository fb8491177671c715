"""An engine counts what its preemptions computed twice: with it, every token that it scheduled is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.analysis.preemption import preemption
from tests.engine.real import profiled

pytestmark = pytest.mark.engine


def test_every_token_that_an_engine_scheduled_is_counted_once_or_as_computed_twice(tmp_path: Path) -> None:
    load = ("-w", "decode:requests=24,prompt=48,output=200", "--core", "stock", "--dummy", "--tries", "0")
    sizes = ("--max-model-len", "800", "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "50")
    run = profiled(
        tmp_path, "tiny-llama", *load, engine=("--block-size", "32", "--max-num-seqs", "16", *sizes)
    ).run
    assert not run.header.probe.disabled
    found = preemption(run)
    assert (
        found is not None
        and found.tokens
        and set(found.causes) <= {"evicted", "not_retained", "partial_block"}
    )
    requests = run.table("requests")
    once = requests["prompt_tokens"] - requests["hit_tokens"] + requests["output_tokens"] - 1
    assert run.table("steps")["scheduled_tokens"].sum() == once.sum() + found.tokens
    rows = [int(row) for row in run.header.extra.computed_twice]
    assert (requests["preemptions"][rows] > 0).all()
