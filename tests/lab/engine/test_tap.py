"""A stock `vllm serve` behind a tap, asked by the openai and anthropic packages: answers and log are as without it.

The server notes what its engine is given and answers (engine_log.py): the engine's own account of the same requests.
"""

from __future__ import annotations

import json
import select
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from kvtune.data.layout.models import builtin
from kvtune.requests.log.requests_log import read_log
from tests.lab.engine.engine_log import VARIABLE, Front, Noted
from tests.lab.engine.serving import metric
from tests.lab.engine.test_watch import kvtune, stock
from tests.servers.tap.test_command import Tap, tap
from tests.tokenizers import make_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAME = "served"
MODELS = (
    "tiny-llama",
    pytest.param("tiny-gemma3", marks=pytest.mark.full),
    pytest.param("tiny-qwen3next", marks=pytest.mark.full),
)
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXT = " ".join(f"Rule {number}: answer question {number} in short sentences." for number in range(60))


@dataclass
class Served:
    base: str
    engine_log: Path

    def engine_rows(self) -> list[Noted]:
        """What the engine was given and answered, once it has ended, in the order of the requests."""
        rows = [Noted(**json.loads(line)) for line in self.engine_log.read_text().splitlines()]
        return sorted(rows, key=lambda row: row.t0)


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = folder / "model"
    shutil.copytree(builtin(request.param), model)
    make_tokenizer(model)
    with pytest.MonkeyPatch.context() as patch:
        log = folder / "engine.jsonl"
        log.touch()
        patch.setenv(VARIABLE, str(log))
        with stock(
            folder,
            request.param,
            served_from=model,
            served_model_name=NAME,
            middleware=f"{Front.__module__}.{Front.__name__}",
            enable_scale_out="",
            enable_auto_tool_choice="",
            tool_call_parser="hermes",
        ) as base:
            yield Served(base, log)


def asked(base: str) -> list[Any]:
    """Ask by both packages: plain and streamed, with tools, all APIs. Return what came, without ids and times."""
    import anthropic  # takes a second, of every worker

    came: list[Any] = []
    one = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    other = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    common: dict[str, Any] = {"model": NAME, "temperature": 0}
    said = [{"role": "system", "content": TEXT}, {"role": "user", "content": "How are you?"}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
    more: dict[str, Any] = {**common, "max_tokens": 12, "messages": said}
    answer = one.chat.completions.create(**more)
    came.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    came.append(one.chat.completions.create(**more, tools=tools).choices[0].message.content)
    streamed = one.chat.completions.create(**more, stream=True, stream_options={"include_usage": True})
    came.append("".join(part.choices[0].delta.content or "" for part in streamed if part.choices))
    came.append(one.completions.create(**common, prompt=TEXT, max_tokens=9).choices[0].text)
    parts = one.completions.create(**common, prompt=TEXT, max_tokens=9, stream=True)
    came.append("".join(part.choices[0].text for part in parts))
    came.append(one.responses.create(**common, input=TEXT, max_output_tokens=8).output_text)
    events = one.responses.create(**common, input=TEXT, max_output_tokens=8, stream=True)
    came.append(sorted({event.type for event in events}))
    system = [{"type": "text", "text": TEXT}]
    turns = [{"role": "user", "content": "How are you?"}]
    greedy = {"model": NAME, "extra_body": {"temperature": 0}}
    asks: dict[str, Any] = {**greedy, "max_tokens": 10, "system": system, "messages": turns}
    message = other.messages.create(**asks, tools=[{"name": "weather", "input_schema": TOOL}])
    came.append([getattr(part, "text", part.type) for part in message.content])
    with other.messages.stream(**asks) as stream:
        came.append("".join(stream.text_stream))
    one.close()
    other.close()
    return came


def until_events_come(served: Served, relayed: Tap) -> int:
    """Ask until a hit is by events; return how many requests that took. The tap reads the server's history first."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{relayed.port}/v1", api_key="none", max_retries=0)
    for number in range(1, 100):
        for _ in client.completions.create(
            model=NAME, prompt=f"Are {number} there?", max_tokens=1, stream=True
        ):
            pass
        if json.loads(relayed.lines(number)[-1])["hit_by"] == "events":
            client.close()
            return number
        time.sleep(0.2)
    raise AssertionError(relayed.err)


def test_answers_are_the_same_and_the_log_is_what_the_server_and_its_engine_counted(
    served: Served, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    direct = asked(served.base)
    before = len(served.engine_rows())
    assert len(direct) == 9
    with tap(served.base, "-o", str(log), "--json") as relayed:
        first = until_events_come(served, relayed)
        assert asked(f"http://127.0.0.1:{relayed.port}") == direct
        lines = [json.loads(line) for line in relayed.lines(first + 9)][first:]
    wait_for(lambda: len(served.engine_rows()) == before + first + 9)
    engine, rows = served.engine_rows()[before + first :], list(read_log(log))[first:]
    assert [line["not_logged"] for line in lines] == [""] * 9
    assert [list(row.prompt) for row in rows] == [row.prompt for row in engine]
    for line, row, real in zip(lines, rows, engine, strict=True):
        assert line["client"] == {"/v1/messages": "anthropic-python"}.get(line["api"], "openai-python")
        assert (line["prompt_tokens"], line["hit_tokens"]) == (len(row.prompt), row.hit)
        assert row.hit == real.hit, "by usage, or by events, it is the engine's"
        assert sum(line["misses"].values()) == line["prompt_tokens"] - line["hit_tokens"]
        assert row.output_tokens in (len(real.answer), 0), "of a stream without usage"
        assert row.session == real.session == row.name
    assert {line["hit_by"] for line in lines} == {"usage", "events"}
    assert json.loads(kvtune("explain-log", str(log), "--bounds-only", "--json"))


def test_a_client_that_breaks_off_stops_the_server_and_is_in_both_logs(
    served: Served, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    before = len(served.engine_rows())
    with tap(served.base, "-o", str(log)) as relayed:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{relayed.port}/v1", api_key="none", max_retries=0)
        tries = 0

        def left() -> bool:
            """Whether the last try ended early at both ends: the server may have been faster."""
            wait_for(lambda: len(served.engine_rows()) == before + tries)
            whole = len(served.engine_rows()[-1].answer) == 2900
            return "the client left" in line_of(relayed, tries) and not whole

        while not tries or not left():
            tries += 1
            prompt = f"{tries} {TEXT}"
            stream = client.completions.create(
                model=NAME, prompt=prompt, max_tokens=2900, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            stream.close()
            assert tries < 10, relayed.out
        client.close()
        wait_for(lambda: running(served.base) == 0)
        streams = tries
        while tries == streams or "the client left" not in line_of(relayed, tries):
            tries += 1
            assert tries - streams < 10, relayed.out
            plain = {"model": NAME, "prompt": f"B {tries} {TEXT}", "max_tokens": 2900, "ignore_eos": True}
            leaves_unanswered(relayed.port, plain, lambda: running(served.base) > 0)
            wait_for(lambda: running(served.base) == 0)
    wait_for(lambda: len(served.engine_rows()) == before + tries)
    streamed = served.engine_rows()[before + streams - 1]
    assert 0 < len(streamed.answer) < 2900


@pytest.mark.full
def test_equal_prompts_at_once_each_have_the_hit_that_the_engine_counted(
    served: Served, tmp_path: Path
) -> None:
    before = len(served.engine_rows())
    with tap(served.base, "--no-log", "--json") as relayed:
        first = until_events_come(served, relayed)

        def ask(number: int) -> None:
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{relayed.port}/v1", api_key="none", max_retries=0
            )
            prompt = f"{number // 6} {TEXT}"
            for _ in client.completions.create(model=NAME, prompt=prompt, max_tokens=4, stream=True):
                pass
            client.close()

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(ask, range(12)))
        lines = {line["session_id"]: line for line in map(json.loads, relayed.lines(first + 12)[first:])}
    wait_for(lambda: len(served.engine_rows()) == before + first + 12)
    engine = {row.session: row for row in served.engine_rows()[before + first :]}
    assert {name: line["hit_tokens"] for name, line in lines.items()} == {
        name: row.hit for name, row in engine.items()
    }
    assert {line["hit_by"] for line in lines.values()} == {"events"}


def leaves_unanswered(port: int, body: dict[str, Any], runs: Callable[[], bool]) -> None:
    """Send a request, and close the connection before the first byte of an answer, once it `runs`."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        wait_for(lambda: runs() or bool(select.select([client], [], [], 0)[0]))


def line_of(relayed: Tap, number: int) -> str:
    """Wait for a request's line."""
    relayed.until(lambda: any(line.startswith(f"#{number} ") for line in relayed.out))
    return next(line for line in relayed.out if line.startswith(f"#{number} "))


def wait_for(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def running(base: str) -> float:
    return metric(base, "vllm:num_requests_running") + metric(base, "vllm:num_requests_waiting")
