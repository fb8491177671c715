"""The reader of KV events on real sockets: history, gaps, restarts, both directions of the connection, strangers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest

from kvtune.base.errors import KvtuneError
from kvtune.servers.watch.endpoints import Named, Source, sources
from kvtune.servers.watch.events import Batch, Reader, Received
from tests.lab.engine.serving import free_port
from tests.servers.watch.played import HERE, Publisher, until
from tests.servers.watch.played import sources as sources_of

Payload = tuple[int, bytes]


def payload(number: int, at: float | None = None) -> Payload:
    event = {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}
    return number, msgspec.msgpack.encode([float(number) if at is None else at, [event], 0])


class Pair:
    def __init__(self, *, replay: bool = True) -> None:
        self.publisher = Publisher(HERE, HERE if replay else "")
        told = json.loads(sources_of(self.publisher.endpoint, self.publisher.replay or None))
        self.source = sources(told)[0]
        self.reader: Reader | None = None
        self.taken: list[Received] = []

    def join(self) -> Reader:
        self.reader = Reader({0: self.source}, "127.0.0.1").start()
        self.reader.ready.wait()
        self.publisher.subscribed()
        return self.reader

    def numbers(self) -> list[int]:
        """Of the batches that have come so far."""
        assert self.reader is not None
        self.taken += self.reader.take()
        return [one.batch.events[0].block_hashes[0] for one in self.taken]  # type: ignore[union-attr]

    def send(self, *payloads: Payload) -> None:
        self.publisher.publish(payloads)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        self.publisher.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_the_history_comes_first_and_nothing_twice(pair: Pair) -> None:
    pair.send(*map(payload, range(50)))
    reader = pair.join()
    until(lambda: pair.numbers() == list(range(50)))
    pair.send(*map(payload, range(50, 60)))
    until(lambda: len(pair.numbers()) >= 60)
    assert pair.numbers() == list(range(60))
    stream = reader.streams[0]
    assert (stream.first, stream.last, stream.lost, stream.restarts) == (0, 59, 0, 0)


def test_a_gap_is_asked_for_again(pair: Pair) -> None:
    pair.send(payload(0))
    reader = pair.join()
    pair.publisher.dropped = {3, 4, 5}
    pair.send(*map(payload, range(1, 10)))
    until(lambda: len(pair.numbers()) >= 10)
    assert pair.numbers() == list(range(10)) and reader.streams[0].lost == 0
    assert pair.publisher.asked == [0, 2]


def test_what_the_history_has_no_more_is_lost_until_the_server_starts_anew(pair: Pair) -> None:
    pair.send(payload(0))
    reader = pair.join()
    pair.send(payload(1))
    until(lambda: pair.numbers() == [0, 1])
    pair.publisher.publish([payload(8)])
    until(lambda: pair.numbers() == [0, 1, 8])
    stream = reader.streams[0]
    assert stream.lost == 6 and not stream.complete
    pair.publisher.sent.clear()
    pair.publisher.publish([payload(0, at=100.0), payload(1, at=101.0)])
    until(lambda: pair.numbers() == [0, 1, 8, 0, 1])
    assert stream.complete and stream.lost == 6  # an empty cache, and all of it read; the sum stays
    pair.publisher.publish([payload(5, at=105.0)])
    until(lambda: len(pair.numbers()) == 6)
    assert stream.lost == 9 and not stream.complete


@pytest.mark.parametrize(
    ("before", "missed", "after"),
    [(20, 0, 2), (20, 2, 4), (4, 6, 8)],
    ids=["heard at once", "its first batches are missed", "it has sent more than the old one"],
)
def test_a_server_that_was_started_anew_begins_a_fresh_cache(
    pair: Pair, before: int, missed: int, after: int
) -> None:
    pair.send(*map(payload, range(before)))
    reader = pair.join()
    until(lambda: len(pair.numbers()) == before)
    pair.publisher.sent.clear()
    pair.publisher.dropped = set(range(missed))
    pair.publisher.publish([payload(number, at=100.0 + number) for number in range(after)])
    until(lambda: len(pair.numbers()) == before + after)
    assert pair.numbers()[before:] == list(range(after))
    assert [number for number, one in enumerate(pair.taken) if one.fresh] == [before]
    assert (reader.streams[0].lost, reader.streams[0].restarts) == (0, 1)


def test_without_a_history_a_late_joiner_knows_that_it_is_late() -> None:
    pair = Pair(replay=False)
    try:
        pair.send(*map(payload, range(5)))
        reader = pair.join()
        pair.send(payload(5))
        until(lambda: pair.numbers() == [5])
        assert reader.streams[0].first == 5 and reader.streams[0].lost == 0
    finally:
        pair.close()


def test_batches_that_nobody_takes_wait_and_then_come_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded: what does not fit is not read, later it is asked for again."""
    monkeypatch.setattr("kvtune.servers.watch.events.HELD_BYTES", 100)
    monkeypatch.setattr("kvtune.servers.watch.events.HEARD_BYTES", 100)
    reader = pair.join()
    pair.send(*map(payload, range(300)))
    until(lambda: reader._held > 100)
    assert reader._held < 400 and reader._heard_bytes <= 100
    until(lambda: len(pair.numbers()) == 300)
    assert pair.numbers() == list(range(300))
    assert reader.streams[0].complete


def test_messages_of_an_unknown_kind_are_counted_and_the_rest_is_read(pair: Pair) -> None:
    pair.send(
        payload(0), (1, msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}], 0])), (2, b"\xc1"), payload(3)
    )
    reader = pair.join()
    until(lambda: pair.numbers() == [0, 3])
    assert reader.streams[0].unknown == 2


def test_fields_of_a_later_version_are_left_out(pair: Pair) -> None:
    event = {
        "type": "BlockRemoved",
        "block_hashes": [b"\x01" * 32],
        "medium": None,
        "lookahead_token_ids": [1],
    }
    pair.send((0, msgspec.msgpack.encode([0.0, [event], 0, "more"])))
    pair.join()
    until(lambda: bool(pair.numbers()))
    assert pair.numbers() == [b"\x01" * 32]


def test_where_the_server_connects_the_reader_binds_what_the_user_named() -> None:
    source = Source(endpoint="tcp://10.0.0.9:5557")
    assert not source.server_binds
    here = f"tcp://127.0.0.1:{free_port()}"
    reader = Reader({0: source}, "localhost", Named(listen=here)).start()
    publisher = Publisher(here, binds=False)
    try:
        taken: list[Received] = []
        publisher.subscribed()
        publisher.publish([payload(0)])
        until(lambda: bool(taken.extend(reader.take()) or taken))
        with pytest.raises(KvtuneError, match="cannot listen at") as second:
            Reader({0: source}, "localhost", Named(listen=here)).start()
        assert "stop the other one" in second.value.hint
    finally:
        publisher.close()
        reader.close()


def test_sources_that_publish_nothing_are_none() -> None:
    off = {"endpoint": "ipc:///x", "enable_kv_cache_events": False}
    null = {"endpoint": "ipc:///x", "publisher": "null"}
    assert sources({"0": off, "1": null, "2": "what", "x": {"endpoint": "ipc:///x"}}) == {}
    assert list(sources({"3": {"endpoint": "ipc:///x"}})) == [3]


def test_a_batch_without_a_rank_is_read() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([1.0, []]), type=Batch).rank is None


def test_batches_that_went_before_the_subscription_are_fetched(pair: Pair) -> None:
    reader = pair.join()
    pair.publisher.dropped = {0, 1}
    pair.send(*map(payload, range(4)))
    until(lambda: len(pair.numbers()) == 4)
    assert pair.numbers() == [0, 1, 2, 3] and reader.streams[0].first == 0
