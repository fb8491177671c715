"""Joins vLLM's own publisher of KV events, without an engine: its replay socket drops what exceeds 1,000 messages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtune.servers.watch.endpoints import Source
from kvtune.servers.watch.events import Reader, Received
from tests.lab.engine.serving import free_port
from tests.servers.watch.played import until

pytestmark = pytest.mark.vllm
BATCHES = 20_000


@contextmanager
def publishing(kept: int) -> Iterator[tuple[Any, Source]]:
    """A publisher that has sent BATCHES batches of about 1.3 kB, and keeps the last `kept`."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    ports = free_port(), free_port()
    replay = f"tcp://127.0.0.1:{ports[1]}"
    publisher = ZmqEventPublisher(0, f"tcp://*:{ports[0]}", replay, buffer_steps=kept)
    event = BlockStored(
        block_hashes=list(range(1 << 63, (1 << 63) + 10)), parent_block_hash=None, token_ids=list(range(320)),
        block_size=32, lora_id=None, medium="GPU", lora_name=None,
    )  # fmt: skip
    for number in range(BATCHES):
        publisher.publish(KVEventBatch(ts=1.0 + number, events=[event]))
    until(lambda: bool(publisher._buffer) and publisher._buffer[-1][0] == BATCHES - 1)
    try:
        yield publisher, Source(endpoint=f"tcp://*:{ports[0]}", replay_endpoint=replay)
    finally:
        publisher.shutdown()


def joined(source: Source) -> tuple[Reader, list[Received]]:
    reader = Reader({0: source}, "127.0.0.1").start()
    taken: list[Received] = []
    while not reader.ready.wait(0.01):
        taken += reader.take()
    return reader, [*taken, *reader.take()]


@pytest.mark.full
def test_all_of_a_long_history_is_read_before_it_is_called_complete() -> None:
    with publishing(kept=100_000) as (publisher, source):
        reader, taken = joined(source)
        stream = reader.streams[0]
        assert [one.batch.ts for one in taken] == [1.0 + number for number in range(BATCHES)]
        assert stream.complete and (stream.first, stream.last, stream.lost) == (0, BATCHES - 1, 0)
        from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch

        publisher.publish(KVEventBatch(ts=1e6, events=[AllBlocksCleared()]))
        until(lambda: stream.last == BATCHES)
        assert stream.complete and not reader.problem
        reader.close()


def test_what_the_server_no_longer_keeps_is_not_complete() -> None:
    with publishing(kept=10_000) as (_, source):
        reader, taken = joined(source)
        stream = reader.streams[0]
        assert [one.batch.ts for one in taken] == [1.0 + number for number in range(10_000, BATCHES)]
        assert stream.history and not stream.complete and (stream.first, stream.lost) == (10_000, 0)
        reader.close()
