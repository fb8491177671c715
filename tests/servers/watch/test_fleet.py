"""Several servers behind a router as one account, against a count by brute force of what each held (fleets.py)."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.file_flags import on_the_list
from kvtune.data.run.extras import uneven
from kvtune.data.run.file import write_run
from kvtune.data.run.funnel import Funnel, Range
from kvtune.data.run.types import Run
from kvtune.reading.analysis.looks import timeline
from kvtune.requests.log.logged import Logged, line_of
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.document import document
from kvtune.servers.watch.endpoints import Named
from kvtune.servers.watch.events import Stored
from kvtune.servers.watch.others import Others
from kvtune.servers.watch.record import Recording, run_of
from kvtune.servers.watch.replicas import funnel_of, regrets
from kvtune.servers.watch.requests import Served, join_fleet
from kvtune.servers.watch.screen import lines
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import FleetSnapshot, Servers
from kvtune.servers.watch.watched import Watched
from tests.choice import first_of
from tests.servers.watch import fleet_load
from tests.servers.watch.fleets import Drawn, Playing, Truth, drawn, fleet, play, playing_of
from tests.servers.watch.played import until
from tests.simulator import run

RECORDED = ("fleet-tiny-llama.xz", "fleet-tiny-gemma3.xz")
ROUTES = {
    "round robin": lambda number, session: number % 3,
    "sessions": lambda number, session: session % 3,
    "sticky": lambda number, session: 0 if number % 7 else 1 + number % 2,
    "random": lambda number, session: random.Random(number).randrange(3),
}


def watcher(url: str, named: Named, others: Others | None) -> Watched:
    return Watched(Server(url), named, others)


@contextmanager
def watched(addresses: Addresses) -> Iterator[Servers]:
    with closing(Servers(addresses, watcher)) as group:
        group.start()
        yield group


def settled(group: Servers, made: Drawn) -> FleetSnapshot:
    """Look once all that the servers published has come: what comes 0.1 s after later events is counted late."""
    total = [len(server.batches) for server in made.servers]

    def came() -> bool:
        readers = [member.watched.reader for member in group.members.values()]
        return [reader.streams[0].last + 1 if reader else 0 for reader in readers] == total

    until(came)
    return group.look()


def shot_of(made: Drawn, before: Callable[[list[Any]], None] = lambda playing: None) -> FleetSnapshot:
    """What a fleet's account says once all of it was played."""
    with fleet(made) as (playing, urls):
        before(playing)
        with watched(Addresses(urls)) as group:
            play(made, playing)
            return settled(group, made)


def ranges_hold(shot: FleetSnapshot, truth: Truth) -> None:
    funnel = shot.fleet
    assert funnel.best_replica.least <= truth.best <= funnel.best_replica.most, (truth, funnel)
    assert funnel.everything.least <= truth.kept <= funnel.everything.most, (truth, funnel)


def held(shot: FleetSnapshot, made: Drawn) -> None:
    """The funnel of events alone has the truth in its ranges, and its causes add up."""
    truth, funnel = made.truth(), shot.fleet
    assert (funnel.prompt_tokens, funnel.as_routed) == (truth.asked, truth.routed)
    ranges_hold(shot, truth)
    for server in shot.servers:
        assert server.hit_tokens + sum(server.misses.values()) == server.query_tokens


@pytest.mark.parametrize("route", first_of(list(ROUTES)))
def test_by_events_alone_the_funnel_holds_what_each_server_held(route: str) -> None:
    made = drawn(7, ROUTES[route])
    shot = shot_of(made)
    held(shot, made)
    assert shot.fleet.best_replica.most - shot.fleet.best_replica.least < 0.1 * shot.fleet.prompt_tokens
    elsewhere = sum(server.misses.get("other_replica", 0) for server in shot.servers)
    assert (elsewhere > 500) == (route != "sessions")
    assert all(server.still_tokens <= server.misses.get("other_replica", 0) for server in shot.servers)


@pytest.mark.parametrize(
    ("sizes", "answer"),
    [
        ((16, 4, 8), 20),
        *(pytest.param(s, a, marks=pytest.mark.full) for s in ((4, 8, 4), (4, 4, 4, 4)) for a in (1, 20)),
    ],
)
def test_block_sizes_and_answers_widen_the_ranges_and_break_none(sizes: tuple[int, ...], answer: int) -> None:
    made = drawn(21, lambda number, _: number % len(sizes), sizes=sizes, answer=answer, capacity=60)
    shot = shot_of(made)
    held(shot, made)
    assert any("blocks of" in note for note in shot.notes) == (len(set(sizes)) > 1)


def test_what_cannot_be_compared_is_named_and_in_no_sum() -> None:
    made = drawn(3, ROUTES["round robin"])

    def of_another_model(playing: list[Any]) -> None:
        playing[2].model = "other"
        playing[2].count(0, 0, 0)

    shot = shot_of(made, of_another_model)
    first, second, third = shot.servers
    assert "another model (other)" in third.why and (first.why, second.why) == ("", "")
    assert (
        shot.fleet.prompt_tokens
        == first.query_tokens + second.query_tokens
        < sum(s.query_tokens for s in shot.servers)
    )
    assert not third.misses.get("other_replica") and third.misses["cold"]


def test_a_server_whose_history_is_not_known_leaves_unknown_what_no_other_tells() -> None:
    made = drawn(3, ROUTES["round robin"])
    with fleet(made) as (playing, urls):
        del playing[2].answers.paths["/kv_event_sources"]
        with watched(Addresses(urls)) as group:
            play(made, playing)
            until(lambda: all(server.query_tokens for server in group.look().servers))
            until(lambda: sum(server.misses.get("unknown", 0) for server in group.look().servers[:2]) > 0)
            until(lambda: not any(server.misses.get("computing") for server in group.look().servers))
            shot = group.look()
    assert [server.misses.get("cold", 0) for server in shot.servers] == [0, 0, 0]
    assert "its events are off" in shot.servers[2].why and shot.servers[2].misses == {}
    ranges_hold(shot, made.truth())


def test_servers_come_go_and_start_anew_and_the_sums_stay(tmp_path: Path) -> None:
    made = drawn(5, ROUTES["round robin"], requests=60)
    file = tmp_path / "urls"
    with fleet(made) as (playing, urls):
        file.write_text(f"# routers write this\n{urls[0]}\n\n{urls[1]}  # the second\n")
        with watched(Addresses([], file)) as group:
            play(made, playing)
            until(lambda: group.look().servers[1].requests == 20)
            until(lambda: not any(server.misses.get("computing") for server in group.look().servers))
            before = group.look().fleet
            file.write_text(f"{urls[1]}\n{urls[2]}\n")
            group._read = 0.0
            after = group.look()
            assert [server.url for server in after.servers] == urls[1:]
            # The third's history is read; what the first had is in the sums.
            assert after.fleet.prompt_tokens == before.prompt_tokens + made.asked(2)[0]
            assert any("no longer named" in note for note in after.notes)
            file.write_text("not a url://\n")
            group._read = 0.0
            kept = group.look()
            assert len(kept.servers) == 2 and any("line 1" in note for note in kept.notes)
            # The second starts anew: what it held is gone, and no count falls.
            playing[1].started = 100.0
            playing[1].count(40, 0, 1)
            anew = group.look()
            assert anew.servers[0].query_tokens == after.servers[0].query_tokens + 40
            assert anew.servers[0].requests == after.servers[0].requests + 1
            assert (
                sum(blocks.held() for blocks in group.members[urls[1]].watched.account.blocks.values()) == 0
            )
            # The third dies.
            playing[2].answers.paths["/metrics"] = (500, "")
            dead = group.look()
            assert dead.servers[1].down_since is not None and urls[2] not in dead.snapshots
            assert not any(serves for _, serves in group.beside(urls[1]))


def test_what_was_forgotten_is_said_and_widens_what_all_had_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.servers.FLEET_BYTES", 1)
    made = drawn(5, ROUTES["round robin"], capacity=60, requests=150)
    with fleet(made) as (playing, urls), watched(Addresses(urls)) as group:
        for place, one in enumerate(playing):
            one.publish(made.servers[place].batches[:20])
        until(lambda: all(member.watched.reader.streams[0].last == 19 for member in group.members.values()))
        group.look()
        for place, one in enumerate(playing):
            one.publish(made.servers[place].batches[20:])
            one.count(*made.asked(place))
        shot = settled(group, made)
    held(shot, made)
    assert any("were forgotten" in note for note in shot.notes)


def test_a_server_whose_events_stop_or_have_a_gap_is_named_with_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtune.servers.watch.servers.SILENT_S", 0.2)
    made = drawn(9, ROUTES["round robin"], begin=time.time())
    with fleet(made) as (playing, urls), watched(Addresses(urls)) as group:
        playing[1].publisher.dropped = {3}
        for place, one in enumerate(playing):
            one.publish(made.servers[place].batches[: 4 if place == 2 else 1000])
        playing[1].publisher.sent.clear()
        until(lambda: group.members[urls[2]].watched.reader.streams[0].last == 3)
        playing[0].count(*made.asked(0))
        playing[1].count(*made.asked(1))
        group.look()
        playing[2].count(*made.asked(2))
        until(lambda: group.look().servers[2].why != "")
        shot = group.look()
    first, second, third = shot.servers
    assert first.why == "" and "gap since" in second.why and "gap since" in third.why
    ranges_hold(shot, made.truth())


def test_names_files_and_options_give_the_addresses(tmp_path: Path) -> None:
    names = {"vllm": ["10.0.0.1", "10.0.0.2"], "one": ["10.0.0.9"], "six": ["fd00::1", "fd00::2"]}
    file = tmp_path / "urls"
    file.write_text("http://six:8000 tcp://events:5557 tcp://events:5558\n")
    read = Addresses(
        ["vllm:8000", "http://one:8000", "https://vllm"],
        file,
        ["one:8000=ipc:///run/kv"],
        lambda host, _: names[host],
    ).read()
    assert list(read) == [
        *("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://one:8000", "https://vllm"),
        *("http://[fd00::1]:8000", "http://[fd00::2]:8000"),
    ]
    assert read["http://one:8000"].events == ["ipc:///run/kv"] and not read["http://10.0.0.1:8000"].events
    assert read["http://[fd00::2]:8000"].events == ("tcp://events:5557", "tcp://events:5558")


@pytest.mark.parametrize(
    ("urls", "events", "text", "says"),
    [
        (["a:1", "http://a:1/v1"], [], None, "http://a:1 is named twice"),
        (["a:1", "b:1"], ["tcp://x:1"], None, "does not say of which server"),
        (["a:1", "b:1"], ["c:1=tcp://x:1"], None, "does not say of which server"),
        ([], [], "a:1\na:1/v1\n", "line 2: http://a:1 is named twice"),
        ([], [], "a:1 http://x\n", "line 1: --events 'http://x' is not the address"),
        ([], [], "\n".join(f"10.0.{n // 250}.{n % 250}:1" for n in range(300)), "300 servers"),
    ],
)
def test_wrong_addresses_are_refused(
    tmp_path: Path, urls: list[str], events: list[str], text: str | None, says: str
) -> None:
    file = None
    if text is not None:
        file = tmp_path / "urls"
        file.write_text(text)
    with pytest.raises(UsageError) as refused:
        Addresses(urls, file, events, lambda *_: []).read()
    assert says in refused.value.message and refused.value.hint


def test_the_command_says_it_in_one_line_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = drawn(7, ROUTES["round robin"])
    with fleet(made) as (playing, urls):
        play(made, playing)  # before kvtune joins: its history is read
        assert run(["watch", *urls, "--once", "--seconds", "0.1"]) == 0
        out = capsys.readouterr().out
        assert "routed 58 %" in out and "another replica computed" in out
        assert run(["watch", *urls, "--json", "--seconds", "0.1"]) == 0
        shot = json.loads(capsys.readouterr().out)
        truth = made.truth()
        assert shot["fleet"]["as_routed"] == truth.routed and shot["fleet"]["one_cache"] is None
        assert shot["fleet"]["best_replica"]["least"] <= truth.best <= shot["fleet"]["best_replica"]["most"]
        assert [server["url"] for server in shot["servers"]] == urls == list(shot["snapshots"])
        assert run(["watch", *urls, "--listen", "tcp://127.0.0.1:1"]) == 2
        assert "--listen is read" in capsys.readouterr().err


def test_a_funnel_is_said_in_one_sentence() -> None:
    exact = Funnel(
        prompt_tokens=1000,
        as_routed=610,
        best_replica=Range(780, 780),
        one_cache=Range(840, 840),
        everything=Range(930, 930),
    )
    assert exact.sentence == (
        "as routed 61 %; each prompt at the replica that had most of it 78 %; one cache of all pools 84 %; "
        "everything kept 93 %: router 17 points, pools 6, memory 9, workload 7"
    )
    vague = Funnel(
        prompt_tokens=1000, as_routed=610, best_replica=Range(760, 780), everything=Range(930, 940)
    )
    assert vague.sentence.endswith("6 to 7")


@pytest.mark.parametrize(
    ("tokens", "requests", "says"),
    [
        ((0, 33_000, 67_000), 100, "; uneven: the servers got 0 %, 33 %, 67 % of the prompt tokens"),
        ((30_000, 33_000, 37_000), 100, ""),
        ((0, 0, 100), 3, ""),
        ((1_000,) * 7 + (9_000,), 100, "; uneven: the servers got 6 % to 56 % of the prompt tokens"),
        ((5_000,), 100, ""),
    ],
)
def test_how_unevenly_a_router_divides_is_said_beside_its_hits(
    tokens: tuple[int, ...], requests: int, says: str
) -> None:
    shot = shot_of(drawn(7, ROUTES["round robin"]))
    share = shot.servers[0]
    shares = [
        msgspec.structs.replace(share, query_tokens=asked, requests=requests // len(tokens))
        for asked in tokens
    ]
    assert uneven(shares) == says
    headline = document(msgspec.structs.replace(shot, servers=shares)).headline
    assert headline == f"{len(tokens)} servers   {shot.model}   {shot.fleet.sentence}{says}"


def test_what_another_server_had_is_said_in_words() -> None:
    shot = shot_of(drawn(7, ROUTES["round robin"]))
    rows = next(section for section in document(shot).sections if section.id == "servers").tables[0]
    assert rows.heads[5:] == ("evicted blocks", "pool, blocks")
    cells = [row[4].text for row in rows.rows]
    assert all(
        re.match(r"[\d.]+ %(; [\d.]+ % of that was there when it was asked for|$)", cell) for cell in cells
    )
    assert any("was there" in cell for cell in cells)


def test_the_live_view_draws_a_fleet_within_its_terminal() -> None:
    shot = shot_of(drawn(7, ROUTES["round robin"]))
    for width, height in ((80, 24), (120, 40), (60, 12)):
        drawn_lines = lines(shot, width, height)
        assert len(drawn_lines) == height and all(len(line) <= width for line in drawn_lines)
    assert "as routed" in " ".join(lines(shot, 120, 40))


def lru(made: Drawn, capacity: int, size: int) -> int:
    """By brute force: a list of blocks, the next to go first."""
    held: list[object] = []
    hits = 0
    rows = [(one.t0, 1, one) for _, one in made.sent] + [(one.t1, 0, one) for _, one in made.sent]
    for _, sent, one in sorted(rows, key=lambda row: row[:2]):
        text = one.prompt if sent else [*one.prompt, *one.answer[:-1]]
        keys = [(one.salt, tuple(text[:end])) for end in range(size, len(text) + 1, size)]
        if sent:
            usable = [key for key in keys if len(key[1]) < len(text)]
            hits += size * next((n for n, key in enumerate(usable) if key not in held), len(usable))
        held = [key for key in held if key not in keys] + keys[::-1]
        held = held[max(0, len(held) - capacity) :]
    return hits


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("capacity", "answer", "seed"),
    [(60, 3, 1), *(pytest.param(*drawn_, marks=pytest.mark.full) for drawn_ in ((120, 9, 2), (400, 20, 3)))],
)
def test_with_a_log_the_funnel_is_the_brute_forces_to_the_token(
    route: str, capacity: int, answer: int, seed: int
) -> None:
    made = drawn(seed, ROUTES[route], capacity=capacity, answer=answer)
    log = made.log()
    rows = [[row for row in log if row.replica == str(place)] for place in range(3)]
    answered = join_fleet([Served(made.received(place), rows[place], Account()) for place in range(3)])
    assert all(one.exact for own in answered for one in own)
    found = funnel_of([one for own in answered for one in own], 3 * capacity, 4, whole=True)
    truth = made.truth()
    assert (found.prompt_tokens, found.as_routed) == (truth.asked, truth.routed)
    assert found.best_replica == Range(truth.best, truth.best)
    assert found.everything == Range(truth.kept, truth.kept)
    together = lru(made, 3 * capacity, 4)
    assert found.one_cache == Range(together, together)
    lost = regrets([one for own in answered for one in own])
    assert sum(row.best_tokens - row.hit_tokens for row in lost) == truth.best - truth.routed


def recorded_run(made: Drawn, log: Path, rows: Callable[[list[str]], list[Logged]]) -> Run:
    """Record the servers of a fleet. `rows`: of the log, by the servers' URLs."""
    with fleet(made) as (playing, urls):
        logged = rows(urls)
        log.write_text("".join(json.dumps(line_of(row)) + "\n" for row in logged))
        with closing(Servers(Addresses(urls), fleet_load.watched, history=False)) as group:
            recording = Recording(group)
            group.start()
            recording.run(0.1, lambda _: True)
            play(made, playing)
            settled(group, made)
            recording.look()
            recording.begun = made.sent[0][1].t0 - 1
            recording.seconds = made.sent[-1][1].t1 + 1 - recording.begun
            return run_of(recording, log, logged, ["kvtune", "record"], on_the_list)


def test_a_recording_of_a_fleet_is_one_run_that_explain_and_report_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = drawn(7, ROUTES["round robin"], begin=time.time())
    log, kvrun = tmp_path / "log.jsonl", tmp_path / "fleet.kvrun"
    run_ = recorded_run(made, log, made.log_at)
    server, truth = run_.header.extra.server, made.truth()
    assert server is not None and (server.query_tokens, server.hit_tokens) == (truth.asked, truth.routed)
    assert server.hit_tokens + sum(server.misses.values()) == server.query_tokens
    info = server.fleet
    assert info is not None and info.logged is not None
    assert info.logged.best_replica == Range(truth.best, truth.best) and info.logged.as_routed == truth.routed
    assert info.funnel.best_replica.least <= truth.best <= info.funnel.best_replica.most
    assert info.logged.one_cache is not None and info.logged.everything == Range(truth.kept, truth.kept)
    line = timeline(run_)  # of all servers, on one time axis
    assert line is not None and line.whole.tally is not None
    assert (line.whole.tally.query_tokens, line.whole.tally.hit_tokens) == (truth.asked, truth.routed)
    assert sum(line.whole.tally.misses.values()) == line.whole.tally.missed
    assert line.whole.answered == len(made.sent)
    write_run(run_, kvrun)
    assert run(["explain", str(kvrun)]) == 0
    out = capsys.readouterr().out
    assert "3 servers'" in out and "each server did" in out and "one cache of" in out
    assert "3 servers answered 90 requests" in out and "another had it," in out
    assert run(["explain", str(kvrun), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fleet"]["logged"]["as_routed"] == truth.routed
    assert run(["report", str(kvrun), "--console"]) == 0
    assert run(["explain", str(kvrun), "--trace", str(log), "--model", "tiny-llama"]) == 2
    refused = capsys.readouterr().err
    assert "explain replays one" in refused and "kvtune profile tiny-llama --on sim" in refused
    assert "--block-size 4 --num-gpu-blocks-override" in refused


def test_session_ids_that_one_server_alone_published_tell_who_served_a_request(tmp_path: Path) -> None:
    made = drawn(11, ROUTES["sticky"], begin=time.time())
    places = [place for place, _ in made.sent]
    ids = {one.name: one.name for _, one in made.sent}
    for name in ("r1", "r2", made.sent[places.index(1)][1].name):
        ids[name] = "several"  # published by two servers
    for server in made.servers:
        for event in [event for batch in server.batches for event in batch.events]:
            if isinstance(event, Stored):
                msgspec.structs.force_setattr(event, "session_id", ids[event.session_id or ""])
    ids |= {"r30": "", "r40": "never published"}
    own = [(place, one) for place, one in made.sent if ids[one.name] == one.name]

    def rows(_: list[str]) -> list[Logged]:
        return [replace(row, replica="", session=ids[row.name]) for row in made.log()]

    run_ = recorded_run(made, tmp_path / "log.jsonl", rows)
    assert run_.table("requests")["engine"].tolist() == [place for place, _ in own]
    server = run_.header.extra.server
    assert server is not None and server.fleet is not None and server.fleet.logged is not None
    assert server.logged == server.agree == len(own)
    assert server.fleet.logged.as_routed == sum(one.hit for _, one in own)
    assert any("5 requests of" in note for note in run_.header.notes)
    with pytest.raises(UsageError, match="does not say which server served its requests"):
        recorded_run(
            made, tmp_path / "other.jsonl", lambda _: [replace(row, replica="") for row in made.log()]
        )


@pytest.mark.parametrize("name", first_of(RECORDED))
def test_of_recorded_real_servers_the_log_tells_the_truth_and_events_hold_it(name: str) -> None:
    made = fleet_load.recorded(Path(__file__).with_name("recorded") / name)
    truth, judged = made.truth(), made.judged()
    exact = funnel_of(judged, made.blocks, 32, whole=True)
    assert all(one.exact for one in judged)
    assert (exact.prompt_tokens, exact.as_routed) == (truth.asked, truth.routed)
    assert exact.best_replica == Range(truth.best, truth.best)
    assert exact.everything == Range(truth.kept, truth.kept)
    with (
        playing_of([Playing(size) for size in made.sizes.values()]) as (playing, urls),
        watched(Addresses(urls)) as group,
    ):
        for one, (server, batches) in zip(playing, made.batches.items(), strict=True):
            own = [row for row in made.rows if row.replica == server]
            one.publish(batches)
            one.count(sum(len(row.prompt) for row in own), sum(row.hit for row in own), len(own))
        total = [len(batches) for batches in made.batches.values()]
        readers = [member.watched.reader for member in group.members.values()]
        until(lambda: [reader and reader.streams[0].last + 1 for reader in readers] == total)
        until(lambda: not any(server.misses.get("computing") for server in group.look().servers))
        shot = group.look()
    alone = shot.fleet
    assert (alone.prompt_tokens, alone.as_routed) == (truth.asked, truth.routed)
    ranges_hold(shot, truth)
    assert alone.best_replica.most - alone.best_replica.least < 0.02 * truth.asked


def test_a_server_under_two_names_is_one_and_says_so() -> None:
    made = drawn(7, ROUTES["round robin"])
    with fleet(made) as (playing, urls):
        play(made, playing)
        again = urls[0].replace("127.0.0.1", "localhost")
        with watched(Addresses([*urls, again])) as group:
            until(lambda: all(row.requests for row in group.look().servers[:3]))
            shot = group.look()
    truth = made.truth()
    assert (shot.fleet.prompt_tokens, shot.fleet.as_routed) == (truth.asked, truth.routed)
    ranges_hold(shot, truth)
    assert shot.servers[3].why == f"the same server as {urls[0]}: its figures are there"
    assert shot.servers[3].query_tokens == 0 and set(shot.snapshots) == set(urls)


def test_servers_that_started_at_the_same_moment_are_not_the_same() -> None:
    """All that are played say the same start, and count nothing yet: their ports differ."""
    with playing_of([Playing(), Playing()]) as (_, urls), watched(Addresses(urls)) as group:
        assert [row.why for row in group.look().servers] == ["", ""]


@pytest.mark.parametrize("away", ["file", "dns"])
def test_a_server_that_leaves_the_list_and_comes_back_counts_once(away: str, tmp_path: Path) -> None:
    made = drawn(5, ROUTES["round robin"], requests=60)
    file = tmp_path / "urls"
    with fleet(made) as (playing, urls):
        file.write_text("\n".join(urls))
        found = {"pool": [urls[0].rpartition("/")[2].rpartition(":")[0]]}
        addresses = Addresses([], file, (), lambda name, _: found.get(name, []))
        with watched(addresses) as group:
            play(made, playing)
            until(lambda: sum(row.requests for row in group.look().servers) == 60)
            until(lambda: not any(row.misses.get("computing") for row in group.look().servers))
            before = group.look().fleet
            if away == "file":
                file.write_text("\n".join(urls[1:]))
            else:
                file.unlink()
            for text in (None, "\n".join(urls)):
                if text is not None:
                    file.write_text(text)
                group._read = 0.0
                after = group.look().fleet
                assert (after.prompt_tokens, after.as_routed) == (before.prompt_tokens, before.as_routed)
            assert sum(row.query_tokens for row in group.look().servers) <= before.prompt_tokens


def test_no_error_of_a_list_ends_what_runs(tmp_path: Path) -> None:
    file, found = tmp_path / "urls", {"pool": ["10.0.0.1", "10.0.0.2"]}
    file.write_text("http://pool:8000\n")
    addresses = Addresses([], file, (), lambda name, _: found.get(name, []))
    first = addresses.read()
    assert list(first) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"] and not addresses.problem
    found["pool"] = []  # a look-up that fails once is no news of the servers
    assert addresses.read() == first
    for damage in (
        b"http://a:1\n" * 2,
        b"\xff",
        b"".join(b"http://10.1.%d.%d:1\n" % divmod(n, 256) for n in range(300)),
    ):
        file.write_bytes(damage)
        assert addresses.read() == first and addresses.problem
    file.write_text("http://pool:8000\n#\n")
    found["pool"] = ["10.0.0.2"]
    assert list(addresses.read()) == ["http://pool:8000"] and not addresses.problem


def test_what_a_dead_server_had_computed_is_unknown_to_who_joins_later() -> None:
    made = drawn(7, ROUTES["round robin"])
    with fleet(made) as (playing, urls):
        play(made, playing)
        dead = "http://127.0.0.1:9"
        with watched(Addresses([urls[0], urls[1], dead])) as group:
            until(lambda: all(row.requests for row in group.look().servers[:2]))
            until(lambda: not any(row.misses.get("computing") for row in group.look().servers))
            shot = group.look()
    assert not any(row.misses.get("cold") for row in shot.servers)
    assert all(row.misses["unknown"] for row in shot.servers[:2])
    head = document(shot).headline
    assert f"{dead} has not answered: what it had computed is unknown" in head


def test_new_servers_that_take_too_long_are_asked_at_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune.servers.watch.servers.WHOLE_S", 0.0)
    made = drawn(5, ROUTES["round robin"], requests=3)
    with fleet(made) as (playing, urls):
        playing[0].answers.paths["/metrics"] = (500, "")
        with closing(Servers(Addresses(urls), watcher)) as group:
            heard = []
            for _ in range(4):
                with suppress(KvtuneError):
                    group.look()
                heard.append([group.members[url].listens for url in urls])
    assert heard == [[False] * 3, [False, True, False], [False, True, True], [False, True, True]]


def test_the_server_that_holds_most_is_read_no_further_when_all_hold_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtune.servers.watch.servers.MOST_FLEET_BYTES", 1)
    made = drawn(5, ROUTES["round robin"], requests=30)
    with fleet(made) as (playing, urls), watched(Addresses(urls)) as group:
        playing[1].publish(made.servers[1].batches)
        until(lambda: group.look() is None or bool(group.members[urls[1]].watched.reader.problem))
        shot = group.look()
    assert "its events are unreadable" in shot.servers[1].why and not shot.servers[1].misses
    assert not any(url != urls[1] and group.members[url].watched.reader.problem for url in urls)
    assert not group.members[urls[1]].watched.account.blocks
