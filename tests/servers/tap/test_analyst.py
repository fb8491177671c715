"""The analyst's loop: what comes is taken in order, and what is wrong with one request ends that one alone."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvtune.base.dialogue import Frames, framed
from kvtune.base.masking import Secrets, holding
from kvtune.requests.log.logged import Logged
from kvtune.requests.text.edits import Edit
from kvtune.servers.tap import recorder
from kvtune.servers.tap.analyst import Analyst
from kvtune.servers.tap.exchange import Budget, Exchange, Kept, Numbers
from kvtune.servers.tap.judging import Differs, Request
from kvtune.servers.tap.lines import as_json, as_text
from kvtune.servers.tap.messages import Ended, Message, Outcome, Sent, Settings
from kvtune.servers.tap.recorder import GONE, LATE, OTHER, SLOW, Recorder

SETTINGS = Settings("http://127.0.0.1:9", {}, False, "kvtune-t-", "", False, True)


class Taken(asyncio.Transport):
    """A socket that takes everything at once."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0

    def write(self, data: Any) -> None:
        self.pieces.append(data)
        self.size += len(data)


class Judge:
    """In place of the judge: notes in which order it is told things. `came`: events that wait."""

    late_s = 0.05

    def __init__(self) -> None:
        self.came: list[str] = []
        self.order: list[str] = []

    def take(self) -> list[str]:
        taken, self.came = self.came, []
        return taken

    def add(self, batches: list[str]) -> None:
        self.order += batches

    def opened(self, one: Any) -> None:
        self.order.append(f"opened {one.number}")

    def closed(self, one: Any) -> None:
        self.order.append(f"closed {one.number}")

    def ended(self, one: Any) -> None: ...

    def missed(self) -> None: ...

    def dropped(self, one: Any, *, computed: bool) -> None: ...

    def forget(self, number: int) -> None: ...

    def close(self) -> None: ...


def sent(number: int, body: object) -> Sent:
    return Sent(number, "/v1/messages", "", "c", 1.0, json.dumps(body).encode())


def whole(message: Message) -> bytes:
    return b"".join(framed(message))


def ended(number: int) -> Ended:
    return Ended(number, 200, "application/json", 1.0, 2.0, "whole", b'{"usage": {"input_tokens": 1}}')


def analyst(judge: Judge, prompts: Any) -> Analyst:
    made = Analyst(SETTINGS)
    made.close()
    made.judging = judge  # type: ignore[assignment]
    made.rendering.prompts = prompts  # type: ignore[method-assign]
    return made


def test_a_request_is_judged_after_the_events_that_came_while_another_was_rendered() -> None:
    judge = Judge()

    def prompts(_: str, body: Any) -> list[list[int]]:
        if body["slow"]:
            time.sleep(0.2)
            judge.came = ["events"]
        return [[1]]

    def end() -> None:
        while "events" not in judge.order:
            time.sleep(0.01)
        ours.shutdown(socket.SHUT_WR)

    relay, ours = socket.socketpair()
    made = analyst(judge, prompts)
    with relay, ours:
        for message in (sent(1, {"slow": False}), ended(1), sent(2, {"slow": True})):
            ours.sendall(whole(message))
        threading.Thread(target=end).start()
        made.run(relay, Frames[Message](Message))
    assert judge.order.index("events") < judge.order.index("closed 1")


def exchange(number: int, numbers: Numbers) -> Exchange:
    numbers.last = max(numbers.last, number)
    sent = Sent(number, "/v1/messages", "", "c", 1.0)
    return Exchange(sent, Ended(number), Kept(Budget(), 0), Kept(Budget(), 9))


def test_an_analyst_that_cannot_be_started_again_is_tried_later_and_records_are_counted() -> None:
    said: list[str] = []
    numbers = Numbers("kvtune-t-")

    async def restarted() -> None:
        one = Recorder(SETTINGS, numbers, said.append, ["/nonexistent/python"])
        await one._restart()
        for number in (1, 2):
            one.asked(exchange(number, numbers))
        one.answered(exchange(1, numbers))
        await one.finish()

    asyncio.run(restarted())
    assert said == [
        "the analysis ended; requests pass on, and it starts again in 1 s",
        f"2 requests, 0 analysed, 2 not analysed (2 {GONE})",
    ]


def test_each_request_is_counted_once_whatever_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log, refused, dropped for want of room, without an answer at the end, lost by a fault."""
    said: list[str] = []
    numbers = Numbers("kvtune-t-")
    settings = msgspec.structs.replace(SETTINGS, log="a log.jsonl")
    monkeypatch.setattr(recorder, "END_S", 0.01)

    async def recorded() -> None:
        one = Recorder(settings, numbers, said.append)
        ours, theirs = socket.socketpair()
        with theirs:
            one._transport, _ = await asyncio.get_running_loop().create_connection(lambda: one, sock=ours)
            for number in range(1, 7):
                monkeypatch.setattr(recorder, "MOST_WAITING", -1 if number == 6 else 1 << 20)
                one.asked(exchange(number, numbers))
                if number == 5:
                    monkeypatch.setattr(recorder, "MOST_WAITING", -1)
                one.answered(exchange(number, numbers))
            numbers.last += 1
            for outcome in (Outcome(1), Outcome(2), Outcome(3, "why"), Outcome(1)):
                theirs.sendall(whole(outcome))
            theirs.sendall(whole(Outcome(99)))
            while len(one._unanswered) > 1:
                await asyncio.sleep(0)
            await one.finish()

    asyncio.run(recorded())
    whys = f"2 {SLOW}; 1 why; 1 {LATE}; 1 {OTHER}"
    assert said[-2:] == [
        f"7 requests, 2 in the log a log.jsonl, 5 not in it ({whys})",
        "  next: kvtune explain-log 'a log.jsonl'",
    ]
    assert sum("is slow" in line for line in said) == 1


@pytest.mark.parametrize(
    ("program", "limits", "ended"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", (60.0, 0.5), False),
        ("[0 for _ in iter(int, 1)]", (0.5, 60.0), False),
        ("time.sleep(1)", (0.5, 60.0), True),
    ],
    ids=["stopped", "endless", "has not had its turn"],
)
def test_at_the_end_its_own_cpu_time_counts_and_a_stopped_one_is_not_waited_for(
    program: str, limits: tuple[float, float], ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    numbers = Numbers("kvtune-t-")
    monkeypatch.setattr(recorder, "END_S", limits[0])
    monkeypatch.setattr(recorder, "LAST_S", limits[1])

    async def finished() -> bool:
        made = Recorder(
            SETTINGS, numbers, said.append, [sys.executable, "-c", f"import os, signal, time; {program}"]
        )
        await made.start()
        made.asked(exchange(1, numbers))
        await made.finish()
        assert made._closing is not None
        done = made._closing.done()
        made.reap()
        return done

    assert asyncio.run(finished()) == ended
    assert said == [f"1 requests, 0 analysed, 1 not analysed (1 {LATE})"]


def test_a_body_goes_to_the_analyst_without_a_copy_of_it_and_other_connections_have_their_turns() -> None:
    size, turns = 24 << 20, []
    part = bytes(range(256)) * 1024

    async def handed_over() -> tuple[int, list[bytes]]:
        one = Recorder(SETTINGS, Numbers("kvtune-t-"), print)
        one._transport = taken = Taken()
        sent = exchange(1, Numbers("kvtune-t-"))
        for _ in range(size // len(part)):
            sent.body.add(part)
        tracemalloc.start()
        one.asked(sent)
        sent.body.drop()
        while one._waiting:
            turns.append(taken.size)
            await asyncio.sleep(0)
        grown = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return grown, taken.pieces

    grown, pieces = asyncio.run(handed_over())
    assert grown < 1 << 20, "of a body of 24 MiB"
    assert max(b - a for a, b in pairwise(turns)) < 2 << 20
    *_, message = Frames[Message](Message).feed(b"".join(pieces))
    assert isinstance(message, Sent) and message.content == part * (size // len(part))


def test_what_is_wrong_with_one_request_ends_that_one_alone(capsys: pytest.CaptureFixture[str]) -> None:
    judge = Judge()

    def prompts(_: str, body: Any) -> list[list[int]]:
        if body.get("wrong"):
            raise RuntimeError("of the renderer")
        return [[1]]

    relay, ours = socket.socketpair()
    with relay, ours:
        odd: tuple[object, ...] = ({"wrong": 1}, [], "text", None, {"n": "x"}, {"n": -1})
        for number, body in enumerate(odd, start=1):
            ours.sendall(whole(sent(number, body)))
            ours.sendall(whole(ended(number)))
        ours.sendall(whole(ended(999)))
        ours.shutdown(socket.SHUT_WR)
        analyst(judge, prompts).run(relay, Frames[Message](Message))
    assert [line for line in judge.order if "closed" in line] == ["closed 5", "closed 6"]
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == len(odd) and "request #1 was not analysed" in err
    assert "RuntimeError: of the renderer" in err


@pytest.mark.parametrize("as_json", [True, False])
def test_what_a_server_says_is_shown_without_secrets(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    said = 'key: sk-SECRET0123456789, Bearer SECRET, http://u:SECRET@h/?api_key=SECRET, {"api_key":"SECRET"}'
    made = Analyst(msgspec.structs.replace(SETTINGS, json=as_json))
    answer = json.dumps({"error": {"message": f"{said} given-SECRET"}}).encode()
    with holding(Secrets(["given-SECRET"])):
        made.take(sent(1, {"prompt": [1]}))
        made.take(msgspec.structs.replace(ended(1), status=401, content=answer))
        made.finish()
    made.close()
    shown = capsys.readouterr().out
    assert "SECRET" not in shown and "***" in shown
    assert not as_json or json.loads(shown)["status"] == 401


def test_prompts_of_one_request_have_numbers_of_their_own_and_are_shown_by_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = analyst(Judge(), lambda *_: [[1], [2]])
    made.settings = msgspec.structs.replace(SETTINGS, json=False)
    made.take(sent(24, {"prompt": ["a", "b"]}))
    made.take(ended(24))
    made.finish()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] == "#"] == [
        "#24.1",
        "#24.2",
    ]
    for typed, labels in (("24.2", ["#24.2"]), ("#24", ["#24.1", "#24.2"]), ("2", [])):
        made._asked_for(typed)
        shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] == "#"]
        assert shown == labels
    made.remembered.clear()
    assert not made._shown


@pytest.mark.parametrize(("alike", "shown"), [(False, 1), (True, 4)])
def test_of_another_applications_prompt_only_the_first_difference_is_told(alike: bool, shown: int) -> None:
    one = Edit("other", "system[0]", "system", 1, "", "old", "new", (0, 1), (0, 1))
    differs = Differs(16, 144, 7, (one,) * 4, alike)
    request = Request(20, "/v1/messages", {}, Logged("n", [1], t0=1.0), differs=differs)
    differs = as_json(request).differs
    assert differs is not None and len(differs.edits) == shown
    request.status = 200
    lines = list(as_text(request))
    assert sum("system[0]" in line for line in lines) == min(shown, 3)
    assert any("more differences" in line for line in lines) is alike
