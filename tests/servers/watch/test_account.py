"""The account of a server's KV events, against what four stock servers really did (recordings.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import packed
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.blocks import Blocks, Evicted
from kvtune.servers.watch.cache import Cache
from kvtune.servers.watch.elsewhere import Elsewhere
from kvtune.servers.watch.events import Batch, Cleared, Received, Removed, Stored
from kvtune.servers.watch.metrics import read
from kvtune.servers.watch.requests import Answered, Requests
from tests.data.test_causes import OF_PROMPT
from tests.servers.watch.joined import join
from tests.servers.watch.recordings import NAMES, OLDER, TIERS, Recorded, recorded


@pytest.mark.parametrize("name", [*NAMES, *OLDER, *TIERS])
def test_each_requests_hit_is_what_the_server_reported_and_its_causes_add_up(name: str) -> None:
    run = recorded(name)
    answered = join(run.received(), run.log, Account())
    assert [one.asked.name for one in answered if one.tally.hit_tokens != one.asked.hit] == []
    assert len(answered) == len(run.log) == 51
    assert all(sum(one.tally.misses.values()) == one.tally.missed for one in answered)
    scrape = read(run.metrics, 0.0)
    loaded = scrape.get("external_prefix_cache_hits") or 0
    assert bool(loaded) == (name in TIERS)
    assert sum(one.tally.hit_tokens for one in answered) == scrape.get("prefix_cache_hits") + loaded
    assert sum(len(one.asked.prompt) for one in answered) == scrape.get("prefix_cache_queries")


@pytest.mark.parametrize("name", NAMES)
def test_the_token_at_which_a_prompt_differs_is_exact(name: str) -> None:
    run = recorded(name)
    answered = {one.asked.name: one for one in join(run.received(), run.log, Account())}
    for at in (200, 207, 214):
        assert answered[f"diverged {at}"].agrees == at
        assert answered[f"diverged {at}"].like.startswith("prefix")


def test_without_a_window_at_the_boundary_a_seen_prefix_is_not_retained() -> None:
    small, large = (
        Counter(cause for one in _answered(name) for cause in one.tally.misses)
        for name in ("sliding_windows", "sliding_windows_large_pool")
    )
    assert small["evicted"] and not large["evicted"]
    assert small["not_retained"] and large["not_retained"]


def _answered(name: str) -> list[Answered]:
    run = recorded(name)
    return join(run.received(), run.log, Account())


@pytest.mark.parametrize("name", [*NAMES, *TIERS])
def test_without_prompts_no_whole_block_gets_a_wrong_cause(name: str) -> None:
    """Of requests one after another. A turn's one new block cannot be told from an answer's: it gets no cause."""
    run = recorded(name)
    requests = run.sequential()
    before = min(one.t0 for one in run.log if one not in requests)
    batches = [one for one in run.received() if one.batch.ts < before]
    account = Account()
    for one in batches:
        account.add(one)
    account.settle()
    truth = _causes_of_whole_blocks(run, join(batches, requests, Account()), account)
    missing = truth - account.tokens
    assert not set(missing) - {"cold"}
    assert missing.total() <= account.tokens["answers"]
    assert missing.total() <= 0.015 * truth.total()
    hits = ("answers", "loaded")
    told = Counter({cause: tokens for cause, tokens in account.tokens.items() if cause not in hits})
    assert not told - truth
    assert bool(account.tokens["loaded"]) == account.loads_told == (name in TIERS)


def test_blocks_that_a_tier_holds_are_hits_here_and_for_another_servers_prompt() -> None:
    """The tier's events come without tokens, as vLLM's do; what it stores in a step, that step did not find."""
    here, there = Blocks(by_content=True), Blocks(by_content=True)
    below = {"medium": "CPU", "token_ids": [], "block_size": 0}
    gone = [Removed([name], "GPU", 0) for name in (1, 2, 3)]
    for events in ([stored([1, 2, 3], None), stored([1, 2], None, **below)], gone, [Removed([9], "CPU", 0)]):
        [*there.stretches(Batch(1.0, events), Evicted())]
    assert there.tier.stored and there.live([1, 2, 3]) == 2 and there.in_tier([3]) == 0
    elsewhere = Elsewhere(2.0, [])
    for stretch in here.stretches(Batch(2.0, [stored([1, 2, 3], None)]), Evicted()):
        elsewhere.add([], b"", stretch, [(there, True)])
    assert elsewhere.held == elsewhere.most_held == 8
    [*there.stretches(Batch(3.0, [stored([7], None, group=1, kv_cache_spec_sliding_window=8)]), Evicted())]
    assert there.live([1, 2, 3]) == 0, "of the window no tier has a block"
    [*there.stretches(Batch(4.0, [stored([1, 2], None, group=1, **below)]), Evicted())]
    assert there.live([1, 2, 3]) == 2 and there.live([2, 3]) == 1


def test_a_chunk_that_goes_on_is_computed_though_a_tier_holds_its_blocks() -> None:
    below = {"medium": "CPU", "token_ids": [], "block_size": 0}
    account = Account()
    account.add(Received(0, Batch(1.0, [stored([1, 2, 3], None), stored([2, 3], None, **below)])))
    account.add(Received(0, Batch(2.0, [Removed([name], "GPU", 0) for name in (1, 2, 3)])))
    account.add(Received(0, Batch(3.0, [stored([1], None)])))
    account.add(Received(0, Batch(4.0, [stored([2, 3], 1)])))
    account.settle()
    assert account.tokens == Counter(cold=12, evicted=12)


def _causes_of_whole_blocks(run: Recorded, answered: list[Answered], account: Account) -> Counter[str]:
    size = next(iter(account.blocks[0].groups.values())).block_size
    truth: Counter[str] = Counter()
    for one in answered:
        ends, at = [], one.tally.hit_tokens
        for cause in OF_PROMPT:
            at += one.tally.misses.get(cause, 0)
            ends.append((at, cause))
        for end in range(one.tally.hit_tokens + size, len(one.asked.prompt) + 1, size):
            truth[next(cause for last, cause in ends if end <= last)] += size
    truth["cold"] += truth.pop("diverged", 0)  # the texts that prompts share are not known to events
    return truth


def stored(names: list[int], parent: int | None, group: int = 0, **more: object) -> Stored:
    tokens = [token for name in names for token in (name, name, name, name)]
    return msgspec.convert(
        {
            "type": "BlockStored",
            "block_hashes": names,
            "token_ids": tokens,
            "block_size": 4,
            "parent_block_hash": parent,
            "group_idx": group,
            "medium": "GPU",
            **more,
        },
        Stored,
    )


def played(*batches: Sequence[Stored | Removed | Cleared]) -> Account:
    account = Account()
    for number, events in enumerate(batches):
        account.add(Received(0, Batch(float(number), list(events))))
    account.settle()
    return account


@pytest.mark.parametrize(
    ("batches", "tokens"),
    [
        ([[stored([1, 2, 3], None)], [stored([3], 2)]], {"cold": 12, "last_token": 4}),
        ([[stored([1, 2, 3], None), stored([1, 2, 3], None)]], {"cold": 24}),
        ([[stored([1, 2, 3], None)], [stored([1, 2, 3], None)]], {"cold": 12, "computed_twice": 12}),
        ([[stored([1, 2], None)], [stored([3], 2)], [stored([4], 3)]], {"cold": 8, "answers": 8}),
    ],
    ids=["a full hit computes its last block", "in one step", "in two steps", "an answer has no cause"],
)
def test_what_is_computed_again_or_at_once_is_named(
    batches: list[list[Stored]], tokens: dict[str, int]
) -> None:
    assert played(*batches).tokens == tokens


def test_what_another_rank_has_computed_is_not_new() -> None:
    account = played([stored([1, 2, 3], None)])
    account.add(Received(1, Batch(1.0, [stored([1, 2, 4], None)])))
    account.add(Received(1, Batch(2.0, [stored([1, 2, 4], None)])))
    account.settle()
    assert account.tokens == {"cold": 16, "other_engine": 8, "computed_twice": 12}


def test_a_log_over_two_ranks_says_what_the_other_one_had() -> None:
    words = [token for name in (1, 2, 3) for token in (name,) * 4]
    other = [*words[:9], 7, 7, 7]
    asked = [
        Logged("first", words, [], 0.0, 1.5, 0),
        Logged("elsewhere", other, [], 2.0, 3.5, 0),
        Logged("again", [*words, 9], [], 4.0, 5.5, 12),
    ]
    changed = msgspec.structs.replace(stored([1, 2, 4], None), token_ids=other)
    received = [Received(0, Batch(1.0, [stored([1, 2, 3], None)])), Received(1, Batch(3.0, [changed]))]
    first, elsewhere, again = join(received, asked, Account())
    assert (
        first.tally.misses == {"cold": 12}
        and again.tally.hit_tokens == 12
        and again.tally.misses == {"cold": 1}
    )
    assert elsewhere.tally.hit_tokens == 0 and elsewhere.tally.misses == {"other_engine": 8, "cold": 4}
    assert elsewhere.like == "first" and elsewhere.agrees == 9


ASKED = [*(token for name in (1, 2, 3) for token in (name,) * 4), 9]


def in_session(name: str, *blocks: int) -> Stored:
    return msgspec.structs.replace(stored(list(blocks), None), session_id=name)


def test_of_two_equal_prompts_at_once_the_session_id_tells_which_one_computed_its_blocks() -> None:
    asked = [Logged(name, ASKED, [], 0.0, 2.0, session=name) for name in ("a", "b")]
    for name in ("a", "b"):
        answered = join([Received(0, Batch(1.0, [in_session(name, 1, 2, 3)]))], asked, Account())
        assert {one.asked.name: one.tally.hit_tokens for one in answered} == {"a": 12, "b": 12} | {name: 0}


def test_blocks_of_another_session_are_not_taken_for_a_requests() -> None:
    first = Logged("first", [8] * 5, [], 0.0, 0.5, session="first")
    asked = [first, Logged("a", ASKED, [], 0.6, 2.0, session="a"), Logged("old", ASKED, [], 0.6, 2.0)]
    batches = [Received(0, Batch(0.2, [in_session("first", 8)]))]
    batches.append(Received(0, Batch(1.0, [in_session("elsewhere", 1, 2, 3)])))
    answered = {one.asked.name: one.tally.hit_tokens for one in join(batches, asked, Account())}
    assert answered == {"first": 0, "a": 12, "old": 0}, "a log may have no session ids"


def test_a_log_whose_session_ids_are_its_own_is_joined_by_tokens() -> None:
    asked = [Logged("a", ASKED, [], 0.0, 2.0, session="of the client")]
    (one,) = join([Received(0, Batch(1.0, [in_session("of the header", 1, 2, 3)]))], asked, Account())
    assert one.tally.hit_tokens == 0


def chunk(
    names: list[int], parent: int | None, kept: list[int] | None = None, size: int = 128
) -> list[Stored]:
    """A chunk on a model with a sliding window of one block: its group keeps the last block, or `kept`."""
    spec = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": size + 1}
    full = msgspec.structs.replace(
        stored(names, parent, 1), block_size=size, token_ids=[name for name in names for _ in range(size)]
    )
    sliding = msgspec.convert({**msgspec.to_builtins(full), **spec, "group_idx": 0}, Stored)
    return [msgspec.structs.replace(sliding, block_hashes=names[-1:] if kept is None else kept), full]


def test_a_prompt_of_two_chunks_is_judged_when_it_is_whole() -> None:
    """The window at block 4 was kept and evicted: the first chunk alone would be called not kept."""
    gone = Removed(block_hashes=[4], group_idx=0)
    first, second = chunk([1, 2], None, []), chunk([3, 4], 2)
    account = played([*first], [*second], [gone], [*first], [*second])
    assert account.tokens == {"cold": 512, "evicted": 512}
    assert account.lists.prefixes[1].visits == 2 and account.lists.prefixes[1].lost_tokens == 512


def test_a_request_that_follows_a_short_one_at_once_is_no_chunk_of_it() -> None:
    account = played([stored([1, 2, 3], None)], [stored([4, 5], 3)])
    assert account.lists.prefixes[1].visits == 2 and account.tokens == {"cold": 20}


def test_what_is_forgotten_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.blocks.REMEMBERED", 2)
    blocks, evicted = Blocks(), Evicted()
    for events in ([stored([1, 2, 3, 4], None)], [Removed(block_hashes=[4, 3, 2, 1], group_idx=0)]):
        for _ in blocks.stretches(Batch(0.0, list(events)), evicted):
            pass
    assert blocks.forgotten == 2 and blocks.held() == 0 and set(blocks.known) == {1, 2}
    assert blocks.find(packed([1] * 4 + [2] * 4 + [3] * 4), 4) == [1, 2]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=2), st.integers(0, 3))
def test_a_boundary_needs_every_block_of_full_attention_and_the_last_ones_of_a_window(
    held: list[list[bool]], window: int
) -> None:
    blocks, evicted = Blocks(), Evicted()
    names = [1, 2, 3, 4, 5, 6]
    spec = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4 * window + 1}
    events = [stored(names, None, 0, **(spec if window else {})), stored(names, None, 1)]
    gone = [
        Removed(block_hashes=[name], group_idx=group)
        for group in (0, 1)
        for name, kept in zip(names, held[group], strict=True)
        if not kept
    ]
    for batch in (events, gone):
        for _ in blocks.stretches(Batch(0.0, list(batch)), evicted):
            pass

    def possible(end: int) -> bool:
        need = min(window, end) if window else end
        return all(held[1][:end]) and all(held[0][end - need : end])

    assert blocks.live(names) == max(end for end in range(7) if possible(end))
    assert blocks.reach([state.kept for state in blocks.states(names)]) == 6


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_is_full_forgets_what_was_evicted_and_keeps_what_is_held(name: str) -> None:
    free, full = Account(), Account(most_bytes=1)
    for received in recorded(name).received():
        free.add(received)
        full.add(received)
        (all_, kept) = (account.blocks[0] for account in (free, full))
        assert kept.remembered == 0 and set(kept.known) == {n for n, b in all_.known.items() if b.held}
    assert full.held_bytes <= free.held_bytes and kept.forgotten >= all_.remembered


@pytest.mark.parametrize("complete", [True, False])
def test_a_prompt_of_another_salt_is_that_to_its_last_token(complete: bool) -> None:
    """Also the part of its last block, which no event tells."""
    requests, prompt = Requests(Cache(complete=complete), 32), list(range(251))
    for number, salt in enumerate("ab"):
        asked = Logged(salt, prompt, [9], number, number + 0.5, 0, salt)
        requests.open(number, asked)
        requests.first(number)
        requests.ended(number, asked)
        answered = requests.close(number)
    assert answered is not None and answered.tally is not None
    assert answered.tally.misses == {"other_salt": 251}
