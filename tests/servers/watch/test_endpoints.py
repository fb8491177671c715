"""Which addresses kvtune opens by a server's word: ports of the server's own host, and nothing else unless named."""

from __future__ import annotations

import json

import pytest

from kvtune.base.errors import UsageError
from kvtune.servers.watch.endpoints import MOST_RANKS, Named, Source, sources, sources_named, way
from kvtune.servers.watch.events import Reader
from tests.lab.engine.serving import free_port
from tests.servers.watch.played import Answers, counters, http
from tests.simulator import run

NOBODY = Named()


def test_a_port_is_reached_at_the_servers_own_host_whatever_host_it_names() -> None:
    for told in ("tcp://*:5557", "tcp://[::]:5557", "tcp://[fe80::9]:5557"):
        assert way(0, Source(endpoint=told), "gpu-7", NOBODY).connect == "tcp://gpu-7:5557"
    assert way(0, Source(endpoint="tcp://*:5557"), "fe80::1", NOBODY).connect == "tcp://[fe80::1]:5557"
    other = Source(endpoint="tcp://*:5557", replay_endpoint="tcp://169.254.169.254:80")
    assert way(0, other, "gpu-7", NOBODY).replay == "tcp://gpu-7:80"
    assert way(0, other, "gpu-7", Named(["tcp://169.254.169.254:80"])).replay == "tcp://169.254.169.254:80"


def test_a_file_of_this_machine_is_opened_only_if_the_user_named_it() -> None:
    source = Source(endpoint="ipc:///run/x", replay_endpoint="ipc:///run/y")
    found = way(0, source, "localhost", NOBODY)
    assert (found.connect, found.replay, found.bind) == ("", "", "")
    assert "`--events ipc:///run/x --events ipc:///run/y`" in found.notes[0] and len(found.notes) == 1
    found = way(0, source, "localhost", Named(["ipc:///run/x", "ipc:///run/y"]))
    assert (found.connect, found.replay, found.notes) == ("ipc:///run/x", "ipc:///run/y", ())
    found = way(0, source, "localhost", Named(["ipc:///run/x"]))
    assert (found.connect, found.replay) == ("ipc:///run/x", "") and "--events ipc:///run/y" in found.notes[0]


def test_kvtune_listens_only_where_the_user_says() -> None:
    for told in ("tcp://0.0.0.0:29901", "tcp://10.0.0.5:80", "tcp://gpu-7:5557"):
        found = way(0, Source(endpoint=told), "gpu-7", NOBODY)
        assert (found.bind, found.connect) == ("", "") and "--listen" in found.notes[0]
        found = way(3, Source(endpoint=told), "gpu-7", Named(listen="tcp://127.0.0.1:6000"))
        assert (found.bind, found.connect, found.notes) == ("tcp://127.0.0.1:6003", "", ())


def test_a_watcher_opens_no_port_by_a_servers_word(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    answers = Answers(counters(100, 40))
    said = {"0": {"endpoint": f"tcp://0.0.0.0:{port}", "replay_endpoint": "ipc:///run/systemd/private"}}
    answers.paths["/kv_event_sources"] = (200, json.dumps(said))
    with http(answers) as base:
        assert run(["watch", base, "--once", "--seconds", "0.1"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "kvtune listens only where you say" in out and "--events ipc:///run/systemd/private" in out
        assert run(["watch", base, "--json", "--seconds", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out)["events"]["state"] == "unreachable"
    reader = Reader(sources(said), "127.0.0.1").start()
    assert not reader._subscribers and reader.ready.is_set() and reader.problem == ""
    reader.close()


@pytest.mark.parametrize(
    "words",
    [
        ("--listen", "ipc:///x"),
        ("--listen", "tcp://h"),
        ("--events", "udp://h:1"),
        ("--events", "tcp://h:99999"),
    ],
)
def test_an_address_that_is_none_is_refused(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["watch", "http://127.0.0.1:1", "--once", *words]) == 2
    assert words[0] in capsys.readouterr().err
    with pytest.raises(UsageError):
        Named(["tcp://\ud800:1"])


def test_addresses_that_are_none_are_no_sources() -> None:
    wrong = ("tcp://*", "tcp://*:0", "tcp://*:70000", "tcp://*:x", "ipc://", "tcp://\ud800:1", "tcp://a\n:1")
    wrong += ("udp://10.0.0.1:1", "inproc://x", "ws://*:80")
    for number, told in enumerate((*wrong, "tcp://" + "x" * 400 + ":1")):
        assert sources({str(number): {"endpoint": told}}) == {}
        assert sources({"0": {"endpoint": "tcp://*:1", "replay_endpoint": told}}) == {}
    assert sources({"0": {"endpoint": "tcp://*:1", "topic": "\ud800"}})[0].topic == "\ud800"
    assert sources({"99999999999": {"endpoint": "tcp://*:1"}, "-1": {"endpoint": "tcp://*:1"}}) == {}


def test_more_ranks_than_kvtune_reads_are_said_and_open_nothing() -> None:
    many = {str(rank): {"endpoint": f"tcp://*:{5557 + rank}"} for rank in range(3000)}
    reader = Reader(sources(many), "127.0.0.1").start()
    assert reader.problem == f"the server names 3,000 ranks, and kvtune reads {MOST_RANKS}"
    assert not reader._subscribers
    reader.close()


def test_a_topic_of_any_text_is_subscribed_to() -> None:
    reader = Reader({0: Source(endpoint=f"tcp://*:{free_port()}", topic="\ud800")}, "127.0.0.1").start()
    reader.close()
    assert reader.problem == ""


def test_a_server_that_names_no_address_is_read_where_the_user_says() -> None:
    """vLLM before 0.31 has no /kv_event_sources."""
    named = Named(["tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"])
    found = sources_named(named)
    opened = way(0, found[0], "localhost", named)
    assert (opened.connect, opened.replay, opened.notes) == (*named.events, ())
    assert sources_named(Named()) == {} and sources_named(Named(named.events[:1]))[0].replay_endpoint is None
