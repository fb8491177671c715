"""The verdict names the largest limit of a run, with a command that a shell parses."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtune.data.run.extras import Remedy, Replayed, TextAccount, TextGroup
from kvtune.data.run.types import CoreInfo, Run
from kvtune.reading.analysis.rebuild import workload_of
from kvtune.reading.analysis.replayed import mends
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.verdict import Verdict
from tests.golden.synthetic import (
    HOSTILE,
    empty_run,
    hostile_run,
    open_run,
    replace_header,
    rounds_run,
)
from tests.reading.report.drawn import run_page

KVTUNE = CoreInfo(name="kvtune", active=True)


def told(run: Run, **misses: int) -> Run:
    """The run with causes of misses as `kvtune explain --save` stores them; the rest is cold."""
    requests = run.tables["requests"]
    missed = int(requests["prompt_tokens"].sum() - requests["hit_tokens"].sum())
    causes = {**misses, "cold": missed - sum(misses.values())}
    return run.with_extra(misses=causes)


def with_steps(run: Run, **columns: Any) -> Run:
    steps = {**run.tables["steps"], **columns}
    return Run(run.header, {**run.tables, "steps": steps})


def words(verdict: Verdict) -> list[str]:
    return shlex.split(verdict.command)


def test_a_run_that_measured_nothing_says_why() -> None:
    verdict = RunAnalysis(empty_run()).verdict
    assert verdict.kind == "nothing"
    assert "CUDA out of memory" in verdict.limit
    assert words(verdict) == ["kvtune", "doctor", "tiny-gemma3"]


def test_recomputed_prompts_are_named_with_their_share_of_time() -> None:
    run = rounds_run()
    verdict = RunAnalysis(run, workload_of(run)).verdict
    assert verdict.kind == "cache"
    assert "60,000 of 182,880" in verdict.limit
    assert verdict.share is not None and 0.1 < verdict.share < 0.6
    assert "No other setting was replayed" in verdict.advice, "nothing is advised that was not replayed"
    assert words(verdict) == ["kvtune", "explain", "RUN"]


def replayed(run: Run, *remedies: Remedy, **told: int) -> Run:
    """The run with replays of it: with the other core, which brings nothing, and with these."""
    query = int(run.table("requests")["prompt_tokens"].sum())
    other = Remedy(change="--core kvtune", core="kvtune", preemptions=told.get("preemptions", 0))
    return run.with_extra(replayed=Replayed(query_tokens=query, other=other, remedies=list(remedies), **told))


POOL = Remedy(
    change="1.5x the pool",
    cost="6 GiB more device memory",
    core="stock",
    flags={"num-gpu-blocks-override": "12000"},
    gain_tokens=50_000,
)


def test_what_the_replays_won_most_with_is_advised_with_its_gain_its_cost_and_its_command() -> None:
    small = Remedy(change="a policy", core="kvtune", core_settings={"policy": "chat"}, gain_tokens=20_000)
    run = replayed(told(rounds_run(), evicted=60_960), small, POOL)
    verdict = RunAnalysis(run).verdict
    assert verdict.advice == (
        "Replayed on this run, 1.5x the pool brings +27.3 points of hits, for 6 GiB more device memory."
    )
    flags = ["--", "--block-size", "32", "--num-gpu-blocks-override", "12000"]
    assert words(verdict)[:3] == ["kvtune", "profile", "tiny-gemma3"] and words(verdict)[-5:] == flags


def test_a_setting_that_brings_less_than_a_point_is_not_advised() -> None:
    useless = msgspec.structs.replace(POOL, gain_tokens=1_828)
    verdict = RunAnalysis(replayed(told(rounds_run(), evicted=60_960), useless)).verdict
    assert "None of the 2 settings that were replayed on this run helps" in verdict.advice
    assert words(verdict)[1] == "bounds" and "1.5x" not in verdict.advice


def test_the_second_limit_is_named_beside_the_first() -> None:
    run = told(rounds_run(), evicted=30_000, partial_block=20_000)
    verdict = RunAnalysis(run).verdict
    assert verdict.limits == ("cache", "block")
    assert verdict.also.startswith("hits of whole blocks only, up to ")


@pytest.mark.parametrize("cause", ["evicted", "not_retained", "lagging_group", "draft_group", "not_cached"])
def test_causes_found_by_replay_count_as_winnable(cause: str) -> None:
    assert RunAnalysis(told(rounds_run(), **{cause: 50_000})).verdict.kind == "cache"


def test_partial_blocks_are_named_with_the_unit_of_hits() -> None:
    verdict = RunAnalysis(told(rounds_run(), partial_block=60_000)).verdict
    assert verdict.kind == "block"
    assert "whole blocks of 32 tokens" in verdict.limit
    dropped = RunAnalysis(told(rounds_run(), partial_block=30_000, eagle_drop=30_000)).verdict
    assert "less one for EAGLE or MTP, so 60,000 prompt tokens" in dropped.limit


def test_the_collector_is_named_when_it_costs_most() -> None:
    run = told(rounds_run())
    gc = {**run.tables["gc"], "pause_us": run.tables["gc"]["pause_us"] * 100}
    verdict = RunAnalysis(Run(run.header, {**run.tables, "gc": gc})).verdict
    assert verdict.kind == "collector"
    assert "--core" not in words(verdict), "kvtune's core is the default"
    ours = replace_header(Run(run.header, {**run.tables, "gc": gc}), core=KVTUNE)
    assert "--probe" in words(RunAnalysis(ours).verdict)


def test_the_scheduler_is_named_when_it_costs_most() -> None:
    run = told(rounds_run())
    step = run.tables["steps"]["step_us"]
    assert RunAnalysis(with_steps(run, schedule_us=step * 0.4, update_us=step * 0.2)).verdict.kind == "host"


def test_preemptions_come_first() -> None:
    run = rounds_run()
    requests = {**run.tables["requests"], "preemptions": np.full(45, 2, "i4")}
    verdict = RunAnalysis(Run(run.header, {**run.tables, "requests": requests}), workload_of(run)).verdict
    assert verdict.kind == verdict.limits[0] == "pool"
    assert verdict.share is None, "how much time preemptions took is not measured"
    assert "90 times" in verdict.limit and "preemptions" not in verdict.also
    fewer = Remedy(change="--max-num-seqs 64", core="stock", flags={"max-num-seqs": "64"}, preemptions=0)
    told_so = replayed(
        Run(run.header, {**run.tables, "requests": requests}), fewer, requests=45, preemptions=90
    )
    verdict = RunAnalysis(told_so, workload_of(run)).verdict
    assert "--max-num-seqs 64 brings 90 fewer preemptions" in verdict.advice
    assert words(verdict)[-2:] == ["--max-num-seqs", "64"]


def test_an_engine_that_waits_for_work_is_not_the_limit() -> None:
    run = told(open_run(requests=20, rate=0.5, output=10))
    verdict = RunAnalysis(run).verdict
    assert verdict.kind == "load"
    assert verdict.share is None


def test_a_run_without_other_limits_is_limited_by_its_model() -> None:
    verdict = RunAnalysis(told(rounds_run())).verdict
    assert verdict.kind == "model"
    assert "98 % of the step time" in verdict.limit


def test_unknown_causes_are_not_called_a_limit_of_the_model() -> None:
    verdict = RunAnalysis(rounds_run()).verdict
    assert verdict.kind == "unknown"
    assert "is not known" in verdict.limit


def test_without_step_times_shares_are_of_tokens() -> None:
    run = told(rounds_run(), evicted=60_960)
    bare = Run(run.header, {k: v for k, v in run.tables.items() if k != "steps"})
    verdict = RunAnalysis(bare).verdict
    assert verdict.kind == "cache"
    assert verdict.share == pytest.approx(60_960 / 182_880)


def test_hostile_strings_stay_one_word_of_the_command() -> None:
    verdict = words(RunAnalysis(hostile_run()).verdict)
    assert verdict[0] == "kvtune"
    assert verdict.count(f"/models/{HOSTILE}") == 1
    assert not any(word.startswith("<") and word != HOSTILE for word in verdict)


def server_with(diverged: int, texts: TextAccount | None = None) -> Run:
    """A recorded server: no steps, and this many tokens stand after a text that differs."""
    run = told(rounds_run(), diverged=diverged)
    run = Run(run.header, {name: table for name, table in run.tables.items() if name != "steps"})
    run = replace_header(run, source="server")
    requests = run.table("requests")
    whole, hit = int(requests["prompt_tokens"].sum()), int(requests["hit_tokens"].sum())
    extra = (
        {} if texts is None else {"texts": texts, "replayed": Replayed(query_tokens=whole, hit_tokens=hit)}
    )
    return run.with_extra(**extra)


def test_text_that_differs_is_named_and_nothing_is_said_to_stand_out() -> None:
    run = server_with(40_000)
    verdict = RunAnalysis(run).verdict
    assert verdict.kind == "text" and "40,000 of 182,880" in verdict.limit
    assert "Nothing stands out" not in verdict.limit and "No cache setting" not in verdict.advice
    assert words(verdict)[:5] == ["kvtune", "explain", "RUN", "--trace", "LOG"]


def test_what_mending_brings_is_the_advice_and_a_row_of_the_page() -> None:
    run = server_with(40_000)
    requests = run.table("requests")
    whole, hit = int(requests["prompt_tokens"].sum()), int(requests["hit_tokens"].sum())
    group = TextGroup(
        kind="time",
        title="a time of day or time stamp",
        mend="Move the time into the last message.",
        hit_tokens=hit + 30_000,
        query_tokens=whole,
    )
    texts = TextAccount(engine=True, query_tokens=whole, hit_tokens=hit, groups=[group])
    verdict = RunAnalysis(server_with(40_000, texts)).verdict
    assert "mending the prompts (a time of day or time stamp) brings +16.4 points of hits" in verdict.advice
    assert "Move the time into the last message." in verdict.advice
    page = run_page(RunAnalysis(server_with(40_000, texts)))
    assert "mend the prompts, a time of day or time stamp" in page and "What helps, each replayed" in page


def test_a_text_is_mended_with_all_before_it() -> None:
    """Of values on top none brings anything alone: told is the last one with those before it, and not all texts."""
    alone: dict[str, Any] = {"query_tokens": 1000, "hit_tokens": 0}
    groups = [
        TextGroup(kind="time", title="a time", mend="Move it.", **alone),
        TextGroup(kind="user", title="a name", mend="Move it.", with_before_hit_tokens=740, **alone),
        TextGroup(kind="other", title="other text", mend="Move it."),
    ]
    texts = TextAccount(
        engine=True, query_tokens=1000, groups=groups, mended_hit_tokens=730, mended_query_tokens=1000
    )
    told = Replayed(query_tokens=1000)
    assert [(one.what, one.gain_tokens) for one in mends(texts, told)] == [("a name, and all before it", 740)]
    more = msgspec.structs.replace(texts, mended_hit_tokens=900)
    assert [(one.what, one.gain_tokens) for one in mends(more, told)] == [
        ("all 3 texts that differ", 900),
        ("a name, and all before it", 740),
    ]
