"""Several stock servers behind a client's router, watched as one fleet: against usage and a count by brute force."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvtune.data.run.funnel import Range
from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.replicas import funnel_of
from kvtune.servers.watch.servers import SILENT_S, FleetSnapshot, Servers
from tests.lab.engine.test_watch import stock
from tests.servers.watch.fleet_load import ROUTERS, Client, recording_of, watched
from tests.servers.watch.played import http, until
from tests.servers.watch.relays import relayed

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]


def settled(group: Servers) -> FleetSnapshot:
    time.sleep(2)
    until(lambda: not any(server.misses.get("computing") for server in group.look().servers))
    return group.look()


def held(group: Servers, shot: FleetSnapshot, rows: Sequence[Logged]) -> None:
    """By events alone the truth is in the ranges, and with the log the funnel is the truth."""
    made = recording_of(group, rows)
    truth, judged, alone = made.truth(), made.judged(), shot.fleet
    exact = funnel_of(judged, made.blocks, next(iter(made.sizes.values())), whole=True)
    print(alone.sentence, exact.sentence, truth)
    assert all(one.exact for one in judged)
    assert (exact.prompt_tokens, exact.as_routed) == (truth.asked, truth.routed)
    assert exact.best_replica == Range(truth.best, truth.best)
    assert exact.everything == Range(truth.kept, truth.kept)
    assert (alone.prompt_tokens, alone.as_routed) == (truth.asked, truth.routed)
    assert alone.best_replica.least <= truth.best <= alone.best_replica.most
    assert alone.everything.least <= truth.kept <= alone.everything.most
    for server in shot.servers:
        assert server.hit_tokens + sum(server.misses.values()) == server.query_tokens


@pytest.mark.parametrize(("model", "count"), [("tiny-llama", 3), ("tiny-gemma3", 2)])
def test_what_routers_lose_is_as_usage_and_brute_force_say(tmp_path: Path, model: str, count: int) -> None:
    with ExitStack() as stack:
        bases = [stack.enter_context(stock(tmp_path, model)) for _ in range(count)]
        group = Servers(Addresses(bases), watched)
        stack.callback(group.close)
        group.start()
        client = Client(model, bases)
        for router in ROUTERS:
            client.run(50, router)
            group.look()
        held(group, settled(group), client.rows)


def test_servers_that_die_start_anew_and_come_with_other_blocks(tmp_path: Path) -> None:
    model, file = "tiny-llama", tmp_path / "urls"
    with ExitStack() as stack:
        bases = [stack.enter_context(stock(tmp_path, model)), ""]
        dying = ExitStack()
        bases[1] = dying.enter_context(stock(tmp_path, model))
        file.write_text("\n".join(bases))
        group = Servers(Addresses([], file), watched)
        stack.callback(group.close)
        group.start()
        client = Client(model, bases, sessions=5)
        client.run(20, "round robin")
        before = settled(group)
        held(group, before, client.rows)
        dying.close()
        dead = group.look()
        assert dead.servers[1].down_since is not None and dead.fleet.as_routed == before.fleet.as_routed
        port = urlsplit(bases[1]).port or 0
        stack.enter_context(stock(tmp_path, model, port))
        client.bases = [*bases, stack.enter_context(stock(tmp_path, model, block_size="64"))]
        file.write_text("\n".join(client.bases))
        until(lambda: len(group.look().servers) == 3 and group.look().servers[1].down_since is None)
        client.run(30, "round robin")
        shot = settled(group)
    assert any("blocks of 32 and 64 tokens" in note for note in shot.notes)
    asked, hit = sum(len(row.prompt) for row in client.rows), sum(row.hit for row in client.rows)
    assert (shot.fleet.prompt_tokens, shot.fleet.as_routed) == (asked, hit)
    assert shot.fleet.best_replica.least <= shot.fleet.everything.most <= asked
    assert [server.requests for server in shot.servers] == [20, 20, 10]


def test_a_server_whose_events_stop_is_named_with_the_time_and_counted_again_once_they_come(
    tmp_path: Path,
) -> None:
    model = "tiny-llama"
    with ExitStack() as stack:
        bases = [stack.enter_context(stock(tmp_path, model)) for _ in range(2)]
        answers, relays = stack.enter_context(relayed(bases[1]))
        urls = [bases[0], stack.enter_context(http(answers))]
        group = Servers(Addresses(urls), watched)
        stack.callback(group.close)
        group.start()
        client = Client(model, bases, sessions=6)

        def ask(requests: int) -> None:
            client.run(requests, "round robin")

        def rows() -> list[Logged]:
            return [replace(row, replica=urls[bases.index(row.replica)]) for row in client.rows]

        def stopped(gone: bool) -> FleetSnapshot:
            until(lambda: ("gap since" in group.look().servers[1].why) == gone)
            return group.look()

        ask(20)
        held(group, settled(group), rows())
        shots = []
        for stop, start in (
            (lambda: setattr(relays[0], "held", True), lambda: setattr(relays[0], "held", False)),
            (relays[0].break_off, lambda: setattr(relays[0], "cut", False)),
        ):
            before = time.time()
            stop()
            ask(20)
            shots.append((stopped(True), rows()))
            gap = group.members[urls[1]].gap
            assert gap is not None and before - SILENT_S < gap < before + 1  # the last batch came then
            assert shots[-1][0].servers[0].why == ""
            start()
            reader = group.members[urls[1]].watched.reader
            assert reader is not None
            until(lambda reader=reader: bool(group.look()) and reader.streams[0].connected)
            ask(4)  # a batch after the gap: the reader asks for those before it
            stopped(False)
        assert reader.streams[0].gaps and not reader.streams[0].lost  # those of the cut came by replay
        shot = settled(group)
        assert all(server.why == "" for server in shot.servers)
        held(group, shot, rows())
        made = recording_of(group, rows())
    for shot, asked in shots:  # while its events were missing, the ranges held what they said in the end
        truth = replace(made, rows=asked).truth()
        assert (shot.fleet.prompt_tokens, shot.fleet.as_routed) == (truth.asked, truth.routed)
        assert shot.fleet.best_replica.least <= truth.best <= shot.fleet.best_replica.most
        assert shot.fleet.everything.least <= truth.kept <= shot.fleet.everything.most
