"""Which window blocks are kept: what must hit at the second visit, hits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.plugin.core import state
from kvtune.plugin.core.settings import parse
from tests.plugin.core import steady_rig
from tests.plugin.core.pool_rig import BOTH, HYBRID, Engine, tokens

pytestmark = pytest.mark.vllm


@BOTH
@pytest.mark.parametrize("suffix", [3, 8, 17, 40])
def test_a_new_suffix_hits_at_the_second_visit(asynchronous: bool, suffix: int) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous)
    prefix = tokens(1, 200)
    ours = Engine(shape, parse({"slack": 40, "min_drop": 2}))
    stock = Engine(shape, None)
    by_name = {}
    for name, engine in (("ours", ours), ("stock", stock)):
        by_name[name] = [engine.serve(prefix + tokens(10 + visit, suffix)) for visit in range(3)]
    assert by_name["ours"] == [0, 200, 200]
    if suffix > shape.block:
        assert by_name["stock"] == [0, 0, 200]


@BOTH
@pytest.mark.parametrize("flood", [0, 30])
def test_an_extra_that_stock_keeps_from_its_second_visit_on_is_an_ordinary_block(
    asynchronous: bool, flood: int
) -> None:
    """The prefix's end at its second visit: stock stores that window then, and a flood of cold prompts takes extras."""
    shape = replace(HYBRID, asynchronous=asynchronous, blocks=600)
    prefix, hits = tokens(1, 200), {}
    for name, settings in (("ours", parse({"slack": 40, "min_drop": 2})), ("stock", None)):
        engine = Engine(shape, settings)
        hits[name] = [engine.serve(prefix + tokens(10 + visit, 17)) for visit in range(2)]
        for number in range(flood // 10):
            engine.serve(tokens(100 + number, 100))
        hits[name].append(engine.serve(prefix + tokens(20, 17)))
    assert hits == {"ours": [0, 200, 200], "stock": [0, 0, 200]}


@BOTH
def test_a_suffix_longer_than_the_slack_hits_at_a_speculative_window(asynchronous: bool) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous)
    engine = Engine(shape, parse({"slack": 16, "windows": 3, "min_drop": 2}))
    prefix = tokens(1, 200)
    assert engine.serve(prefix + tokens(2, 50)) == 0
    hit = engine.serve(prefix + tokens(3, 50))
    # Before the slack of 250 tokens the last multiples of 16, 32 and 64 are 224, 224 and 192.
    assert hit == 192
    none = Engine(shape, parse({"slack": 16, "windows": 0, "min_drop": 2}))
    none.serve(prefix + tokens(2, 50))
    assert none.serve(prefix + tokens(3, 50)) == 0


@BOTH
def test_speculative_windows_stand_at_round_places_whatever_the_length(asynchronous: bool) -> None:
    """A prefix of 4 x slack tokens is resumed at its own end behind suffixes of any length up to that."""
    engine = Engine(
        replace(HYBRID, asynchronous=asynchronous), parse({"slack": 16, "windows": 4, "min_drop": 2})
    )
    prefix = tokens(1, 128)
    for suffix in (50, 21, 120):
        engine.scheduler.reset_prefix_cache()
        assert engine.serve(prefix + tokens(suffix, suffix)) == 0
        assert engine.serve(prefix + tokens(1000 + suffix, suffix + 5)) == 128


@BOTH
def test_the_next_turn_of_a_chat_hits_the_answer_too(asynchronous: bool) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous)
    hits = {}
    for name, settings in (("ours", parse({"min_drop": 2})), ("stock", None)):
        engine = Engine(shape, settings)
        first = engine.add(tokens(1, 100), 40)
        turn = engine.scheduler.requests[first]
        engine.drain()
        hits[name] = engine.serve([*turn.prompt_token_ids, *turn.output_token_ids, *tokens(2, 30)])
    assert hits["ours"] == (100 + 40 - 1) // 4 * 4
    assert hits["stock"] == 100 // 4 * 4 or hits["stock"] < hits["ours"]


def two_at_a_time(engine: Engine) -> list[int]:
    """A prompt ends in the middle of another one's window, and its output ends when that one's block is free."""
    first = tokens(1, 100)
    engine.add(first, 12)
    engine.step()
    engine.add([*first, *tokens(2, 8)], 60)
    engine.drain()
    return [*first, *tokens(2, 8), *tokens(3, 8)]


def warmed_up(engine: Engine) -> list[int]:
    """A prefix is sent alone, and a question is asked behind it; the next one is another."""
    prefix = tokens(1, 100)
    engine.serve([*prefix, 1], 2)
    engine.serve(prefix + tokens(2, 30), 20)
    return prefix + tokens(3, 30)


def answered_again(engine: Engine) -> list[int]:
    """The second turn of a conversation is sent once more."""
    first = engine.add(tokens(1, 100), 40)
    turn = engine.scheduler.requests[first]
    engine.drain()
    second = [*turn.prompt_token_ids, *turn.output_token_ids, *tokens(2, 6)]
    engine.serve(second, 60)
    return second


@BOTH
@pytest.mark.parametrize("before", [two_at_a_time, warmed_up, answered_again])
def test_what_stock_still_hits_after_a_flood_ours_hits(
    asynchronous: bool, before: Callable[[Engine], list[int]]
) -> None:
    """Windows that stock keeps by age do not go before others, whatever the core has learnt from their prompts."""
    shape = replace(HYBRID, asynchronous=asynchronous, blocks=260)
    found = []
    for flood in range(0, 15, 2):
        hits = []
        for settings in (None, parse({"min_drop": 2})):
            engine = Engine(shape, settings)
            prompt = before(engine)
            for number in range(flood):
                engine.serve(tokens(100 + number, 60), 4)
            hits.append(engine.serve(prompt))
        found.append(hits)
    assert all(ours >= stock for stock, ours in found), found
    assert found[0][0] and not found[-1][0], f"a flood that takes nothing, and one that takes all: {found}"


@BOTH
def test_hits_survive_release_and_a_flood_of_one_offs(asynchronous: bool) -> None:
    """`two_class` keeps a prefix that was hit; stock loses it to prompts that never come again."""
    shape = replace(HYBRID, asynchronous=asynchronous, blocks=400)
    hits = {}
    for name, settings in (
        ("ours", parse({"policy": "two_class", "reuse_bonus_s": 1e9, "slack": 16, "min_drop": 2})),
        ("stock", None),
    ):
        engine = Engine(shape, settings)
        prefix = tokens(1, 200)
        for visit in range(3):
            engine.serve(prefix + tokens(20 + visit, 8))
        for flood in range(12):
            engine.serve(tokens(100 + flood, 200))
        hits[name] = engine.serve(prefix + tokens(90, 8))
    assert hits == {"ours": 200, "stock": 0}


@BOTH
def test_the_published_policy_pins_chunk_ends_and_not_decode_steps(asynchronous: bool) -> None:
    engine = Engine(replace(HYBRID, asynchronous=asynchronous), parse({"policy": "pin", "min_drop": 4}))
    engine.serve(tokens(1, 128), output=60)
    queues = engine.pool.free_block_queue
    pinned = queues.queues[3].num_free_blocks
    # Two groups, windows of three blocks at the chunk ends 32, 64, 96 and 128; two of the last one's blocks are
    # also the window at 124, where a resend resumes: that one ages as stock's does.
    assert pinned == 2 * (3 * 3 + 1)
    hit = engine.serve(tokens(1, 100) + tokens(9, 50))
    assert hit == 96


@pytest.fixture
def looking_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes that cover one token after their block, as EAGLE has them from 0.33 on: a full last block has none."""
    hasher_of = steady_rig.get_request_block_hasher
    if "num_hash_lookahead_tokens" not in inspect.signature(hasher_of).parameters:
        pytest.skip("this vLLM's hashes never look ahead")
    ahead: dict[int, Any] = {HYBRID.block: hasher_of(HYBRID.block, steady_rig.sha256, 1)}
    monkeypatch.setattr(steady_rig, "_hashers", ahead)


@BOTH
@pytest.mark.parametrize("settings", [{"slack": 40}, {"policy": "pin"}])
@pytest.mark.parametrize("retention", [0, None])
def test_a_full_block_without_a_hash_waits_for_it(
    looking_ahead: None, asynchronous: bool, settings: dict[str, Any], retention: int | None
) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous, retention=retention)
    ours, stock = Engine(shape, parse({"min_drop": 2, **settings})), Engine(shape, None)
    for length in (55, 56, 57, 192, 193):
        prefix = tokens(length, length)
        for visit in range(3):
            prompt = prefix + tokens(1000 * length + visit, 8)
            hit, least = ours.serve(prompt, 7), stock.serve(prompt, 7)
            assert hit >= least
            # The last block of the prefix has another hash with every token that follows it.
            assert hit <= (length - 1) // shape.block * shape.block
    assert state.state()["parts"].get("pinning") is not False, state.state()["notes"]
    assert state.counters()["pool_failures"] == 0
