"""The middleware in a server like vLLM's: what the engine saw is in the log, and the server sees nothing of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.requests.log.logged import PIECE
from kvtune.requests.log.requests_log import read_log
from kvtune.servers.tap import Log
from kvtune.servers.tap.middleware import MOST_WAITING, VARIABLE, Writer


def output(ids: list[int], answers: dict[int, list[int]], hit: int | None, finished: bool) -> SimpleNamespace:
    outputs = [SimpleNamespace(index=index, token_ids=tokens) for index, tokens in answers.items()]
    return SimpleNamespace(prompt_token_ids=ids, outputs=outputs, num_cached_tokens=hit, finished=finished)


class Engine:
    """A client whose answers are given."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.ended: list[str] = []

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[Any]:
        try:
            for one in self.outputs:
                await asyncio.sleep(0)
                yield one
        finally:
            self.ended.append(request_id)


def params(kind: str) -> SimpleNamespace:
    return SimpleNamespace(output_kind=SimpleNamespace(name=kind))


async def nothing(*_: Any) -> dict[str, Any]:
    return {"type": "http.request"}


def scope(engine: Any, path: str = "/v1/messages", **more: Any) -> dict[str, Any]:
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    heads = [(b"user-agent", b"claude-cli/2.1 (a@example.com)"), (b"authorization", b"Bearer SECRETKEY")]
    return {"type": "http", "method": "POST", "path": path, "headers": heads, "app": app, **more}


def logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, work: Callable[[Any], Any], **more: Any
) -> list[dict[str, Any]]:
    """What the log holds after one request for which the application does `work`."""
    monkeypatch.setenv(VARIABLE, str(folder / "log.jsonl"))

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await work(engine)

    middleware = Log(app)
    try:
        asyncio.run(middleware(scope(engine, **more), nothing, nothing))  # type: ignore[arg-type]
    finally:
        middleware._writer.close()
    path = folder / f"log.{os.getpid()}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def all_of(engine: Any, *prompts: str, kind: str = "DELTA", **named: Any) -> list[Any]:
    return [
        out
        for name in prompts
        for out in [one async for one in engine.generate({}, params(kind), name, **named)]
    ]


def test_a_stream_is_one_line_with_ids_hits_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine([output([1, 2, 3], {0: [7]}, 2, False), output([1, 2, 3], {0: [8, 9]}, None, True)])
    (row,) = logged(tmp_path, monkeypatch, engine, lambda e: all_of(e, "chatcmpl-1", session_id="mine"))
    assert (row["name"], row["prompt_token_ids"], row["answer"], row["hit"]) == (
        "chatcmpl-1",
        [1, 2, 3],
        [7, 8, 9],
        2,
    )
    assert (row["kind"], row["url"], row["session_id"]) == ("claude-code", "/v1/messages", "mine")
    assert row["usage"] == {"prompt_tokens": 3, "completion_tokens": 3} and "broken_off_by" not in row
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "SECRET" not in path.read_text() and "example.com" not in path.read_text()
    (read,) = read_log(path)
    assert (list(read.prompt), list(read.answer), read.hit) == ([1, 2, 3], [7, 8, 9], 2)


def test_each_prompt_of_a_request_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([output([1], {0: [4]}, 0, True)])
    rows = logged(
        tmp_path, monkeypatch, engine, lambda e: all_of(e, "cmpl-1-0", "cmpl-1-1", kind="FINAL_ONLY")
    )
    assert [row["name"] for row in rows] == ["cmpl-1-0", "cmpl-1-1"]
    assert all("ttft" not in row for row in rows), "the whole answer comes at once"


def test_a_stream_that_the_client_breaks_off_ends_the_engines_at_once_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine([output([1, 2], {0: [n]}, 0, False) for n in range(9)])

    async def breaks_off(client: Any) -> None:
        stream = client.generate({"cache_salt": "s"}, params("DELTA"), "a")
        await anext(stream)
        await stream.aclose()
        assert engine.ended == ["a"]

    (row,) = logged(tmp_path, monkeypatch, engine, breaks_off)
    assert (row["answer"], row["broken_off_by"], row["cache_salt"]) == ([0], "client", "s")


def test_a_request_that_is_broken_off_before_its_first_output_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine([output([1, 2], {0: [3]}, 0, True)])

    async def leaves(client: Any) -> None:
        stream = client.generate(
            {"prompt_token_ids": [1, 2]}, sampling_params=params("FINAL_ONLY"), request_id="a"
        )
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    (row,) = logged(tmp_path, monkeypatch, engine, leaves)
    assert (row["prompt_token_ids"], row["answer"], row["broken_off_by"]) == ([1, 2], [], "client")
    assert "hit" not in row and engine.ended == ["a"]


def test_outputs_and_errors_reach_the_server_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = [SimpleNamespace(), None, output([1], {0: [2]}, 0, True)]
    seen: list[Any] = []

    async def work(client: Any) -> None:
        seen.extend(await all_of(client, "a"))
        raise ValueError("of the server")

    with pytest.raises(ValueError, match="of the server"):
        logged(tmp_path, monkeypatch, Engine(odd), work)
    assert seen == odd


@pytest.mark.parametrize(
    "broken",
    [
        {"app": None},
        {"headers": None},
        {"headers": [(b"user-agent", None)]},
        {"type": "websocket"},
        {"method": "GET"},
        {"app": SimpleNamespace(state=SimpleNamespace())},
    ],
)
def test_another_kind_of_server_or_request_passes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any]
) -> None:
    engine = Engine([output([1], {0: [2]}, 0, True)])
    assert logged(tmp_path, monkeypatch, engine, lambda e: all_of(e, "a"), **broken) == []
    assert engine.ended == ["a"]


def test_work_that_is_of_no_request_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([output([1], {0: [2]}, 0, True)])
    logged(tmp_path, monkeypatch, engine, lambda e: all_of(e, "a"))
    assert len(asyncio.run(all_of(engine, "of the server's own"))) == 1
    assert len((tmp_path / f"log.{os.getpid()}.jsonl").read_text().splitlines()) == 1


def test_a_log_that_cannot_be_written_is_one_line_on_the_servers_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"log.{os.getpid()}.jsonl").mkdir()
    engine = Engine([output([1], {0: [2]}, 0, True)])
    monkeypatch.setenv(VARIABLE, str(tmp_path / "log.jsonl"))

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await all_of(engine, "a")

    middleware = Log(app)
    for _ in range(3):
        asyncio.run(middleware(scope(engine), nothing, nothing))  # type: ignore[arg-type]
    middleware._writer.close()
    assert engine.ended == ["a"] * 3
    assert capsys.readouterr().err.count("cannot be written: Is a directory") == 1


def test_a_disk_that_is_slow_costs_records_and_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(tmp_path / "log.jsonl")
    writer._thread = SimpleNamespace(join=lambda _: None)  # type: ignore[assignment]
    record = SimpleNamespace(calls=[1])
    for _ in range(MOST_WAITING + 5):
        writer.add(record, 0.0)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("faster than they can be written") == 1


class Iterates:
    """An iterator of outputs that is no generator: it has no `aclose`."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = iter(outputs)

    def __aiter__(self) -> Iterates:
        return self

    async def __anext__(self) -> Any:
        for one in self.outputs:
            return one
        raise StopAsyncIteration


def test_an_engine_whose_outputs_are_no_generator_serves_as_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [output([1], {0: [4]}, 0, False), output([1], {0: [5]}, None, True)]
    seen: list[Any] = []

    async def work(client: Any) -> None:
        seen.extend([one async for one in client.generate({}, params("DELTA"), "a")])

    engine = SimpleNamespace(generate=lambda *_, **__: Iterates(outputs))
    (row,) = logged(tmp_path, monkeypatch, engine, work)
    assert seen == outputs and row["answer"] == [4, 5]


def test_an_engine_that_is_awaited_first_serves_as_without_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    async def generate(*_: Any, **__: Any) -> Iterates:
        return Iterates(["an output"])

    async def work(client: Any) -> None:
        seen.extend([one async for one in await client.generate({}, params("DELTA"), "a")])

    assert logged(tmp_path, monkeypatch, SimpleNamespace(generate=generate), work) == []
    assert seen == ["an output"]


@pytest.mark.parametrize(
    "value", [".", "..", "/", "", " ", "\udcff.jsonl", "x" * 300, "/dev/full", "a\x1b[31m/b"]
)
def test_any_name_of_the_log_loses_at_most_the_log(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, value)
    engine = Engine([output([1], {0: [2]}, 0, True)])

    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await all_of(engine, "a")

    middleware = Log(app)
    asyncio.run(middleware(scope(engine), nothing, nothing))  # type: ignore[arg-type]
    middleware._writer.close()
    assert engine.ended == ["a"]


def test_a_long_prompt_is_written_in_pieces_between_which_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, turns, texts = list(range(10 * PIECE + 5)), list[float](), list[int]()
    dumps = json.dumps

    def counted(value: Any) -> str:
        text = dumps(value)
        texts.append(len(text))
        return text

    monkeypatch.setattr(json, "dumps", counted)
    monkeypatch.setattr(time, "sleep", turns.append)
    engine = Engine([output(tokens, {0: [7]}, 2, True)])
    (row,) = logged(tmp_path, monkeypatch, engine, lambda e: all_of(e, "a"))
    assert row["prompt_token_ids"] == tokens and row["answer"] == [7]
    assert max(texts) < 1000 and turns.count(0) >= 2 * 11, "to write, and to free"


def test_vllm_imports_it_without_the_packages_of_the_command_line() -> None:
    code = "import sys, kvtune.servers.tap; print([m for m in sys.modules if m.partition('.')[0] in sys.argv[1:]])"
    heavy = ("typer", "rich", "msgspec", "httpx", "numpy", "zmq", "asyncio", "prometheus_client", "yaml")
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
