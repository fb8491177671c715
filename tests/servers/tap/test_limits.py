"""What one request may cost the analyst: time, memory, and what stays of it. What is beyond is said; nothing ends."""

from __future__ import annotations

import gzip
import json
import socket
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.servers.tap import judging, rendering
from kvtune.servers.tap.analyst import Analyst
from kvtune.servers.tap.limits import Remembered
from kvtune.servers.tap.messages import Ended, Sent, Settings
from tests.servers.tap.stand_in import vllm

API = "/v1/completions"
ANSWER = (
    b'{"usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}}'
)


@pytest.fixture
def analyst(tmp_path: Path) -> Iterator[Analyst]:
    with vllm() as server:
        made = Analyst(Settings(server.url, {}, False, "t-", str(tmp_path / "log.jsonl"), False, True))
        yield made
        made.close()


def asked(analyst: Analyst, number: int, body: object, *, packed: bool = False, api: str = API) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    encoding = "gzip" if packed else ""
    content = gzip.compress(content, 1) if packed else content
    analyst._guarded(lambda: analyst.take(Sent(number, api, "", "c", 1.0, content, encoding)))


def told(analyst: Analyst, number: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What is printed of a request at its end."""
    capsys.readouterr()
    analyst.take(Ended(number, 200, "application/json", 1.0, 2.0, "whole", ANSWER))
    analyst.finish()
    (line,) = capsys.readouterr().out.splitlines()
    return dict(json.loads(line))


def nested(depth: int) -> dict[str, Any]:
    inner: Any = "y"
    for _ in range(depth):
        inner = {"a": inner}
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "x": inner}]}]}


BODIES = {
    "depth": (nested(150), False, "nested more than 100 deep"),
    "width": (b'{"prompt":[1,2,3],"x":[' + b"[]," * 2_000_000 + b"1]}", False, "of memory, and 256 MiB are allowed"),
    "ratio": (b'{"prompt":[1,2,3],"x":"' + b"a" * (16 << 20) + b'"}', True, "MiB, compressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_body_beyond_its_budget_is_not_analysed_and_the_next_one_is(
    name: str, analyst: Analyst, capsys: pytest.CaptureFixture[str]
) -> None:
    body, packed, why = BODIES[name]
    asked(analyst, 1, body, packed=packed)
    asked(analyst, 2, {"prompt": [1, 2, 3]})
    line = told(analyst, 1, capsys)
    assert why in line["not_analysed"] and line["not_logged"] == line["not_analysed"]
    assert told(analyst, 2, capsys)["logged"]
    assert analyst.remembered.held_bytes < 1 << 20


def test_what_stays_of_requests_is_flat_and_the_oldest_goes_first(
    analyst: Analyst, capsys: pytest.CaptureFixture[str]
) -> None:
    analyst.remembered = Remembered(analyst._forget, 4 << 20)
    held = []
    tracemalloc.start()
    for number in range(1, 61):
        text = f"{number} " + "word " * 40_000
        asked(analyst, number, {"messages": [{"role": "user", "content": text}], "prompt": [number, 2, 3]})
        if number != 7:
            told(analyst, number, capsys)
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert analyst.remembered.held_bytes <= 4 << 20
    assert max(held[30:]) - min(held[30:]) < 2 << 20, "of 6 MB that came"
    kept = {one.number for one in analyst.judging._recent.values()}
    assert 60 in kept and not kept & set(range(40)) and not analyst._shown.keys() & set(range(40))
    late = told(analyst, 7, capsys)
    assert "later requests took its place" in late["not_analysed"] and not late["logged"]


def test_work_beyond_its_time_is_left_and_the_request_is_in_the_log(
    analyst: Analyst, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: object) -> Any:
        while True:
            pass

    monkeypatch.setattr(judging, "REQUEST_S", 0.05)
    asked(analyst, 1, {"prompt": [1, 2, 3], "user": "a"})
    assert told(analyst, 1, capsys)["not_analysed"] == ""
    for name in ("edits", "_messages"):
        with monkeypatch.context() as patched:
            patched.setattr(judging, name, endless)
            asked(analyst, 2, {"prompt": [1, 2, 3], "user": "b"})
            line = told(analyst, 2, capsys)
        assert line["not_analysed"] == "it takes more than 0.05 s" and line["logged"] and line["misses"]
    asked(analyst, 3, {"prompt": [1, 2, 3]})
    assert told(analyst, 3, capsys)["not_analysed"] == ""


def test_no_memory_ends_one_request_and_what_was_remembered(
    analyst: Analyst, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(analyst, 1, {"prompt": [1, 2, 3]})
    told(analyst, 1, capsys)

    def full(*_: object) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(analyst.rendering, "prompts", full)
        asked(analyst, 2, {"prompt": [1, 2, 3]})
    assert "no memory was left" in capsys.readouterr().err
    assert not analyst.judging._recent and not analyst._shown and not analyst.remembered.held_bytes
    asked(analyst, 3, {"prompt": [1, 2, 3]})
    assert told(analyst, 3, capsys)["logged"]


def test_a_server_that_does_not_render_in_time_holds_back_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = Settings(f"http://127.0.0.1:{silent.getsockname()[1]}", {}, False, "t-", "", False, True)
        made = rendering.Rendering(settings)
        made._by._model = "m"  # type: ignore[attr-defined]
        with pytest.raises(KvtuneError, match="did not answer within"):
            made.prompts(API, {"prompt": "Hi"})
        for _ in range(3):
            with pytest.raises(KvtuneError, match="is asked again in a while"):
                made.prompts(API, {"prompt": "Hi"})
        assert made.prompts(API, {"prompt": [1, 2]}) == [[1, 2]]
        silent.settimeout(0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
        made.close()
