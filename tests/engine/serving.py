"""`vllm serve` in a subprocess and an HTTP client that streams, for tests and benchmarks. Imports no vLLM.

`python serving.py BASE STREAMS TOKENS` is a client that opens streams, says so once each has begun, and reads on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

START_S = 300.0
PID = "x-server-pid"


def tokenizer_in(folder: Path) -> Path:
    """A byte-level tokenizer, trained on this repository's prose."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train([str(path) for path in sorted(Path(__file__).parents[2].glob("*.md"))], vocab_size=500)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    fast.save_pretrained(str(folder))
    return folder


def flags(model: str, name: str, tokenizer: Path, servers: int) -> list[str]:
    """Of `vllm serve`, for a built-in model that has text, served by this name, with a census."""
    from kvtune.engine.models import engine_defaults

    chosen = {**engine_defaults(model), "tokenizer": str(tokenizer), "served-model-name": name}
    chosen |= {"api-server-count": str(servers), "middleware": "tests.engine.census.Census"}
    del chosen["skip-tokenizer-init"]
    return [word for name, value in chosen.items() for word in (f"--{name}", value) if word]


def environment(core: str, folder: Path) -> dict[str, str]:
    """Of `vllm serve` with this core, and with the device in `folder`."""
    return {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "KVTUNE_CORE": core,
        "KVTUNE_SET": "",
        "KVTUNE_RECIPE": "",
        "KVTUNE_STRICT": "1",
        "KVTUNE_RUN_DIR": str(folder),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def served(
    folder: Path,
    command: Sequence[str],
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Starts the command with vLLM's flags, and yields the server's URL. `port` 0: any free port."""
    port = port or free_port()
    log = (folder / f"serve-{port}.log").open("wb")
    process = subprocess.Popen(
        [*command, "--port", str(port), *flags],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, base, Path(log.name))
        yield base
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_until_up(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")


def metric(base: str, name: str) -> float:
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    named = (f"{name} ", f"{name}{{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(named))


@dataclass(slots=True)
class Streamed:
    """What a client has read of one stream."""

    pid: int = 0
    chunks: list[str] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.chunks)


@asynccontextmanager
async def stream(
    base: str, body: Mapping[str, object], buffer: int = 0
) -> AsyncIterator[AsyncIterator[Streamed]]:
    """An open SSE stream: what was read so far, after each event. `buffer`: bytes that the client's socket takes."""
    import httpx

    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)] if buffer else None
    transport = httpx.AsyncHTTPTransport(verify=False, socket_options=options)
    options_of_stream = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "stream": True, "stream_options": options_of_stream}
    async with (
        httpx.AsyncClient(transport=transport, timeout=None) as client,
        client.stream("POST", f"{base}/v1/completions", json=asked) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async with aclosing(_events(answer.aiter_lines(), Streamed(int(answer.headers[PID])))) as events:
            yield events


async def _events(lines: AsyncIterator[str], seen: Streamed) -> AsyncGenerator[Streamed]:
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            seen.done = True
        else:
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                seen.chunks.append(choice["text"])
                seen.finish = choice["finish_reason"] or seen.finish
            if event.get("usage"):
                seen.tokens = event["usage"]["completion_tokens"]
        yield seen


async def read_all(base: str, body: Mapping[str, object]) -> Streamed:
    async with stream(base, body) as events:
        return await last(events)


async def last(events: AsyncIterator[Streamed]) -> Streamed:
    """What was read when the stream ended."""
    return [seen async for seen in events][-1]


def asking(number: int, tokens: int, model: str) -> dict[str, object]:
    """A completion of so many tokens, at no temperature; another prompt for each number."""
    prompt = [10 + (7 * number + at) % 400 for at in range(16 + number % 5)]
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def _client(base: str, count: int, tokens: int, model: str) -> None:
    begun = 0

    async def one(number: int) -> None:
        nonlocal begun
        async with stream(base, asking(number, tokens, model)) as events:
            async for seen in events:
                if len(seen.chunks) == 3:
                    begun += 1
                    if begun == count:
                        print("streaming", flush=True)

    await asyncio.gather(*map(one, range(count)))


if __name__ == "__main__":
    asyncio.run(_client(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
