"""`kvtune tap` as a person runs it: lines, the log, and no trouble in it that touches a request."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jsonschema import Draft202012Validator

from kvtune.base.errors import UsageError
from kvtune.cli.schema import schema_of
from kvtune.requests.log.logged import LONGEST_NAME
from kvtune.requests.log.requests_log import read_log
from kvtune.servers.tap.command import Address, address, header_name
from tests.choice import first_of
from tests.cli.terminal import on_a_terminal
from tests.servers.tap.stand_in import ids_of, vllm

KVTUNE = str(Path(sys.executable).with_name("kvtune"))
TEXT = " ".join(f"word {number} of the system text" for number in range(100))


@dataclass
class Tap:
    process: subprocess.Popen[str]
    port: int = 0
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def wait(self) -> int:
        """Its exit code, once all that it wrote is in ``out`` and ``err``."""
        code = self.process.wait(60)
        for reader in self.readers:
            reader.join(60)
            assert not reader.is_alive()
        return code

    def post(self, path: str, body: object, agent: str = "claude-cli/2.1 (external)", **heads: str) -> Any:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode() if not isinstance(body, bytes) else body,
            {"user-agent": agent, **{name.replace("_", "-"): value for name, value in heads.items()}},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read()

    def lines(self, count: int) -> list[str]:
        """Wait until that many lines are printed."""
        self.until(lambda: len(self.out) >= count)
        return self.out

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < end and self.process.poll() is None, (self.out, self.err)
            time.sleep(0.01)

    def analyst(self) -> psutil.Process:
        living: list[psutil.Process] = []

        def found() -> bool:
            with contextlib.suppress(psutil.Error):
                for one in psutil.Process(self.process.pid).children():
                    living.extend([one] if one.status() != psutil.STATUS_ZOMBIE else [])
            return bool(living)

        self.until(found)
        return living[0]


@contextmanager
def tap(url: str, *words: str, before: Callable[[], None] | None = None) -> Iterator[Tap]:
    process = subprocess.Popen(
        [KVTUNE, "tap", url, "--listen", "0", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    made = Tap(process)

    def read(stream: Any, into: list[str]) -> None:
        into.extend(line.rstrip("\n") for line in stream)

    for pair in ((process.stdout, made.out), (process.stderr, made.err)):
        made.readers.append(threading.Thread(target=read, args=pair))
        made.readers[-1].start()
    try:
        made.until(lambda: any("relays to" in line for line in made.err))
        first = next(line for line in made.err if "relays to" in line)
        made.port = int(first.split()[0].rpartition(":")[2])
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            for reader in made.readers:
                reader.join()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()


def messages(system: str, *turns: str) -> dict[str, Any]:
    said = [
        {"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(turns)
    ]
    return {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": system}], "messages": said}


def test_a_changed_line_is_named_with_its_place_its_kind_and_the_hits(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with vllm() as server, tap(server.url, "-o", str(log)) as one:
        for number, stamp in enumerate(("10:00:01", "10:07:33")):
            body = messages(f"You help.\nTime: {stamp}\n{TEXT}", "hello", *(["fine", "more"] * number))
            one.post("/v1/messages", body)
        one.lines(6)
    first, _missed, second, differs, mend, *more = one.out
    assert first.startswith("#1 claude-code s1 ") and "hit 0 (0.0%, usage)" in first
    assert second.startswith("#2 claude-code s1 ") and "hit " in second
    assert "differs from #1" in differs and "in system[0] line 2: «10:00:01» «10:07:33»" in differs
    assert "mend: " in mend
    assert any("after a text that differs" in line for line in more)
    assert one.process.returncode == 130
    assert f"  next: kvtune explain-log {log}" in one.err
    rows = list(read_log(log))
    assert [len(row.prompt) for row in rows] == [len(ids) for ids in server.seen]
    assert [list(row.prompt) for row in rows] == server.seen
    assert [row.kind for row in rows] == ["claude-code"] * 2 and rows[0].hit == 0 and rows[1].hit > 0
    assert all(row.t0 and row.t1 and row.t1 >= row.t0 for row in rows)
    assert log.stat().st_mode & 0o777 == 0o600
    assert "10:00:01" not in log.read_text() and "user-agent" not in log.read_text().lower()
    assert all(head["x-session-id"] == f"{rows[at].name}" for at, head in enumerate(server.heads))


def test_all_four_apis_are_in_the_log_streaming_or_not_as_the_server_counted_them(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", messages("You help", TEXT)),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
    ]
    with vllm() as server, tap(server.url, "-o", str(log), "--json") as one:
        for path, body in bodies:
            for stream in (False, True):
                one.post(path, {**body, "stream": stream})
        one.post("/tokenize", chat)
        lines = [json.loads(line) for line in one.lines(10)]
    for line in lines:
        Draft202012Validator(schema_of("tap")).validate(line)
    assert [line["api"] for line in lines] == [path for path, _ in bodies for _ in range(2)]
    assert all(line["logged"] and line["hit_by"] == "usage" for line in lines[:8])
    assert lines[8]["not_logged"], "its prompt has three tokens, and the stand-in counts the text's"
    rows = list(read_log(log))
    assert [(len(row.prompt), row.hit) for row in rows] == [
        (line["prompt_tokens"], line["hit_tokens"]) for line in lines if line["logged"]
    ]
    assert all(
        sum(line["misses"].values()) == line["prompt_tokens"] - line["hit_tokens"] for line in lines[:8]
    )
    assert all(row.ttft is None for row in rows[::2]) and all(row.ttft for row in rows[1:8:2])


@pytest.mark.full
def test_a_server_that_does_not_render_is_asked_to_tokenize(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    body = {"messages": [{"role": "user", "content": "hi there"}]}
    with vllm(renders=False, details=False) as server, tap(server.url, "-o", str(log), "--no-session") as one:
        for _ in range(2):
            one.post("/v1/chat/completions", body)
        one.lines(2)
        assert server.rendered == 1, "asked once"
    assert "hit not reported" in one.out[0]
    assert sum("--enable-prompt-tokens-details" in line for line in one.err) == 1
    assert "x-session-id" not in server.heads[0]
    assert [len(row.prompt) for row in read_log(log)] == [len(ids_of(body))] * 2


@pytest.mark.full
def test_with_text_the_log_has_the_bodies_and_json_the_texts_that_differ(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with vllm() as server, tap(server.url, "-o", str(log), "--with-text", "--json") as one:
        for stamp in ("10:00:01", "10:07:33"):
            one.post("/v1/messages", messages(f"Time: {stamp}\n{TEXT}", "hello"))
        found = json.loads(one.lines(2)[1])
    assert [json.loads(line)["body"]["max_tokens"] for line in log.read_text().splitlines()] == [5, 5]
    (edit,) = found["differs"]["edits"]
    assert (edit["kind"], edit["old"], edit["new"]) == ("time", "10:00:01", "10:07:33")
    assert len(list(read_log(log))) == 2


def test_a_full_disk_is_a_line_on_the_screen_and_no_torn_line_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    limit = 20_000
    body = messages(TEXT, "hello")
    with vllm() as server, tap(server.url, "-o", str(log)) as one:
        one.analyst().rlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for _ in range(4):
            one.post("/v1/messages", body)
        one.until(lambda: any(line.startswith("#4 ") for line in one.out))
        there = len(list(read_log(log)))
        one.until(lambda: "not in the log: " in one.out[-1])
        assert 0 < there < 4 and sum("not in the log: " in line for line in one.out) == 4 - there
        one.analyst().rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        one.post("/v1/messages", body)
        one.until(lambda: any(line.startswith("#5 ") for line in one.out))
    assert [line for line in one.err if "cannot be written" in line or "disk is full" in line]
    assert f"kvtune: {log} is written again: {4 - there} requests are missing in it" in one.err
    count = f"5 requests, {there + 1} in the log {log}, {4 - there} not in it ("
    assert any(line.startswith(count) for line in one.err)
    assert len(list(read_log(log))) == there + 1


@pytest.mark.full
def test_an_analyst_that_is_killed_is_started_again_and_no_request_sees_it(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    body = messages(TEXT, "hello")
    with vllm() as server, tap(server.url, "-o", str(log)) as one:
        one.post("/v1/messages", body)
        one.lines(1)
        before = one.analyst()
        before.kill()
        one.until(lambda: any("the analysis ended" in line for line in one.err))
        one.post("/v1/messages", body)
        one.until(lambda: one.analyst().pid != before.pid)
        time.sleep(0.2)
        one.post("/v1/messages", body)
        one.until(lambda: any(line.startswith("#3 ") for line in one.out))
    assert len(list(read_log(log))) == 2
    what = f"3 requests, 2 in the log {log}, 1 not in it (1 the analysis had ended)"
    assert what in one.err


@pytest.mark.full
def test_an_analyst_that_does_not_read_costs_records_and_no_request(tmp_path: Path) -> None:
    with vllm() as server, tap(server.url, "-o", str(tmp_path / "log.jsonl")) as one:
        one.analyst().suspend()
        for number in range(40):
            one.post("/v1/messages", {**messages("x", str(number)), "metadata": "x" * (4 << 20)})
        assert len(server.heads) == 40
        one.analyst().resume()
        one.until(lambda: any(line.startswith("#1 ") for line in one.out))
        one.post("/v1/messages", messages("y", "z"))
        one.until(lambda: any("has caught up: " in line for line in one.err))
    assert any(line.startswith("41 requests, ") and "the analysis was slow" in line for line in one.err)


def test_a_tap_in_a_scripts_background_obeys_sigint() -> None:
    def ignored() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with vllm() as server, tap(server.url, "--no-log", before=ignored) as one:
        one.process.send_signal(signal.SIGINT)
        assert one.wait() == 130


@pytest.mark.parametrize("stop", first_of([signal.SIGINT, signal.SIGTERM]))
def test_what_waits_at_the_end_is_judged_and_logged_and_one_line_counts_all(
    tmp_path: Path, stop: signal.Signals
) -> None:
    log = tmp_path / "log.jsonl"
    with vllm() as server, tap(server.url, "-o", str(log)) as one:
        child = one.analyst()
        one.until(lambda: child.nice() > psutil.Process().nice())  # the server comes first
        child.suspend()
        for number in range(4):
            one.post("/v1/messages", {**messages("x", str(number)), "metadata": "x" * (2 << 20)})
        with pytest.raises(urllib.error.HTTPError):
            one.post("/v1/chat/completions", b"no JSON")
        with contextlib.suppress(psutil.AccessDenied):
            child.nice(psutil.Process().nice())  # on a busy machine the last turns would not be enough
        one.process.send_signal(stop)
        child.resume()
        assert one.wait() == 130
    assert len([line for line in one.out if line.startswith("#")]) == 5
    assert len(list(read_log(log))) == 4
    what = f"5 requests, 4 in the log {log}, 1 not in it (1 answered with another status than 200)"
    assert what in one.err


def test_a_log_that_is_moved_removed_or_in_the_way_of_another_is_opened_again_and_that_is_said(
    tmp_path: Path,
) -> None:
    log, moved = tmp_path / "log.jsonl", tmp_path / "moved.jsonl"
    with vllm() as server, tap(server.url, "-o", str(log)) as one:

        def ask(number: int) -> None:
            one.post("/v1/messages", messages("a", str(number)))
            one.until(lambda: any(line.startswith(f"#{number} ") for line in one.out))

        ask(1)
        log.rename(moved)
        ask(2)
        assert (len(list(read_log(moved))), len(list(read_log(log)))) == (1, 1)
        log.unlink()
        os.mkfifo(log)
        ask(3)
        one.until(lambda: any("not in the log: " in line for line in one.out))
        log.unlink()
        ask(4)
        one.until(lambda: any("is written again: 1 requests are missing" in line for line in one.err))
        assert [row.name.rpartition("-")[2] for row in read_log(log)] == ["4"]
    assert sum("was moved or removed: a new log is written" in line for line in one.err) == 1
    assert any(line.startswith(f"4 requests, 3 in the log {log}, 1 not in it (1 ") for line in one.err)


def test_no_line_that_the_readers_refuse_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    odd: list[Any] = [[-1, 2], [10**30], [1 << 32], [[], []], [1, 2, 3]]
    with vllm(render=lambda body: list(range(3))) as server, tap(server.url, "-o", str(log)) as one:
        for prompt in odd:
            one.post("/v1/completions", {"prompt": prompt, "session_id": "x" * 200_000})
        one.until(lambda: any(line.startswith("#5 ") for line in one.out))
    assert [list(row.prompt) for row in read_log(log)] == [[1, 2, 3]]
    assert log.stat().st_size < 1000
    assert any(line.startswith("5 requests, 1 in the log") for line in one.err)


@pytest.mark.full
def test_clients_beyond_the_descriptors_wait_and_are_answered_when_others_leave(tmp_path: Path) -> None:
    few = 48

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    with vllm() as server, tap(server.url, "--no-log", before=limit) as one:
        idle = [socket.create_connection(("127.0.0.1", one.port)) for _ in range(few)]
        one.until(lambda: any("as many as descriptors allow" in line for line in one.err))
        for connection in idle:
            connection.close()
        one.post("/v1/messages", messages("a", "b"))
        one.lines(1)
    assert sum("descriptors" in line for line in one.err) == 1
    assert not [line for line in one.err if "Traceback" in line or "502" in line]


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    with vllm() as server, tap(server.url, "-o", str(tmp_path / "log.jsonl")) as one:
        child = one.analyst()
        one.process.kill()
        child.wait(120)


def test_trouble_of_a_request_is_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with vllm() as server, tap(server.url, "-o", str(log)) as one:
        with pytest.raises(urllib.error.HTTPError):
            one.post("/v1/chat/completions", b"\xff not JSON \x1b[2J")
        one.post("/v1/messages", {**messages("a", "b"), "odd\x1b[2J": [1]})
        one.until(lambda: sum(line.startswith("#") for line in one.out) == 2)
    assert one.out[0].startswith("#1 claude-code  400 no JSON")
    assert "\x1b" not in "".join(one.out)


@pytest.mark.full
def test_a_log_that_is_another_file_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"mine": 1}\n')
    with vllm() as server, tap(server.url, "-o", str(mine)) as one:
        one.post("/v1/messages", messages("a", "b"))
        one.lines(1)
        one.until(lambda: any("no log is written" in line for line in one.err))
    assert mine.read_text() == '{"mine": 1}\n'
    done = subprocess.run(
        [KVTUNE, "tap", "http://127.0.0.1:9", "-o", "/dev/full"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "it is a device" in done.stderr


def test_the_answers_header_names_the_server_behind_a_router_where_it_says_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTUNE_API_KEY", "given-SECRET")
    log, turned = tmp_path / "log.jsonl", "turned\x1b[31m red sk-SECRET0123456789 given-SECRET"
    said = ["10.0.0.1:8000", None, "", turned, "http://b:8000", "x" * 60_000]
    shown = "turned\ufffd[31m red *** ***"
    words = ("--replica-header", "X-Backend-ID", "-o", str(log))
    with vllm(served_by=[*said]) as router, tap(router.url, *words, "--json") as one:
        for number in range(len(said)):
            one.post("/v1/messages", messages("You help.", f"question {number}"))
        lines = [json.loads(line) for line in one.lines(len(said))]
    names = [line["replica"] for line in lines]
    assert names[:5] == ["10.0.0.1:8000", "", "", shown, "http://b:8000"]
    assert names[5].startswith("blake2b-") and len(names[5]) < LONGEST_NAME, "no name is that long"
    assert [row.replica for row in read_log(log)] == names and "SECRET" not in log.read_text()
    assert lines[0]["misses"] == {"unknown": lines[0]["prompt_tokens"]}, "other clients use the router, too"
    with vllm(served_by=["a", None, turned]) as router, tap(router.url, *words) as one:
        for number in range(3):
            one.post("/v1/messages", messages("You help.", f"question {number}"))
        one.until(lambda: any(line.startswith("#3 ") for line in one.out))
    heads = [line for line in one.out if line.startswith("#")]
    assert heads[0].endswith("s  at a") and heads[1].endswith(" s") and heads[2].endswith(f"s  at {shown}")


@pytest.mark.parametrize("name", ["x-backend-id:", "x backend", "x\r\nb", "\u00e9"])
def test_a_name_that_no_header_has_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name of a header"):
        header_name(name)


@pytest.mark.parametrize(
    ("text", "host", "port", "local"),
    [
        ("8001", "127.0.0.1", 8001, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:5", "::1", 5, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("example.com:80", "example.com", 80, False),
    ],
)
def test_it_listens_for_this_machine_alone_unless_an_address_is_named(
    text: str, host: str, port: int, local: bool
) -> None:
    assert address(text) == Address(host, port) and address(text).local is local


@pytest.mark.parametrize("text", ["", ":8001", "a:b", "70000", "1.2.3.4:", "²"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address to listen at"):
        address(text)


def test_a_port_that_is_taken_is_named() -> None:
    with vllm() as server:
        done = subprocess.run(
            [KVTUNE, "tap", "http://127.0.0.1:9", "--no-log", "--listen", str(server.port)],
            capture_output=True,
            text=True,
            env=dict(os.environ),
        )
    assert done.returncode == 1 and f"cannot listen at 127.0.0.1:{server.port}" in done.stderr


@pytest.mark.full
def test_a_number_that_is_typed_shows_that_request_in_blocks() -> None:
    with (
        vllm() as server,
        on_a_terminal([KVTUNE, "tap", server.url, "--listen", "0", "--no-log"], columns=200) as terminal,
    ):
        shown = terminal.until("Ctrl-C ends it")
        port = int(shown.partition(" relays")[0].rpartition(":")[2])
        for stamp in ("10:00:01", "10:07:33"):
            body = json.dumps(messages(f"Time: {stamp}\n{TEXT}", "hello")).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/messages", body, timeout=60) as answer:
                answer.read()
        terminal.until("after a text that differs")
        terminal.type("#2\n")
        terminal.until("in #1: '10:00:01'")
        assert "here: '10:07:33'" in terminal.until("here: ")
        terminal.type("99\n")
        terminal.until("no such request")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.rest()[0] == 130
