"""Which server behind a router served a request: by real sockets, from the tap's log into a replay as routed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.base.errors import UsageError
from kvtune.data.run.extras import GIVEN
from kvtune.lab.sim.routing import Routing, routing
from kvtune.requests.loads.spec import build
from kvtune.requests.log.requests_log import read_log
from kvtune.servers.tap.command import Address, Asked, run
from kvtune.servers.tap.replicas import NO_EVENT, NO_SESSION, SEVERAL, SHARED, Replicas
from kvtune.servers.watch.addresses import Addresses
from tests.servers.tap.stand_in import ids_of, vllm
from tests.servers.tap.test_command import messages, tap
from tests.servers.watch.played import Answers, Publisher, http, sources, until


@dataclass
class Server:
    """A server behind a router: it publishes who stored blocks."""

    url: str
    publisher: Publisher = field(default_factory=Publisher)
    number: int = 0

    def stored(self, session: str | None, ago: float = 0.0) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": [self.number],
            "token_ids": [1, 2],
            "block_size": 2,
            "session_id": session,
        }
        self.publisher.publish(
            [(self.number, msgspec.msgpack.encode([time.time() - ago, [event], 0]))], remember=False
        )
        self.number += 1


@contextmanager
def servers(count: int) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            answers = Answers("")
            made.append(Server(stack.enter_context(http(answers))))
            stack.callback(made[-1].publisher.close)
            answers.paths["/kv_event_sources"] = (200, sources(made[-1].publisher.endpoint, None))
        yield made


@contextmanager
def heard(made: list[Server], more: str = "") -> Iterator[tuple[Replicas, list[str]]]:
    said: list[str] = []
    replicas = Replicas(Addresses([one.url for one in made] + [more] * bool(more)), {}, False, said.append)
    try:
        for one in made:
            one.publisher.subscribed()
        yield replicas, said
    finally:
        replicas.end()


def told(replicas: Replicas, count: int) -> None:
    """Count events until that many batches came."""
    came = 0

    def all_came() -> bool:
        nonlocal came
        taken = replicas.take()
        replicas.add(taken)
        came += len(taken)
        return came >= count

    until(all_came)


def test_a_request_has_the_server_whose_events_have_its_session_and_none_where_they_do_not_tell() -> None:
    with servers(2) as (a, b), heard([a, b]) as (replicas, _):
        begun = time.time()
        mine, other, cached = (replicas.open(f"kvtune-{n}", begun, ours=True) for n in range(3))
        nobodys = replicas.open("", begun, ours=False)
        twins = [replicas.open("client", begun, ours=False) for _ in range(2)]
        moved = replicas.open("moved", begun, ours=False)
        before = replicas.open("before", begun, ours=False)
        a.stored("kvtune-0", ago=3600)  # a clock that is wrong does not matter to an id of one request
        b.stored("kvtune-1")
        a.stored("client")
        a.stored("moved")
        b.stored("moved")
        b.stored("before", ago=1.0)  # of the session's request before this one
        b.stored(None)
        told(replicas, 7)
        asked = (mine, other, cached, nobodys, *twins, moved, before)
        assert [replicas.close(one, counts=True) for one in asked] == [a.url, b.url, *[""] * 6]
        assert replicas.counts == {"": 2, NO_EVENT: 2, NO_SESSION: 1, SHARED: 2, SEVERAL: 1}
        assert replicas.summary.startswith("the server is known of 2 of 8 requests; ")
        again = replicas.open("client", begun, ours=False)
        b.stored("client")
        told(replicas, 1)
        assert replicas.close(again, counts=False) == b.url, "its twins are gone"


def test_a_server_that_publishes_nothing_is_named_once_and_the_others_are_read() -> None:
    with servers(1) as (a,), http(Answers("")) as silent, heard([a], silent) as (replicas, said):
        mine = replicas.open("kvtune-0", time.time(), ours=True)
        a.stored("kvtune-0")
        told(replicas, 1)
        assert replicas.close(mine, counts=True) == a.url
        until(lambda: bool(said))
        assert said == [f"{silent} does not answer, or publishes no KV events: its requests name no replica"]


@pytest.mark.parametrize("missing", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_log_of_a_tap_before_a_router_is_replayed_as_routed(tmp_path: Path, missing: bool) -> None:
    """`missing`: one request stores no block."""
    log, seen = tmp_path / "log.jsonl", 0
    with servers(3) as behind:

        def rendered(body: Mapping[str, Any]) -> list[int]:
            nonlocal seen
            if len(router.heads) > seen:  # it is sent on, and not only rendered
                seen += 1
                if not (missing and seen == 2):
                    behind[seen % 3].stored(router.heads[-1]["x-session-id"])
                    time.sleep(0.2)
            return ids_of(body)

        words = [word for one in behind for word in ("--replica", one.url)]
        with vllm(render=rendered) as router, tap(router.url, "-o", str(log), "--json", *words) as relayed:
            for one in behind:
                one.publisher.subscribed()
            for number in range(4):
                relayed.post("/v1/messages", messages("You help.", f"question {number}"))
            lines = [json.loads(line) for line in relayed.lines(4)]
        names = [behind[number % 3].url for number in range(1, 5)]
        if missing:
            names[1] = ""
        assert [row.replica for row in read_log(log)] == names == [line["replica"] for line in lines]
        known = f"the server is known of {4 - missing} of 4 requests"
        assert any(known in line for line in relayed.err)
    spec = f"requests:path={log}"
    order = sorted(set(filter(None, names)))
    numbers = [order.index(name) for name in names if name]
    if missing:
        with pytest.raises(UsageError, match="1 of the log's 4 requests name no replica") as refused:
            routing(build(spec))
        assert "routed=1" in (refused.value.hint or "")
        spec += ",routed=1"
    assert routing(build(spec)) == Routing(len(order), GIVEN, numbers)


@pytest.mark.parametrize(
    "wrong",
    [{"replicas": ("http://a", "http://a")}, {"replicas": ("http://a", "http://b"), "events": ("x",)}],
)
def test_servers_that_cannot_be_right_are_refused_before_anything_is_relayed(wrong: dict[str, Any]) -> None:
    said: list[str] = []
    asked = Asked("http://127.0.0.1:9", Address("127.0.0.1", 0), None, {}, **wrong)
    with pytest.raises(UsageError, match=r"named twice|does not say of which server"):
        run(asked, said.append)
    assert not said
