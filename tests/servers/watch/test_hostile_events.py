"""KV events that no server of vLLM sends: whoever reaches the port can send anything."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvtune.base.errors import KvtuneError
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.audit import Audit, Rank
from kvtune.servers.watch.blocks import UNKNOWN, Blocks
from kvtune.servers.watch.events import (
    END,
    Asked,
    Reader,
    Received,
    Removed,
    Stored,
    Stream,
    decoded,
    measured,
)
from kvtune.servers.watch.export import Exporter
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.watched import Room, Watched
from tests.base.test_bounded import steps
from tests.servers.watch.played import HERE, Answers, Publisher, answers_of, counters, http, started, until

SIZE = 4


def stored(hashes: list[Any], parent: Any, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "medium": "GPU"}
    return {**event, "token_ids": [7] * (SIZE * len(hashes)), "block_size": SIZE, "group_idx": 0, **more}


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0, **more}


def payload(*events: Any, at: Any = 1.0) -> bytes:
    return msgspec.msgpack.encode([at, list(events), 0])


WRONG = {
    "a group of 3e10": payload(stored([1], None, group_idx=3 * 10**10)),
    "a group of -1": payload(stored([1], None, group_idx=-1)),
    "a removed group of -1": payload(removed(1, group_idx=-1)),
    "blocks of no token": payload(stored([1], None, block_size=0)),
    "blocks of 2^40 tokens": payload(stored([1], None, block_size=1 << 40)),
    "a token of -1": payload(stored([1], None, token_ids=[-1] * SIZE)),
    "a token of 2^40": payload(stored([1], None, token_ids=[1 << 40] * SIZE)),
    "a token that is true": payload(stored([1], None, token_ids=[True] * SIZE)),
    "a window of -5": payload(stored([1], None, kv_cache_spec_sliding_window=-5)),
    "a long hash": payload(stored([b"x" * 1000], None)),
    "a long name": payload(stored([1], None, kv_cache_spec_kind="x" * 1000)),
    "a time that is NaN": payload(removed(1), at=float("nan")),
    "a time without end": payload(removed(1), at=float("inf")),
    "a time before 1970": payload(removed(1), at=-1.0),
    "many events": payload(*[removed(1)] * 50_001),
    "another kind": payload({"type": "BlockMoved"}),
    "nested lists": b"\x91" * 200_000,
    "nested keys": payload(stored([1], None))[:-1] + b"\x91" * 200_000,
}


@pytest.mark.parametrize("what", WRONG)
def test_numbers_that_no_server_sends_are_not_read(what: str) -> None:
    with pytest.raises(ValueError):
        decoded(WRONG[what])


def account(*payloads: bytes) -> Account:
    made = Account()
    for one in payloads:
        made.add(Received(0, decoded(one)))
    return made


@contextmanager
def watched(publisher: Publisher) -> Iterator[Watched]:
    with (
        closing(publisher),
        http(answers_of(publisher, counters(100, 40))) as base,
        closing(Watched(Server(base))) as watching,
    ):
        yield watching


CIRCLES = {
    "itself": [stored([7], 7), stored([8], 7)],
    "two": [stored([8], 7), stored([7], 8), stored([9], 8)],
    "three": [stored([8], 7), stored([9], 8), stored([7], 9), stored([10], 7)],
    "twice in one event": [stored([7, 7, 7], None), stored([8], 7)],
    "its own end": [stored([1, 2, 3], 3), stored([4], 3)],
    "known to be elsewhere": [stored([1, 2], None), stored([2, 1], None), stored([3], 1)],
    "forgotten and back": [
        *[
            stored([2], None),
            stored([1], 2),
            removed(2),
            stored([2], 99),
            stored([1, 2], None),
            stored([3], 1),
        ]
    ],
}


@pytest.mark.parametrize("what", CIRCLES)
def test_blocks_in_a_circle_end(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.blocks.REMEMBERED", 0)
    for events in (CIRCLES[what], [*CIRCLES[what], *CIRCLES[what][::-1], *CIRCLES[what]]):
        made = account(*(payload(event) for event in events))
        for blocks in made.blocks.values():
            for name in blocks.known:
                chain = blocks.chain(name)
                assert len(chain) == len(set(chain)) <= len(blocks.known)


def test_a_chain_whose_beginning_comes_later_is_whole_and_moves_with_its_parent() -> None:
    blocks = account(
        payload(stored([3, 4], 2)), payload(stored([5], 4)), payload(stored([1, 2], None))
    ).blocks[0]
    assert blocks.chain(5) == [1, 2, 3, 4, 5]
    assert blocks.known[3].end == UNKNOWN
    blocks = account(payload(stored([3, 4], 2)), payload(stored([2], 1)), payload(stored([1], None))).blocks[
        0
    ]
    assert blocks.chain(4) == [1, 2, 3, 4]
    blocks = account(
        payload(stored([2], 1)), payload(stored([3], 2)), payload(stored([1, 2], None)), payload(removed(2))
    ).blocks[0]
    assert blocks.chain(3) == [1, 2, 3] and blocks.known[2].end == 2 * SIZE


def test_a_block_that_moved_to_its_parent_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to stay in the list of its old parent, and forgetting it ended the look."""
    monkeypatch.setattr("kvtune.servers.watch.blocks.REMEMBERED", 0)
    made = account(payload(stored([3], 2)), payload(stored([1, 2, 3], None)), payload(removed(3), removed(3)))
    assert 3 not in made.blocks[0].known and made.blocks[0].nearest(2, b"")[1] is None


def test_more_blocks_in_a_message_than_are_remembered_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.blocks.REMEMBERED", 3)
    event = stored(list(range(10)), None, block_size=SIZE)
    window = {"block_hashes": [], "group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    made = account(payload({**event, **window}, {**event, "group_idx": 1}), payload(stored([1, 1], None)))
    assert isinstance(made.blocks[0], Blocks)


def reader() -> Reader:
    """Without sockets."""
    made = Reader({}, "localhost")
    made.streams[0] = Stream()
    made._ways = {}
    return made


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


@pytest.mark.parametrize("frame", [b"", b"x" * 21, b"\x01" * 4000, b"\xff" * 8, number(1 << 48)])
def test_a_number_that_no_batch_has_is_a_message_that_cannot_be_read(frame: bytes) -> None:
    made = reader()
    made.hear(0, [b"", frame, payload()])
    assert (made.streams[0].unknown, len(made._heard)) == (1, 0)
    if frame != END:
        assert made.replayed(0, [b"", b"", frame, payload()], None, first=True) is Asked.SILENT
    assert made.streams[0].lost == 0


@pytest.mark.parametrize("count", [0, 1, 2, 4, 100])
def test_a_live_message_of_other_frames_cannot_be_read(count: int) -> None:
    made = reader()
    made.hear(0, [b""] * count)
    assert made.streams[0].unknown == 1


def test_live_messages_that_wait_have_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.events.HEARD_BYTES", 1000)
    made = reader()
    for at in range(100):
        made.hear(0, [b"", number(at), b"x" * 100])
    assert made._heard_bytes <= 1000 and made._heard[-1][1] == 99


def test_a_replay_whose_times_change_restarts_once_and_ends() -> None:
    """Batch 0 with another time at every answer: restart and replay used to call each other without end."""
    publisher = Publisher(HERE, HERE)
    with watched(publisher) as watching:
        publisher.publish([(0, payload(at=float(at))) for at in range(1, 4)])
        watching.start()
        publisher.subscribed()
        for at in range(4, 30):
            publisher.publish([(0, payload(at=float(at))), (3, payload(at=float(at)))])
        assert watching.reader is not None
        until(lambda: watching.reader is not None and watching.reader.streams[0].restarts > 5)
        shot = watching.look()
    assert watching.reader.problem == "" and shot.events.state == "on" and not shot.events.complete


def test_a_replay_without_end_is_bounded_and_looks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.watched.HISTORY_S", 0.5)
    monkeypatch.setattr("kvtune.servers.watch.events.HELD_BYTES", 1 << 16)

    class Endless(Publisher):
        def _serve(self, replay: str) -> None:
            client = self._router.recv_multipart()[0]
            at = 0
            while not self._stop.is_set():
                self._router.send_multipart((client, b"", b"", number(at), payload(stored([at], None))))
                at += 1

    publisher = Endless(HERE, HERE)
    with watched(publisher) as watching:
        watching.start()
        assert watching.reader is not None
        for _ in range(3):
            shot = watching.look()
            assert watching.reader._held <= 1 << 17
    assert not shot.events.complete


def test_a_reader_that_died_is_a_state_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(HERE, HERE)
    with watched(publisher) as watching:
        watching.start()
        assert watching.look().events.state == "on"
        publisher.subscribed()

        def broken(*_: object) -> None:
            raise RuntimeError("it broke")

        monkeypatch.setattr(Reader, "_got", broken)
        publisher.publish([(0, payload(stored([1], None)))])
        until(lambda: watching.look().events.state == "unreadable")
        shot = watching.look()
        assert any("the reader ended: it broke" in note for note in shot.notes)
        assert not shot.periods["10 s"].misses
        servers = Servers(Addresses([watching.server.base]), lambda *_: watching)
        servers._follow()
        servers.only.listens, servers.only.shot = True, shot
        exporter = Exporter(lambda: servers, print)
        exporter._servers = servers
        exporter.look()
        found = {s.name: s.value for metric in exporter.collect() for s in metric.samples}
        assert found["kvtune_events_complete"] == 0 and found["kvtune_server_up"] == 1


def test_more_cached_blocks_than_fit_in_memory_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.watched.MOST_HELD_BYTES", 10_000)
    publisher = Publisher(HERE, HERE)
    publisher.publish([(at, payload(stored([10 * at + n for n in range(10)], None))) for at in range(50)])
    with watched(publisher) as watching:
        watching.start()
        shot = watching.look()
    assert (
        shot.events.state == "unreadable"
        and sum(map(len, (b.known for b in watching.account.blocks.values()))) < 30
    )
    assert any("more blocks are cached than kvtune keeps in memory" in note for note in shot.notes)


def test_what_breaks_the_account_ends_the_reading_until_the_server_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtune.servers.watch.cache.MOST_WALKED", 20)
    publisher = Publisher(HERE, HERE)
    chain = stored(list(range(10)), None)
    publisher.publish([(0, payload(chain)), (1, payload(*[stored([n], 9) for n in range(20, 24)]))])
    with watched(publisher) as watching:
        watching.start()
        shot = watching.look()
        assert shot.events.state == "unreadable" and shot.hit_tokens == 40
        assert any("more than 20 blocks of context" in note for note in shot.notes)
        publisher.sent.clear()
        publisher.publish([(0, payload(stored([1], None), at=9.0))])
        asked, watching.server.scrape = watching.server.scrape, lambda: replace(asked(), started=100.0)  # type: ignore[method-assign]
        assert watching.look().restarts == 1
        assert watching.look().events.state == "on"


def test_what_breaks_a_look_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(Answers(counters(100, 40))) as watching:

        def broken(*_: object) -> None:
            raise OverflowError("too\nlarge")

        monkeypatch.setattr(watching.totals, "add", broken)
        with pytest.raises(KvtuneError) as lost:
            watching.look()
    assert "OverflowError: too large" in lost.value.message and "\n" not in lost.value.message
    assert json.loads(json.dumps(lost.value.message))


def one_block(name: int, parent: Any = None, **more: Any) -> dict[str, Any]:
    return stored([name], parent, token_ids=[name % 1000] * SIZE, **more)


Made = Callable[[int], list[list[dict[str, Any]]]]
"""The batches of a stream of this size."""
STREAMS: dict[str, Made] = {
    "roots": lambda n: [[one_block(name) for name in range(n)]],
    "roots of sessions": lambda n: [[one_block(name, session_id=f"{name}") for name in range(n)]],
    "roots in batches": lambda n: [[one_block(n * part + name) for name in range(n)] for part in range(3)],
    "one root again and again, and what follows it": lambda n: [
        [one_block(7)] * n + [one_block(100 + name, 7) for name in range(n)]
    ],
    "roots in a wide step, and what follows in the next": lambda n: [
        [stored([*range(10**6, 10**6 + 4 * n)], None), *(one_block(name) for name in range(n))],
        [one_block(10**5 + name, name) for name in range(n)],
    ],
    "blocks after one": lambda n: [[one_block(7), *(one_block(100 + name, 7) for name in range(n))]],
    "prompts of one block, each with its answer": lambda n: [
        [one_block(name), one_block(10**6 + name, name)] for name in range(n)
    ],
    "removals": lambda n: [[one_block(7)], [removed(*[7] * n)], [removed(*range(n))]],
    "copies": lambda n: [[one_block(7)] * n, [removed(7)] * n],
    "a tier": lambda n: [
        [one_block(name, medium="CPU") for name in range(n)],
        [removed(*range(n), medium="CPU")],
    ],
    "tiers": lambda n: [[one_block(name, medium=f"T{name % 7}") for name in range(n)], [removed(*range(n))]],
    "salts": lambda n: [[one_block(name, extra_keys=[[f"salt {name}"]]) for name in range(n)]],
}


def counted(take: Callable[[Received], object], batches: list[list[dict[str, Any]]]) -> int:
    """Lines of Python that counting takes."""
    came = [Received(0, decoded(payload(*events, at=float(at + 1)))) for at, events in enumerate(batches)]
    return steps(lambda: [take(received) for received in came])


@pytest.mark.parametrize("what", STREAMS)
@pytest.mark.parametrize("counts", [Account, Audit], ids=["account", "audit"])
def test_events_of_twice_the_size_take_twice_the_steps(counts: type[Account | Audit], what: str) -> None:
    """Of each stream eight times as much: quadratic work would take 64 times the steps."""
    small, large = (counted(counts().add, STREAMS[what](n)) for n in (40, 320))
    assert large < 10 * small


BEYOND = {
    "roots": ([one_block(name) for name in range(8_193)], "a step of vLLM has at most"),
    "resets": ([{"type": "AllBlocksCleared"}] * 1_001, "a step of vLLM has at most"),
    "media": ([one_block(1, medium=f"T{name}") for name in range(9)], "a step of vLLM has at most"),
    "removals": ([removed(*[1] * (1 << 17))] * 3, "a step of vLLM has at most"),
    "memory": (
        [one_block(1, extra_keys=[[["x" * 60_000 + "\U0001f600", 1]]])] * 290,
        "a step of vLLM has at most",
    ),
    "a medium's name": ([one_block(1, medium="x" * 101)], "length <= 100"),
    "an adapter's name": ([one_block(1, lora_name="x" * 1_025)], "length <= 1024"),
    "a group": ([one_block(1, group_idx=256)], "< 256|<= 255"),
    "keys of another kind": ([one_block(1, extra_keys=[[[]] * 9])], "another kind"),
}


@pytest.mark.parametrize("what", BEYOND)
def test_a_batch_that_vllm_cannot_produce_is_not_read(what: str) -> None:
    events, why = BEYOND[what]
    with pytest.raises(ValueError, match=why):
        decoded(payload(*events))


KEYS = {
    "empty lists": [[[]] * 400_000],
    "empty maps": [[{}] * 400_000],
    "lists of blocks": [[]] * 400_000,
    "keys of a block": [["x"] * 400_000],
    "a name": [["x" * 400_000]],
}


@pytest.mark.parametrize("what", KEYS)
def test_keys_take_a_part_of_what_they_could_become(what: str) -> None:
    """Each empty list was one byte of the message, and 56 of memory, as often as the client wrote it."""
    packed = payload(one_block(1, extra_keys=KEYS[what]))
    tracemalloc.start()
    with suppress(ValueError):
        decoded(packed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * len(packed)


def test_what_a_batch_takes_is_what_is_counted() -> None:
    images = [[["x" * 64, at]] for at in range(500)]
    for events in (
        [one_block(1 << 60 | name) for name in range(500)],
        [removed(*(1 << 60 | name for name in range(5000)))],
        [stored([1 << 60 | name for name in range(500)], None, extra_keys=images)],
        [one_block(1, session_id="x" * 1000, lora_name="\U0001f600" * 1000)] * 50,
    ):
        packed = payload(*events)
        measured(packed)
        tracemalloc.start()
        kept = measured(packed)
        took = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert took / 2 < kept[1] + 2_000 and kept[1] < 6 * took, (took, kept[1])


def test_long_names_are_counted_as_held() -> None:
    made = account(*(payload(one_block(n, extra_keys=[["s" * 1_000 + str(n)]])) for n in range(100)))
    assert made.held_bytes > 100 * 4_000
    without = made.held_bytes
    made.blocks[0].clear()
    assert made.blocks[0].forget(50) == 50 and made.held_bytes < without * 0.6


def test_a_look_that_takes_too_long_ends_the_reading_and_nothing_is_told_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtune.servers.watch.watched.LOOK_CPU_S", 0.05)
    monkeypatch.setattr("kvtune.servers.watch.watched.BYTES_CPU_S", 1 << 40)
    publisher = Publisher(HERE, HERE)
    chain = stored([*range(50_000)], None)
    publisher.publish([(0, payload(chain)), (1, payload(*[one_block(10**6 + n, 49_999) for n in range(70)]))])
    with watched(publisher) as watching:
        watching.start()
        shot = watching.look()
    assert shot.events.state == "unreadable" and shot.cached_blocks is None and shot.evicted_blocks_s is None
    assert any("it takes more than 0" in note for note in shot.notes) and shot.hit_tokens == 40
    assert not watching.account.blocks


def test_all_servers_keep_batches_in_one_room(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = decoded(payload(one_block(1)))
    room = Room(left=2_500)
    with started(Answers(counters(100, 40))) as first, started(Answers(counters(100, 40))) as second:
        for one in (first, second):
            one.reader, one.keep, one.room = reader(), [], room
            for at in range(3):
                one.count([Received(0, batch, size=1_000, number=at)])
            one.reader = None
    assert [first.kept_until, second.kept_until] == [batch.ts, batch.ts]
    assert (len(first.keep or ()), len(second.keep or ())) == (3, 1)


def test_an_audit_of_more_than_it_can_count_ends_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.audit.MOST_HELD", 100)
    audit = Audit()
    audit.add(Received(0, decoded(payload(*(one_block(name) for name in range(100))))))
    with pytest.raises(ValueError, match="more than 100 blocks are held"):
        audit.add(Received(0, decoded(payload(one_block(100)))))
    audit = Audit()
    with pytest.raises(ValueError, match="more than 512 places"):
        for name in range(600):
            audit.add(Received(0, decoded(payload(removed(1, medium=f"T{name}")))))


def test_an_audit_forgets_what_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.audit.MOST_KNOWN", 40)
    rank = Rank(_forget_at=40)
    for name in range(100):
        rank.store(Stored([name], [1], 1))
        if name % 10:
            rank.remove(Removed([name]))
    assert set(range(0, 100, 10)) <= rank.known.keys() and 40 <= len(rank.known) <= 51
