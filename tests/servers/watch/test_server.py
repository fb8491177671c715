"""`kvtune watch` and `record` against a server that plays a recording, and what may go wrong."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.file_flags import on_the_list
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from kvtune.data.show.screen import document_lines
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.server import section
from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.client import base_of, headers_of
from kvtune.servers.watch.document import document
from kvtune.servers.watch.metrics import Between, begun_anew, read
from kvtune.servers.watch.record import Recording, _flags, run_of
from kvtune.servers.watch.screen import HELP, View, lines
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.snapshot import Snapshot
from kvtune.servers.watch.watched import Watched
from tests.lab.engine.serving import free_port
from tests.servers.watch.played import (
    HERE,
    Answers,
    Publisher,
    alone,
    counters,
    engine_counters,
    first_look,
    http,
    published,
    recorder,
    sources,
    started,
    until,
)
from tests.servers.watch.recordings import TIER, Recorded, recorded
from tests.simulator import run


class Playing:
    """A server with events; `play` sends the recording's next batches and sets the counters to what they add up to."""

    def __init__(self, *, history: bool = True) -> None:
        self.publisher, self.answers = published(counters(0, 0), history=history)
        self.run: Recorded = recorded("full_attention")

    def play(self, start: int = 0, end: int | None = None) -> None:
        self.publisher.publish(self.run.payloads[start:end])
        self.answers.paths["/metrics"] = (200, counters(26605, 7232, preempted=1, done=51))


@pytest.fixture
def playing() -> Iterator[Playing]:
    made = Playing()
    yield made
    made.publisher.close()


def kvtune(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_one_look_shows_hits_and_causes_that_add_up(
    playing: Playing, capsys: pytest.CaptureFixture[str]
) -> None:
    playing.play()
    with http(playing.answers) as base:
        code, out, _ = kvtune(capsys, "watch", base, "--once", "--seconds", "0.1")
        assert code == 0
        assert "since start" in out and "never seen before" in out and "27.2 %" in out
        assert all(len(line) <= 120 for line in out.splitlines())
        code, out, _ = kvtune(capsys, "watch", base, "--json", "--seconds", "0.1")
    shot = json.loads(out)
    whole = shot["periods"]["since start"]
    assert whole["query_tokens"] == 26605 and whole["hit_tokens"] == 7232
    assert sum(whole["misses"].values()) == 26605 - 7232
    assert shot["events"] == {
        "state": "on",
        "complete": True,
        "lost_batches": 0,
        "unknown_messages": 0,
        "ranks": 1,
    }
    assert {row["position"] for row in shot["divergences"]} >= {200, 207, 214}
    assert shot["prefixes"][0]["visits"] > 5 and shot["texts"] == {}


def test_without_events_it_shows_what_metrics_can_and_the_one_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = Answers(counters(100, 40))
    with http(answers) as base:
        code, out, _ = kvtune(capsys, "watch", base, "--once", "--seconds", "0.1")
    assert code == 0 and "40.0 %" in out and "--kv-events-config" in out and "missed" in out
    asked = {"/metrics", "/version", "/kv_event_sources", "/v1/models", "/server_info?config_format=json"}
    assert {path for _, path, _ in answers.seen} <= asked
    assert {method for method, _, _ in answers.seen} == {"GET"}


def test_events_in_a_format_that_kvtune_does_not_know_are_told(
    playing: Playing, capsys: pytest.CaptureFixture[str]
) -> None:
    playing.publisher.publish([(number, b"another format") for number in range(4)])
    with http(playing.answers) as base:
        code, out, _ = kvtune(capsys, "watch", base, "--once", "--seconds", "0.1")
    assert code == 0
    assert "the server's events cannot be read: kvtune does not know their format (4 messages)" in out


def test_who_joins_late_is_told_what_cannot_be_known(tmp_path: Path) -> None:
    playing = Playing(history=False)
    try:
        with http(playing.answers) as base:
            watching = Watched(Server(base))
            watching.start()
            playing.publisher.subscribed()
            playing.play(25)
            until(lambda: "unknown" in (watching.look().periods["since joined"].misses or {}))
            shot = watching.look()
            watching.close()
        assert not shot.events.complete and "cold" not in (shot.periods["since joined"].misses or {})
        assert any("before kvtune joined" in note for note in shot.notes)
    finally:
        playing.publisher.close()


def test_who_joins_a_silent_server_without_history_calls_nothing_an_account_since_its_start() -> None:
    playing = Playing(history=False)
    playing.answers.paths["/metrics"] = (200, counters(1000, 100))
    shot = first_look(playing.answers)
    assert not shot.events.complete and "since start" not in shot.periods
    assert shot.periods["since joined"].query_tokens == 0
    assert any("replay_endpoint" in note for note in shot.notes)
    playing.answers.paths["/metrics"] = (200, counters(0, 0))
    young = first_look(playing.answers)
    assert not any("before kvtune joined" in note for note in young.notes)
    playing.publisher.close()


def test_evictions_of_the_history_are_not_those_of_the_last_seconds(playing: Playing) -> None:
    playing.play()
    shot = first_look(playing.answers)
    assert shot.evicted_blocks > 400 and shot.evicted_blocks_s == 0.0


def test_a_view_that_stays_scrapes_less_often_than_it_looks(playing: Playing) -> None:
    with started(playing.answers, ask_s=1000.0) as watching:
        playing.publisher.subscribed()
        playing.play()
        until(lambda: (watching.look().cached_blocks or 0) > 100)
        number, first = playing.run.payloads[0]
        later = [time.time() + 1000.0, *msgspec.msgpack.decode(first)[1:]]
        playing.publisher.sent.clear()
        playing.publisher.publish([(number, msgspec.msgpack.encode(later))])
        until(lambda: (watching.look().cached_blocks or 0) < 100)
        watching.ask_s = 0.0
        playing.answers.paths["/metrics"] = (200, counters(640, 0, started=100.0))
        shot = watching.look()  # the events said before /metrics that the server was started anew
    assert shot.restarts == 1 and (shot.cached_blocks or 0) > 0
    assert [path for _, path, _ in playing.answers.seen].count("/metrics") == 3  # `start` asks twice


def test_a_restart_without_an_event_empties_the_cache(playing: Playing, tmp_path: Path) -> None:
    playing.play()
    first = msgspec.msgpack.decode(playing.run.payloads[0][1])
    with started(playing.answers) as watching:
        assert (watching.look().cached_blocks or 0) > 100
        playing.answers.paths["/metrics"] = (200, counters(0, 0, started=100.0))
        assert watching.look().cached_blocks == 0
        # And the same prompt is new where the new server publishes elsewhere.
        other = Publisher(HERE, HERE)
        answer = sources(other.endpoint, other.replay)
        playing.answers.paths["/kv_event_sources"] = (200, answer)
        other.publish([(0, msgspec.msgpack.encode([time.time() + 1000.0, *first[1:]]))])
        playing.answers.paths["/metrics"] = (200, counters(640, 0, started=200.0))
        shot = watching.look()
        assert shot.restarts == 2 and (shot.cached_blocks or 0) > 0
        assert shot.periods["since start"].misses == {"cold": 640}
        del playing.answers.paths["/kv_event_sources"]
        playing.answers.paths["/metrics"] = (200, counters(10, 5, started=300.0))
        shot = watching.look()
        assert (shot.events.state, shot.cached_blocks) == ("off", None)
        assert shot.periods["since start"].hit_tokens == 5
        other.close()


def test_engines_add_up_and_each_ones_events_are_read_on_its_own_port(tmp_path: Path) -> None:
    """As `vllm serve --data-parallel-size 2` says it: two API servers, no process_start_time_seconds."""
    run_ = recorded("full_attention")
    publishers = [Publisher(HERE, HERE) for _ in (0, 1)]
    told = {
        str(rank): json.loads(sources(publishers[rank].endpoint, publishers[rank].replay))["0"]
        for rank in (1, 0)
    }
    one, two = (engine_counters(26605, 7232, done=51, engine=n, blocks=400) for n in (0, 1))
    for publisher in publishers:
        publisher.publish(run_.payloads)
    answers = Answers(one + two)
    answers.paths["/kv_event_sources"] = (200, json.dumps(told))
    try:
        with http(answers) as base:
            recording = Recording(alone(base))
            recording.run(0.1, lambda _: True)
            shot = recording.only.watched.look()
            made = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
            recording.servers.close()
    finally:
        for publisher in publishers:
            publisher.close()
    whole = shot.periods["since start"]
    assert (whole.query_tokens, whole.hit_tokens, shot.requests) == (2 * 26605, 2 * 7232, 102)
    assert whole.misses is not None and sum(whole.misses.values()) == 2 * (26605 - 7232)
    assert whole.misses["cold"] > 10_000 < whole.misses["other_engine"]
    assert shot.events.ranks == shot.engines == shot.running == 2 and shot.events.complete
    assert (shot.pool_use, shot.pool_blocks) == (0.25, 400)
    assert (made.header.engine.engines, made.header.engine.num_blocks) == (2, 200)
    assert "--num-gpu-blocks-override 200" in " ".join(made.header.engine.args)


def test_an_unreachable_server_is_asked_again_by_the_live_view(playing: Playing) -> None:
    answers = iter([KvtuneError("no server answers"), None])
    with started(playing.answers) as watching:

        def look():  # type: ignore[no-untyped-def]
            error = next(answers, None)
            if error is not None:
                raise error
            return watching.look()

        view = View(look, Path())
        assert view._next(None) is None and "asking again" in view._lines(None, 80, 24)[0]
        shot = view._next(None)
    assert shot is not None and "asking again" not in " ".join(view._lines(shot, 80, 24))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (200, 60), (40, 10)])
def test_a_screen_fits_its_terminal(playing: Playing, width: int, height: int) -> None:
    playing.play()
    shot = first_look(playing.answers)
    drawn = lines(shot, width, height)
    assert len(drawn) == height and all(len(line) <= width for line in drawn)
    assert drawn[-1].startswith("q quit")
    assert document_lines(document(shot), width)
    assert len(HELP) < 24 and all(len(line) <= 110 for line in HELP)


@pytest.mark.parametrize(("version", "tried"), [("0.29.0", True), ("0.33.1", True), ("0.34.0", False)])
def test_a_version_that_was_not_tried_is_named(
    capsys: pytest.CaptureFixture[str], version: str, tried: bool
) -> None:
    answers = Answers(counters(100, 40))
    answers.paths["/version"] = (200, json.dumps({"version": version}))
    with http(answers) as base:
        code, out, _ = kvtune(capsys, "watch", base, "--once", "--seconds", "0.1")
    assert (
        code == 0
        and ("has not been tried with its events; tried: 0.29, 0.30, 0.31, 0.32, 0.33" in out) != tried
    )


def with_log(recording: Recording, playing: Playing, folder: Path) -> Run:
    """The recording's run, as if it had lasted as long as the log of the requests that were played."""
    log = playing.run.log
    recording.begun = min(one.t0 for one in log)
    recording.seconds = max(one.t1 for one in log) - recording.begun
    logged = [
        Logged(
            one.name, one.prompt, one.answer, one.t0, one.t1, one.hit, line=n, output_tokens=len(one.answer)
        )
        for n, one in enumerate(log)
    ]
    return run_of(recording, folder / "log.jsonl", logged, ["kvtune", "record"], on_the_list)


def test_a_recording_with_a_log_has_every_tokens_cause(
    playing: Playing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    playing.play()
    with recorder(playing.answers, ran_s=0.2) as recording:
        made = with_log(recording, playing, tmp_path)
    server = made.header.extra.server
    assert server is not None and (server.logged, server.reported, server.agree) == (51, 51, 51)
    requests = made.table("requests")
    assert requests["hit_tokens"].sum() == 7232
    assert sum(made.header.extra.misses.values()) == 26605 - 7232
    # Of 399 + 392 + 385 tokens behind a difference, 45 are in tails of less than a block, of which no event tells.
    assert made.header.extra.misses["diverged"] == 399 + 392 + 385 - 45
    file = tmp_path / "server.kvrun"
    write_run(made, file)
    assert read_run(file).header == made.header
    drawn = str(tmp_path / "p.html")
    for words in (("explain", str(file)), ("runs", str(tmp_path)), ("report", str(file), "-o", drawn)):
        code, out, err = kvtune(capsys, *words)
        assert code == 0, err
        if words[0] == "explain":
            assert "51 of 51 have the hit that the server reported" in " ".join(out.split())
    assert "Where the prompt tokens went" in (tmp_path / "p.html").read_text()
    code, out, _ = kvtune(capsys, "compare", str(file), str(file))
    assert code == 0


def test_a_replay_gets_the_flags_that_decide_what_can_hit() -> None:
    labels = {
        "block_size": "64",
        "prefix_match_unit": "32",
        "kv_offloading_size": "0.5",
        "mamba_cache_mode": "align",
    }
    said = " ".join(_flags({**labels, "mamba_block_size": "None"}, 4096))
    assert "--prefix-match-unit 32" in said and "--kv-offloading-size 0.5" in said
    assert "--mamba-cache-mode align" in said and "--mamba-block-size" not in said


def test_record_writes_a_run_and_a_log_that_fails_loses_nothing(
    playing: Playing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.kvrun"
    with http(playing.answers) as base:
        looked = lambda: sum(path == "/metrics" for _, path, _ in playing.answers.seen) > 3  # noqa: E731
        thread = Thread(target=lambda: (until(looked), playing.play()))
        thread.start()
        code, _, err = kvtune(
            capsys,
            "record",
            base,
            "-o",
            str(file),
            "--seconds",
            "1",
            "--requests",
            str(tmp_path / "none.jsonl"),
        )
        thread.join()
        assert code == 2 and "without its log" in err and "none.jsonl" in err
        code, _, err = kvtune(capsys, "record", base, "-o", str(file))
        assert code == 2 and "exists" in err
    server = read_run(file).header.extra.server
    assert server is not None and server.query_tokens == 26605
    code, out, _ = kvtune(capsys, "explain", str(file))
    assert code == 0 and "all requests of the server" in out


def failing(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, err = kvtune(capsys, "watch", *words, "--once")
    assert code in (1, 2) and out == ""
    said = err.strip().splitlines()
    assert len(said) == 2 and said[1].startswith("  next: ")
    return err


def test_addresses_that_are_no_vllm_server_end_in_one_line_and_a_next_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no server answers" in failing(capsys, f"localhost:{free_port()}")
    assert "is not the address of a server" in failing(capsys, "ftp://host")
    assert "is not the address of a server" in failing(capsys, "http://host:99999999")
    other = Answers("# TYPE go_goroutines gauge\ngo_goroutines 7\n")
    with http(other) as base:
        assert "no series of vLLM" in failing(capsys, base)
        other.paths["/metrics"] = (200, "vllm:num_requests_running{ torn")
        assert "not in Prometheus' format" in failing(capsys, base)
        other.paths["/metrics"] = (503, "busy")
        assert "answers 503" in failing(capsys, base)
        del other.paths["/metrics"]
        assert "a gateway often hides /metrics" in failing(capsys, base)
        other.paths["/metrics"] = (403, "no")
        forbidden = failing(capsys, base)
        assert "is forbidden (403)" in forbidden and "a gateway often hides /metrics" in forbidden
        del other.paths["/metrics"]
        other.key = "secret"
        assert "wants a key (401)" in failing(capsys, base)
        monkeypatch.setenv("KVTUNE_API_KEY", "wrong")
        assert "does not take this key (401)" in failing(capsys, base)
        monkeypatch.delenv("KVTUNE_API_KEY")
        assert "speak TLS" in failing(capsys, base.replace("http:", "https:"))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
        monkeypatch.setenv("NO_PROXY", "")
        assert "NO_PROXY=" in failing(capsys, "http://some.host.invalid:8000")
        monkeypatch.delenv("HTTP_PROXY")
    assert "is not NAME: VALUE" in failing(capsys, base, "--header", "what")


def test_behind_a_proxy_with_a_path_everything_is_asked_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As nginx passes `/models/tiny/` on: and the events' address is one that this machine does not reach."""
    answers = Answers(counters(100, 40))
    nobody = f"tcp://127.0.0.1:{free_port()}"
    answers.paths["/kv_event_sources"] = (200, sources(nobody, None))
    answers.paths = {f"/models/tiny{path}": answer for path, answer in answers.paths.items()}
    with http(answers) as base:
        assert "a gateway often hides /metrics" in failing(capsys, base)
        code, out, _ = kvtune(capsys, "watch", f"{base}/models/tiny/v1", "--once", "--seconds", "0.1")
        said = " ".join(out.split())
        assert code == 0 and "40.0 %" in out and "60.0 %" in out and "since start" in out
        assert (
            f"nothing is heard of the server's KV events at {nobody}" in said
            and "run kvtune where that port is reached" in said
        )
        assert "before kvtune joined" not in said
        code, out, _ = kvtune(capsys, "watch", f"{base}/models/tiny", "--json", "--seconds", "0.1")
    assert json.loads(out)["events"]["state"] == "unreachable"


def test_a_key_and_headers_are_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(counters(100, 40))
    answers.key = "secret"
    monkeypatch.setenv("KVTUNE_API_KEY", "secret")
    with http(answers) as base:
        code, out, _ = kvtune(
            capsys, "watch", f"{base}/v1", "--once", "--seconds", "0.1", "--header", "X-Team: kv"
        )
    assert code == 0 and "secret" not in out
    assert all(headers["X-Team"] == "kv" for _, _, headers in answers.seen)


def test_tls_with_an_unknown_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(__file__).parents[1] / "tap" / "localhost.pem"
    with http(Answers(counters(100, 40)), certificate=file) as base:
        assert "its certificate is not trusted here" in failing(capsys, base)
        assert "if it wants TLS" in failing(capsys, base.replace("https:", "http:"))
        code, out, _ = kvtune(capsys, "watch", base, "--once", "--seconds", "0.1", "--insecure")
        assert code == 0 and "40.0 %" in out


def test_addresses_as_people_type_them() -> None:
    for text in ("host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/metrics"):
        assert base_of(text) == "http://host:8000"
    assert base_of("https://u:p@host/prefix/v1/") == "https://host/prefix"
    with pytest.raises(UsageError):
        base_of("")
    assert headers_of(["A: b:c"])["A"] == "b:c"


def test_quantiles_and_rates_are_of_what_happened_in_between() -> None:
    def scrape(at: float, low: int, high: int, tokens: int):  # type: ignore[no-untyped-def]
        name = "vllm:time_to_first_token_seconds_bucket"
        text = counters(tokens, 0)
        for bound, count in (("0.1", low), ("0.2", low + high), ("+Inf", low + high)):
            text += f'{name}{{engine="0",le="{bound}"}} {count}.0\n'
        return read(text, at)

    between = Between(scrape(0.0, 100, 0, 50), scrape(10.0, 100, 10, 150))
    assert between.rate("prefix_cache_queries") == 10.0
    assert between.quantile("time_to_first_token_seconds", 0.5) == pytest.approx(0.15)
    assert between.quantile("inter_token_latency_seconds", 0.5) is None
    assert Between(between.last, between.last).quantile("time_to_first_token_seconds", 0.5) is None
    assert begun_anew(between.last, between.first) and not begun_anew(between.first, between.last)


def test_a_load_balancers_url_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    turn = itertools.cycle([counters(100, 40, started=100.0), counters(9000, 40, started=200.0)])
    answers = Answers("")
    answers.paths["/metrics"] = (200, lambda _: next(turn))
    with http(answers) as base:
        code, _, err = kvtune(capsys, "watch", base, "--once", "--seconds", "2")
    assert code == 2 and "several servers answer in turn" in err and "one server" in err


def test_counters_that_swing_without_a_start_are_of_several_servers() -> None:
    turn = itertools.cycle([engine_counters(100, 40), engine_counters(9000, 40)])
    answers = Answers("")
    answers.paths["/metrics"] = (200, lambda _: next(turn))
    with http(answers) as base:
        watching = Watched(Server(base))
        with pytest.raises(UsageError, match="several servers"):
            watching.start()
            for _ in range(6):
                watching.look()
        watching.close()


def test_while_the_server_is_down_no_rate_is_shown(playing: Playing) -> None:
    playing.play()
    with started(playing.answers) as watching:
        shot = watching.look()
        view = View(lambda: shot, Path())
        up = view._next(None)
        assert up is not None and up.down_since is None and up.running is not None

        def gone() -> Snapshot:
            raise KvtuneError("no server answers", "is it running?")

        view._look = gone
        gone_now = view._next(up)
    assert gone_now is not None and gone_now.down_since == up.at
    assert gone_now.running is gone_now.prompt_tokens_s is gone_now.evicted_blocks_s is None
    text = "\n".join(lines(gone_now, 100, 40))
    assert "DOWN since" in text and "running –" in text and "prompt –" in text
    assert "10 s" not in text and "since start" in text


def test_columns_are_named_by_the_time_that_they_span(playing: Playing) -> None:
    playing.play()
    shot = first_look(playing.answers)
    assert {"10 s", "5 min"} < set(shot.periods)
    heads = next(line for line in document_lines(document(shot)) if "prefix cache" in line)
    assert "10 s" not in heads and "5 min" not in heads and "since start" in heads


def test_a_recordings_lists_and_counts_hold_nothing_that_came_before(
    playing: Playing, tmp_path: Path
) -> None:
    playing.play()
    with recorder(playing.answers, ran_s=0.2) as recording:
        made = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
    server = made.header.extra.server
    assert server is not None and (server.requests, server.query_tokens, server.evicted_blocks) == (0, 0, 0)
    assert server.prefixes == [] and server.divergences == [] and server.misses == {}


class Held(threading.Event):
    """An event that its owner cannot set."""

    def set(self) -> None:
        pass


def test_history_that_comes_late_is_not_of_the_time_that_is_watched(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http(playing.answers) as base:
        monkeypatch.setattr("kvtune.servers.watch.watched.HISTORY_S", 0.0)
        watching = Watched(Server(base))
        watching.start()
        playing.publisher.subscribed()
        assert watching.reader is not None
        watching.reader.ready = history = Held()  # the history is still being read, whatever its reader says
        watching.look()
        playing.play()
        playing.answers.paths["/metrics"] = (200, counters(0, 0))
        until(lambda: watching.look().evicted_blocks == 439)  # all of the recording
        threading.Event.set(history)
        shot = watching.look()
        life = watching.life()
        watching.close()
    assert life.evicted_blocks == 0 and shot.evicted_blocks_s == 0.0
    assert all(not period.recomputed for period in shot.periods.values())


def test_the_text_at_a_difference_is_shown_on_request(
    playing: Playing, capsys: pytest.CaptureFixture[str]
) -> None:
    playing.answers.paths["/detokenize"] = (
        200,
        lambda body: json.dumps({"prompt": " ".join(f"w{token}" for token in body["tokens"])}),
    )
    playing.play()
    with http(playing.answers) as base:
        code, out, _ = kvtune(capsys, "watch", base, "--json", "--seconds", "0.1", "--with-text")
        assert code == 0
        shot = json.loads(out)
        _, shown, _ = kvtune(capsys, "watch", base, "--once", "--seconds", "0.1", "--with-text")
        _, plain, _ = kvtune(capsys, "watch", base, "--json", "--seconds", "0.1")
    prompts = {one.name: one.prompt for one in playing.run.log}
    at = next(n for n, row in enumerate(shot["divergences"]) if row["position"] == 207)
    text, later = shot["differences"][at], prompts["diverged 207"]
    assert text["later"].split()[0] == f"w{later[207]}" and text["before"].split()[-1] == f"w{later[206]}"
    assert text["earlier"].split()[0] == f"w{prompts['prefix 0'][207]}"
    assert "«" in shown and json.loads(plain)["differences"] == []


def test_what_a_connector_loads_is_a_hit_and_misses_have_no_cause(playing: Playing) -> None:
    playing.play()
    labels = '{engine="0",model_name="tiny"}'
    loaded = f"vllm:external_prefix_cache_queries_total{labels} 19373.0\n"
    loaded += f"vllm:external_prefix_cache_hits_total{labels} 3000.0\n"
    playing.answers.paths["/metrics"] = (200, counters(26605, 7232) + loaded)
    shot = first_look(playing.answers)
    whole = shot.periods["since start"]
    assert (whole.hit_tokens, whole.loaded_tokens) == (10232, 3000)
    assert whole.misses == {"unknown": 26605 - 10232} and not whole.recomputed
    text = "\n".join(document_lines(document(shot)))
    assert "loaded by a connector" in text and "a connector loads blocks" in text


def test_a_tier_that_says_what_it_holds_leaves_misses_their_causes(playing: Playing) -> None:
    playing.run = recorded(TIER)
    playing.play()
    playing.answers.paths["/metrics"] = (200, f"{playing.run.metrics}\nprocess_start_time_seconds 1.0\n")
    shot = first_look(playing.answers)
    whole = shot.periods["since start"]
    assert (whole.hit_tokens, whole.loaded_tokens) == (7232 + 1088, 1088)
    assert whole.misses == {"cold": 17632, "tails": 26605 - 8320 - 17632} and not whole.recomputed
    assert not any("connector" in note for note in shot.notes)


def test_with_a_match_unit_misses_have_no_cause_but_a_logs_requests_have(
    playing: Playing, tmp_path: Path
) -> None:
    playing.play()
    text = counters(26605, 7232).replace('block_size="32"', 'block_size="32",prefix_match_unit="16"')
    playing.answers.paths["/metrics"] = (200, text)
    with recorder(playing.answers, ran_s=0.2) as recording:
        shot = recording.only.last
        made = with_log(recording, playing, tmp_path)
    assert shot.periods["since start"].misses == {"unknown": 26605 - 7232}
    assert any("--prefix-match-unit 16" in note for note in shot.notes)
    server = made.header.extra.server
    assert server is not None and (server.logged, server.reported) == (51, 0)
    assert made.table("requests")["hit_tokens"].sum() == 7232
    assert "evicted" not in made.header.extra.misses and made.header.extra.misses["not_cached"]
    drawn = section(RunAnalysis(made))
    assert drawn is not None and "exact" not in drawn.lead and "the server reported the hits" in drawn.lead
