"""How a server's misses are divided by its events: sums, windows, restarts; and windows of what real servers did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvtune.servers.watch.account import Account
from kvtune.servers.watch.totals import Look, Totals
from tests.servers.watch.recordings import NAMES, recorded


def look(at: float, queries: int, hits: int = 0, **more: Any) -> Look:
    return Look(at, queries, hits, **more)


def begun(first: Look) -> Totals:
    totals = Totals()
    totals.begin(first)
    return totals


def test_a_window_says_what_is_being_computed_and_its_tail_when_it_is_computed() -> None:
    totals = Totals()
    start = totals.begin(look(0.0, 0, prompts=0))
    totals.add(look(0.5, 10_016, prompts=0, tokens={"cold": 2_048}))
    for step in range(1, 4):
        totals.add(look(0.5 + step / 2, 10_016, prompts=0, tokens={"cold": 2_048 + 2_048 * step}))
        assert totals.since(start).misses == {"cold": 2_048 + 2_048 * step, "computing": 7_968 - 2_048 * step}
    done = look(2.5, 10_016, prompts=10_016, tokens={"cold": 10_000})
    totals.add(done)
    totals.add(replace(done, at=3.0))
    assert totals.since(start).misses == {"cold": 10_000, "tails": 16}


def test_quick_looks_wait_for_the_events_of_a_prompt_that_the_counters_have() -> None:
    totals = Totals()
    start = totals.begin(look(0.0, 0, prompts=0, idle=True))
    for tenth in range(1, 3):
        totals.add(look(tenth / 10, 10_016, prompts=10_016, idle=True))
        assert totals.since(start).misses == {"computing": 10_016}
    totals.add(look(0.4, 10_016, prompts=10_016, idle=True, tokens={"cold": 10_000}))
    assert totals.since(start).misses == {"cold": 10_000, "tails": 16}


def test_a_window_has_the_causes_of_its_own_misses() -> None:
    totals = begun(look(0.0, 0))
    mark = totals.add(look(0.5, 1_000, tokens={"cold": 600}))
    totals.add(look(1.0, 1_500, tokens={"cold": 700, "evicted": 300}))
    assert totals.since(mark).misses == {"computing": 500}  # the 400 that came are of misses before the mark
    totals.add(look(1.5, 1_500, tokens={"cold": 1_200, "evicted": 300}))
    assert totals.since(mark).misses == {"cold": 500}


def test_what_tails_cannot_explain_is_of_requests_that_were_aborted() -> None:
    totals = begun(look(0.0, 0, prompts=0, idle=True))
    more = {"block": 32, "tokens": {"cold": 320}}
    totals.add(look(0.5, 3_340, prompts=0, answered=0, **more))
    totals.add(look(1.0, 3_340, prompts=340, answered=1, idle=True, **more))
    totals.add(look(1.5, 3_340, prompts=340, answered=1, idle=True, **more))
    assert totals.missed == Counter(cold=320, tails=20, aborted=3_000)  # 340 tokens are 10 blocks and 20


@pytest.mark.parametrize("every_s", [0.1, 0.5, 1.0, 15.0])
@pytest.mark.parametrize("size", [1_000, 5_000])
def test_requests_that_break_off_take_no_events_from_later_ones(every_s: float, size: int) -> None:
    """Three minutes without an idle moment, a prompt a second, each tenth breaks off after 320 tokens."""
    totals = begun(look(0.0, 0, prompts=0, idle=True, block=16, answered=0))
    start, marks, whole = totals._marks[0], [], size // 16 * 16
    counted: Counter[str] = Counter()
    now = at = 0.0
    while now < 180:
        now += 1
        broken = now % 10 == 0
        counted.update(queries=size, cold=320 if broken else whole)
        counted.update({} if broken else {"prompts": size, "answered": 1})
        while at + every_s <= now:
            at += every_s
            known = {name: counted[name] for name in ("prompts", "answered")}
            marks.append(
                totals.add(look(at, counted["queries"], block=16, tokens={"cold": counted["cold"]}, **known))
            )
            if at >= 60:
                window = totals.since(next(mark for mark in marks if mark.at >= at - 30))
                least = 0.9 * (window.query_tokens - 4 * (size - 320))
                assert window.misses["cold"] >= least, (at, window)
    for at in (181.0, 196.0):
        idle = {"idle": True, "prompts": counted["prompts"], "answered": counted["answered"], "block": 16}
        totals.add(look(at, counted["queries"], tokens={"cold": counted["cold"]}, **idle))
    tails = counted["prompts"] - counted["answered"] * whole
    aborted = counted["queries"] - counted["prompts"] - 18 * 320
    told = totals.since(start).misses
    assert told.pop("cold") == counted["cold"] and totals.recomputed == 0
    if every_s <= 1:
        assert told == {"tails": tails, "aborted": aborted}
    else:  # of many prompts in one look, only the sum of their lengths is known
        assert sum(told.values()) == tails + aborted and tails <= told["tails"] <= 15 * counted["answered"]


@pytest.mark.parametrize("idle", [True, False])
def test_a_block_whose_event_comes_before_its_counter_is_no_aborted_request(idle: bool) -> None:
    """A turn adds one block and 5 tokens. Its event was here at a look whose counters did not have it yet."""
    totals = begun(look(0.0, 0, prompts=0, answered=0, idle=True, block=32))
    for at in (0.5, 1.0):
        totals.add(look(at, 0, prompts=0, answered=0, idle=True, block=32))
    more = {"block": 32, "tokens": {"answers": 32}}
    totals.add(look(1.5, 0, prompts=0, answered=0, idle=idle, **more))
    for at in (2.0, 2.5, 3.0):
        totals.add(look(at, 37, prompts=37, answered=1, idle=True, **more))
    assert totals.missed == Counter(tails=37)


def test_where_a_connector_loads_blocks_hits_are_whole_and_causes_unknown() -> None:
    totals = begun(look(0.0, 0, tokens={"cold": 0}))
    mark = totals.add(look(0.5, 1_000, tokens={"cold": 1_000}))
    totals.add(
        look(1.0, 2_000, 900, loaded=700, tokens={"cold": 1_000, "evicted": 700, "computed_twice": 100})
    )
    totals.add(
        look(12.0, 2_100, 900, loaded=700, tokens={"cold": 1_100, "evicted": 700, "computed_twice": 100})
    )
    assert totals.missed == Counter(cold=1_000, unknown=200) and totals.recomputed == 0
    assert (totals.hits, totals.loaded, totals.since(mark).misses) == (900, 700, {"unknown": 200})


def test_a_prompt_that_is_not_judged_yet_is_being_computed() -> None:
    totals = begun(look(0.0, 0, prompts=0))
    mark = totals.add(look(0.5, 1_000, prompts=1_000, pending=992))
    totals.add(look(1.0, 1_000, prompts=1_000, pending=992))
    assert totals.since(mark).misses == {} and totals.missed == Counter(tails=8)
    totals.add(look(1.5, 1_000, prompts=1_000, tokens={"cold": 992}))
    assert totals.missed == Counter(tails=8, cold=992)


def test_what_is_computed_again_after_preemption_is_no_miss() -> None:
    totals = begun(look(0.0, 0))
    again = {"cold": 100, "evicted": 96}
    totals.add(look(1.0, 100, tokens={"cold": 100}))
    totals.add(look(2.0, 100, preemptions=1, tokens=again))
    assert totals.missed == Counter(cold=100) and totals.recomputed == 0
    totals.add(look(12.0, 100, preemptions=1, tokens=again))
    totals.add(look(13.0, 130, preemptions=1, tokens=again))
    totals.add(look(23.0, 130, preemptions=1, tokens=again))
    assert totals.missed == Counter(cold=100, tails=30)
    assert (totals.recomputed, totals.preemptions) == (96, 1)


@pytest.mark.parametrize(
    ("events", "preemptions", "told"), [(700, 0, True), (500, 0, False), (900, 0, False), (900, 1, True)]
)
def test_causes_stay_where_a_tiers_events_tell_what_the_server_counts_as_loaded(
    events: int, preemptions: int, told: bool
) -> None:
    """After a preemption a load is not counted. What does not agree may come within 10 s."""
    totals = begun(look(0.0, 0))
    more = {"loaded": 700, "loads_told": True, "preemptions": preemptions}
    tokens = {"cold": 1_000, "loaded": events}
    totals.add(look(1.0, 2_000, 900, tokens=tokens, **more))
    assert totals.told and totals.missed == Counter(cold=1_000)
    mark = totals.add(look(12.0, 2_000, 900, tokens=tokens, **more))
    totals.add(look(13.0, 2_200, 900, tokens={**tokens, "evicted": 200}, **more))
    assert totals.told == told and totals.missed["cold"] == 1_000
    assert totals.since(mark).misses == ({"evicted": 200} if told else {"unknown": 200})


@pytest.mark.parametrize("name", NAMES)
def test_windows_of_a_recording_call_nothing_a_tail_that_is_being_computed(name: str) -> None:
    """A look every 0.5 s. Dividing each window's misses by its own events would call thousands of tokens tails."""
    run, account, totals = recorded(name), Account(), Totals()
    log, batches = sorted(run.log, key=lambda one: one.t0), run.received()
    at, end = log[0].t0 - 1, max(batches[-1].batch.ts, log[-1].t1) + 1.1
    marks = [totals.begin(look(at, 0, prompts=0), at)]
    worst = 0
    while at < end:
        at += 0.5
        asked = [one for one in log if one.t0 < at - 0.2]
        done = [one for one in log if one.t1 < at]
        while batches and batches[0].batch.ts < at:
            account.add(batches.pop(0))
        size = max((g.block_size for b in account.blocks.values() for g in b.groups.values()), default=0)
        queries, hits = sum(len(one.prompt) for one in asked), sum(one.hit for one in asked)
        prompts = sum(len(one.prompt) for one in done)
        idle = len(done) == len(asked)
        if idle:
            account.settle()
        known = {"tokens": Counter(account.tokens), "pending": account.pending}
        marks.append(totals.add(look(at, queries, hits, prompts=prompts, idle=idle, **known)))
        mark = next(one for one in marks if one.at >= at - 10)
        # An answer's block that a turn computed has no cause: one a prompt at most.
        most = sum(len(one.prompt) % size + size for one in done if one.t0 > mark.at - 10)
        worst = max(worst, totals.since(mark).misses.get("tails", 0) - most)
    assert worst <= 0
    stored = Counter({cause: count for cause, count in account.tokens.items() if cause != "answers"})
    over = stored.total() - totals.misses + totals.missed["tails"]
    assert totals.recomputed == over and totals.missed.total() == totals.misses
    assert not Counter(totals.missed) - stored - Counter(tails=totals.missed["tails"])
