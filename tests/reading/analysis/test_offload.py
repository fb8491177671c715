"""Hits by tier and copies of a run with a tier of host memory, on tables made by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvtune.data.run.types import Run
from kvtune.reading.analysis.comparison.compare import compare
from kvtune.reading.analysis.offload import offload
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.report.sections import run_sections
from kvtune.requests.types import Span
from tests.reading.analysis.made import served, table, workload_of
from tests.reading.report.drawn import summary_text

TIER = {"bytes": 1 << 30, "chunks": 512, "blocks_per_chunk": 1, "policy": "arc"}


def with_tier(hits: list[int], tier_hits: list[int], *, copies: bool = True) -> Run:
    """Prompts of 100 tokens. The tier stored 8 chunks in 2 ms and gave 3 of them back, one of them twice."""
    workload = workload_of([[Span(i, 0, 100)] for i in range(len(hits))])
    copied = table(
        "copies",
        t_s=[1.0, 2.0],
        stored_bytes=[800, 0],
        store_us=[2000.0, 0.0],
        loaded_bytes=[0, 400],
        load_us=[0.0, 1000.0],
        loads=[0, 2],
        wait_us=[500.0, 3000.0],
        longest_wait_us=[500.0, 2500.0],
        stored_chunks=[8, 0],
        reused_chunks=[0, 3],
        evicted_chunks=[0, 2],
        refused=[1, 0],
    )
    run = served(workload, hits, tables={"copies": copied} if copies else {})
    run.table("requests")["tier_hit_tokens"] = np.array(tier_hits, "i8")
    engine = msgspec.structs.replace(run.header.engine, settings={"offload": TIER})
    return replace(run, header=msgspec.structs.replace(run.header, engine=engine))


def test_prompt_tokens_are_hits_of_one_tier_or_computed() -> None:
    tier = offload(with_tier([48, 32, 0, -1], [16, 32, 0, 0]))
    assert tier is not None and tier.copies is not None
    assert (tier.prompt_tokens, tier.pool_hit_tokens, tier.tier_hit_tokens) == (300, 32, 48)
    assert tier.computed_tokens == 220 and tier.computed_share == pytest.approx(220 / 300)
    copies = tier.copies
    assert (copies.stored_bytes, copies.loaded_bytes, copies.loads) == (800, 400, 2)
    assert (copies.store_s, copies.load_s) == pytest.approx((2e-3, 1e-3))
    assert (copies.wait_s, copies.longest_wait_s) == pytest.approx((3.5e-3, 2.5e-3))
    assert (copies.stored_chunks, copies.unread_chunks, copies.evicted_chunks, copies.refused) == (8, 5, 2, 1)


def test_a_run_without_a_tier_has_none() -> None:
    assert offload(served(workload_of([[Span(0, 0, 100)]]), [16])) is None


def test_json_console_and_page_say_it() -> None:
    analysis = RunAnalysis(with_tier([48, 32, 0], [16, 32, 0]))
    facts = summary(analysis)
    assert facts["offload"]["tier_hit_rate"] == pytest.approx(0.16)
    assert facts["offload"]["copies"]["unread_chunks"] == 5
    text = summary_text(analysis)
    assert "host memory: 1 GiB, arc" in text and "5 of 8 chunks" in text and "62.5 %" in text
    (drawn,) = [section for section in run_sections(analysis) if section.id == "offload"]
    assert "16.0 %" in drawn.lead and "62.5 %" in drawn.lead


def test_where_copies_were_not_recorded_the_hits_are_still_said() -> None:
    analysis = RunAnalysis(with_tier([48], [16], copies=False))
    facts = summary(analysis)
    assert facts["offload"]["tier_hit_tokens"] == 16 and facts["offload"]["copies"] is None
    assert "hit in host memory" in summary_text(analysis)


def test_runs_compare_by_what_the_tier_hit_and_copied() -> None:
    one, other = with_tier([32] * 10, [0] * 10), with_tier([64] * 10, [32] * 10)
    figures = {figure.path: figure for figure in compare(one, other).figures}
    hit_rate = figures["offload.tier_hit_rate"]
    assert (hit_rate.a, hit_rate.b, hit_rate.verdict) == (0.0, pytest.approx(0.32), "better")
    assert figures["offload.copies.stored_bytes"].a == 800
