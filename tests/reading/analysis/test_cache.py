from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.data.causes import INFINITE
from kvtune.data.run.extras import Extras, read_extras
from kvtune.data.run.types import EngineInfo, Run
from kvtune.reading.analysis.cache import Round, match_unit, miss_causes, prefix_cache, rounds, seen_tokens
from kvtune.requests.loads.spec import build
from kvtune.requests.types import STREAM_ANSWER, Span, Workload
from tests.reading.analysis.made import header_of, served, workload_of

spans = st.builds(Span, st.integers(0, 3), st.integers(0, 6), st.integers(0, 12))
prompts = st.lists(spans, max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, Run]:
    """Arbitrary prompts, served in any order and at any times or not at all, with arbitrary hits."""
    workload = workload_of(draw(st.lists(prompts.filter(lambda p: any(s.length for s in p)), max_size=8)))
    n = len(workload.requests)
    times = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, np.nan])
    several = st.lists(times, min_size=n, max_size=n)
    hits = [draw(st.integers(-1, r.prompt_tokens + 5)) for r in workload.requests]
    engine = EngineInfo(block_size=draw(st.sampled_from([0, 1, 4, 16])))
    return workload, served(
        workload,
        hits,
        sent=draw(several),
        first=draw(several),
        finished=draw(several),
        output=draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        engine=engine,
    )


@given(runs())
def test_hits_and_causes_add_up_exactly(made: tuple[Workload, Run]) -> None:
    workload, run = made
    cache = prefix_cache(run, workload)
    assert set(cache.misses) == set(INFINITE)
    assert min(cache.misses.values()) >= 0
    assert cache.hit_tokens + sum(cache.misses.values()) == cache.query_tokens
    table = run.table("requests")
    told = table["hit_tokens"] >= 0
    assert cache.query_tokens == table["prompt_tokens"][told].sum()
    causes = miss_causes(run, workload)
    per_request = sum(causes.values()) + np.clip(table["hit_tokens"], 0, table["prompt_tokens"])
    assert (per_request == table["prompt_tokens"])[told].all()
    assert not any(widths[~told].any() for widths in causes.values())


def test_every_cause_equals_the_one_found_by_hand() -> None:
    workload = workload_of(
        [
            (Span(0, 0, 100),),  # cold, 100
            (Span(0, 0, 100),),  # all seen: 96 in full blocks, 4 beyond; hits 96
            (Span(0, 0, 90), Span(1, 0, 10)),  # 90 seen: 80 full, 10 partial, 10 cold; hits 32
            (Span(0, 0, 96),),  # all in full blocks: 80 usable, 16 for the last token; hits 80
            (Span(0, 0, 50), Span(2, 0, 50)),  # 50 seen: 48 full, 2 partial, 50 cold; hits 0
        ]
    )
    run = served(workload, [0, 96, 32, 80, 0])
    causes = {name: widths.tolist() for name, widths in miss_causes(run, workload).items()}
    assert causes == {
        "cold": [100, 0, 10, 0, 50],
        "partial_block": [0, 4, 10, 0, 2],
        "last_token": [0, 0, 0, 16, 0],
        "not_cached": [0, 0, 48, 0, 48],
    }
    cache = prefix_cache(run, workload)
    assert cache.misses == {"cold": 160, "partial_block": 16, "last_token": 16, "not_cached": 96}
    assert (cache.query_tokens, cache.hit_tokens) == (496, 208)
    assert cache.rate == 208 / 496


def test_a_prompt_without_its_first_token_is_not_seen() -> None:
    workload = workload_of([(Span(0, 0, 64),)] * 3)
    run = served(workload, [0, 0, 0], sent=[0.0, 0.1, 0.6], first=[0.5, 1.0, 1.0])
    assert seen_tokens(run, workload).tolist() == [0, 0, 64]


def test_a_hit_on_tokens_computed_after_sending_is_no_miss() -> None:
    workload = workload_of([(Span(0, 0, 64),)] * 2)
    run = served(workload, [0, 48], sent=[0.0, 0.1])
    assert prefix_cache(run, workload).misses == {
        "cold": 80,
        "partial_block": 0,
        "last_token": 0,
        "not_cached": 0,
    }


def test_answers_are_seen_except_for_their_last_token() -> None:
    answer = Span(STREAM_ANSWER, 0, 40)
    workload = workload_of([(Span(0, 0, 30),), (Span(0, 0, 30), answer, Span(1, 0, 10))], output=40)
    run = served(workload, [0, 64])
    assert seen_tokens(run, workload).tolist() == [0, 69]
    assert prefix_cache(run, workload).misses == {
        "cold": 30 + 11,
        "partial_block": 5,
        "last_token": 0,
        "not_cached": 0,
    }
    cut = served(workload, [0, 32], output=[20, 40])
    assert seen_tokens(cut, workload).tolist() == [0, 49]


def test_a_prompt_whose_request_never_got_a_token_was_not_computed() -> None:
    workload = workload_of([(Span(0, 0, 64),)] * 2)
    run = served(workload, [0, 0], first=[np.nan, 1.5], output=[0, 4], finish=["abort", "length"])
    assert seen_tokens(run, workload).tolist() == [0, 0]


def test_rounds_that_hit_only_at_the_third_visit() -> None:
    """15 prefixes of 4000 + 64 in three rounds, hits only in the third, as stock vLLM does on tiny-gemma3."""
    workload = build("rounds:prefixes=15,prefix=4000,suffix=64,output=16,rounds=3")
    run = served(workload, [0] * 30 + [4000] * 15, engine=EngineInfo(block_size=32))
    assert rounds(run) == [
        Round(60_960, 0, round=0, requests=15, ttft_ms_mean=500.0),
        Round(60_960, 0, round=1, requests=15, ttft_ms_mean=500.0),
        Round(60_960, 60_000, round=2, requests=15, ttft_ms_mean=500.0),
    ]
    cache = prefix_cache(run, workload)
    assert cache.misses == {
        "cold": 60_960 + 2 * 15 * 64,
        "partial_block": 0,
        "last_token": 0,
        "not_cached": 60_000,
    }


def test_chat_turns_are_rounds_and_workloads_without_rounds_have_none() -> None:
    chat = build("chat:sessions=2,turns=3")
    assert [r.round for r in rounds(served(chat, [0] * 6))] == [0, 1, 2]
    decode = build("decode:requests=3")
    assert rounds(served(decode, [0] * 3)) == []


def test_a_round_without_first_tokens_has_no_mean() -> None:
    workload = build("rounds:prefixes=1,rounds=2")
    run = served(workload, [0, -1], first=[0.5, np.nan])
    assert [r.ttft_ms_mean for r in rounds(run)] == [500.0, None]
    assert rounds(run)[1].query_tokens == 0


def test_rounds_that_were_never_sent_are_not_listed() -> None:
    workload = build("rounds:prefixes=2,rounds=3")
    unsent = [np.nan] * 3
    run = served(
        workload, [0, 0, -1, -1, -1, -1], sent=[0.0, 1.0, 2.0, *unsent], first=[0.5, 1.5, np.nan, *unsent]
    )
    assert [(r.round, r.requests) for r in rounds(run)] == [(0, 2), (1, 1)]


def test_replayed_causes_are_used_if_they_add_up() -> None:
    workload = workload_of([(Span(0, 0, 100),)])
    told = {"cold": 60, "evicted": 40}
    assert prefix_cache(served(workload, [0], extra=Extras(misses=told)), workload).misses == told
    for wrong in ({"cold": 60}, {"cold": 101, "evicted": -1}, {"cold": "many"}, [100], {}):
        assert (
            prefix_cache(served(workload, [0], extra=read_extras({"misses": wrong})), workload).misses["cold"]
            == 100
        )


def test_without_its_workload_a_run_still_adds_up() -> None:
    workload = workload_of([(Span(0, 0, 100),), (Span(0, 0, 100),)])
    run = served(workload, [0, 96])
    assert prefix_cache(run, None).misses == {"unclassified": 104}
    other = workload_of([(Span(0, 0, 100),)])
    assert prefix_cache(run, other).misses == {"unclassified": 104}
    assert prefix_cache(run, build("decode:requests=2")).misses == {"unclassified": 104}


def test_the_match_unit_is_the_engines() -> None:
    assert match_unit(Run(header_of())) == 16
    told = EngineInfo(block_size=16, settings={"hit_alignment_tokens": 64})
    assert match_unit(Run(header_of(engine=told))) == 64
    for nothing in (None, 0, "64"):
        assert (
            match_unit(
                Run(header_of(engine=EngineInfo(block_size=16, settings={"hit_alignment_tokens": nothing})))
            )
            == 16
        )


@pytest.mark.parametrize("name", ["decode", "zipf", "mix", "chat"])
def test_a_perfect_cache_leaves_only_unavoidable_misses(name: str) -> None:
    workload = build(name)
    empty = served(workload, [0] * len(workload.requests))
    usable = miss_causes(empty, workload)["not_cached"]
    perfect = prefix_cache(served(workload, usable.tolist()), workload)
    assert perfect.misses["not_cached"] == 0
    assert perfect.hit_tokens == usable.sum()
    assert perfect.misses["cold"] == prefix_cache(empty, workload).misses["cold"]
