"""Closed circles: what `explain` promises for a stock server that it did not start, beside what that server measures.

`python tests/tools/bench/circles.py [--models ..] [--circles 1] [--measured 2] [--keep DIR]`. A circle: a stock server
with a small pool computes a load while `kvtune record` records it; `explain --trace` replays the recording, with
remedies; then a fresh stock server computes the same load with each of the best remedies that are vLLM flags, and once
from a client that mends its prompts. It prints a line each: run, its replay, promised, measured. Times of a busy
machine move the hits of small pools: the last line says how busy it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import httpx

from kvtune.analysis.replayed import flags_only, helping
from kvtune.engine.models import builtin, engine_defaults
from kvtune.run.extras import Remedy
from kvtune.run.file import read_run
from tests.engine.serving import served
from tests.engine.test_watch import STOCK, watching

POOLS = {"tiny-llama": 1000, "tiny-gemma3": 1000, "tiny-qwen3next": 160}
DOCUMENTS, CHOSEN, DOCUMENT = 16, 5, 480
SECONDS = 18.0


@dataclass
class Client:
    """Sends a seeded load of token ids: conversations, agents, documents in any order, a flood. Keeps a log.

    `mended`: what changes is sent last, and documents in one order.
    """

    base: str
    model: str
    seed: int
    mended: bool = False
    log: list[dict[str, object]] = field(default_factory=list)

    def words(self, draw: random.Random, count: int) -> list[int]:
        return [10 + draw.randrange(4000) for _ in range(count)]

    async def run(self) -> None:
        draw = random.Random(self.seed)
        system, tools = self.words(draw, 700), self.words(draw, 900)
        documents = [self.words(draw, DOCUMENT) for _ in range(DOCUMENTS)]
        # Quiet sockets: no limit, as many as are in flight.
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as http:
            jobs = [
                self.conversation(http, f"session {n}", system, random.Random(f"{self.seed} s {n}"), 6, n < 4)
                for n in range(20)
            ]
            jobs += [
                self.conversation(http, f"agent {n}", tools, random.Random(f"{self.seed} a {n}"), 2, False)
                for n in range(12)
            ]
            for n in range(80):
                chosen = draw.sample(range(DOCUMENTS), CHOSEN)
                chosen = sorted(chosen) if self.mended else chosen
                prompt = [
                    *system[:100],
                    *(t for one in chosen for t in documents[one]),
                    *self.words(draw, 30),
                ]
                jobs.append(self.later(http, f"documents {n}", draw.uniform(0, SECONDS), prompt, 16))
            for n in range(40):
                at = draw.uniform(0.4 * SECONDS, 0.5 * SECONDS)
                jobs.append(self.later(http, f"flood {n}", at, self.words(draw, 1500), 4))
            await asyncio.gather(*jobs)

    async def conversation(
        self,
        http: httpx.AsyncClient,
        name: str,
        system: Sequence[int],
        draw: random.Random,
        turns: int,
        stamped: bool,
    ) -> None:
        await asyncio.sleep(draw.uniform(0, 0.6 * SECONDS))
        text = list[int]()
        for turn in range(turns):
            stamp, asked = self.words(draw, 8) if stamped else [], self.words(draw, draw.randrange(50, 120))
            head = [*system[:12], *([] if self.mended else stamp), *system[12:]]
            prompt = [*head, *text, *asked, *(stamp if self.mended else [])]
            answer = await self.send(http, f"{name}.{turn}", prompt, 24)
            text += [*asked, *answer]
            await asyncio.sleep(draw.uniform(0.5, 2.0))

    async def later(
        self, http: httpx.AsyncClient, name: str, after: float, prompt: list[int], output: int
    ) -> None:
        await asyncio.sleep(after)
        await self.send(http, name, prompt, output)

    async def send(self, http: httpx.AsyncClient, name: str, prompt: list[int], output: int) -> list[int]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        answer: list[int] = []
        t0, first, hit = time.time(), 0.0, 0
        async with http.stream("POST", f"{self.base}/v1/completions", json=body) as got:
            assert got.status_code == 200, await got.aread()
            async for line in got.aiter_lines():
                assert "error" not in line[:20], line
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    first = first or time.time()
                    answer += choice.get("token_ids") or []
                if event.get("usage"):
                    hit = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        row = {"name": name, "prompt": prompt, "answer": answer, "t0": t0, "t1": time.time(), "hit": hit}
        self.log.append(row | {"ttft": first - t0})
        return answer


@contextmanager
def stock(folder: Path, model: str, changed: Mapping[str, str | None]) -> Iterator[str]:
    """`vllm serve` with KV events and nothing of kvtune's, with these flags changed."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r"}
    chosen: dict[str, str | None] = {**engine_defaults(model), "load-format": "dummy"}
    del chosen["kv-cache-memory-bytes"]
    chosen |= {"max-model-len": "8192", "num-gpu-blocks-override": str(POOLS[model])}
    chosen |= {"block-size": "32"} if model != "tiny-qwen3next" else {}
    chosen |= {
        "kv-events-config": json.dumps(events),
        "model": str(builtin(model)),
        "served-model-name": model,
    }
    chosen |= {"enable-prompt-tokens-details": "", **changed}
    flags = [w for name, value in chosen.items() if value is not None for w in (f"--{name}", value) if w]
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    with served(folder, command, flags, STOCK) as base:
        yield base


class NotMeasured(Exception):
    """The server ended under the load; the end of its log."""


@dataclass
class Circle:
    model: str
    seed: int
    folder: Path

    def hits(self, name: str, changed: Mapping[str, str | None], *, mended: bool = False) -> float:
        """Measure a fresh server's hits in percent of the prompt tokens; keep a recording and its log."""
        log, run = self.folder / f"{name}.jsonl", self.folder / f"{name}.kvrun"
        with (
            tempfile.TemporaryDirectory(dir="/tmp") as short,
            stock(Path(short), self.model, changed) as base,
        ):
            client = Client(base, self.model, self.seed, mended)
            try:
                with watching("record", base, "-o", str(run), "--requests", str(log)):
                    asyncio.run(client.run())
                    log.write_text("".join(json.dumps(row) + "\n" for row in client.log))
            except httpx.HTTPError as error:
                (said,) = Path(short).glob("serve-*.log")
                raise NotMeasured(f"{error!r}: {said.read_text(errors='replace')[-1500:]}") from error
        asked = sum(len(row["prompt"]) for row in client.log)  # type: ignore[arg-type]
        return 100 * sum(row["hit"] for row in client.log) / asked  # type: ignore[misc]

    def explained(self, tries: int) -> Mapping[str, object]:
        words = ["explain", str(self.folder / "base.kvrun"), "--trace", str(self.folder / "base.jsonl")]
        words += ["--model", self.model, "--tries", str(tries), "--save", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "kvtune", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        (self.folder / "explained.json").write_text(done.stdout)
        found: Mapping[str, object] = json.loads(done.stdout)
        return found


def measurable(one: Remedy) -> bool:
    """Whether a stock server on a CPU takes the setting: its own offloading is for GPUs."""
    return flags_only(one) and bool(one.flags) and "kv-offloading-size" not in one.flags


def circle(model: str, seed: int, folder: Path, tries: int, measured: int) -> None:
    one = Circle(model, seed, folder)
    run = one.hits("base", {})
    found = one.explained(tries)
    told = read_run(folder / "base.kvrun").header.extra.replayed
    assert told is not None
    whole = told.query_tokens
    replay = 100 * told.hit_tokens / whole
    say(model, "as recorded", run, replay, replay, run)
    listed = helping(told)
    for number, remedy in enumerate([each for each in listed if measurable(each)][:measured]):
        promised = 100 * remedy.hit_tokens / whole
        try:
            say(model, remedy.change, run, replay, promised, one.hits(f"remedy{number}", remedy.flags))
        except NotMeasured as error:
            print(f"{model:<15} {remedy.change}: promised {promised:.1f}, not measured: {error}", flush=True)
    texts = found.get("texts")
    if isinstance(texts, dict) and texts.get("mended_query_tokens"):
        promised = 100 * texts["mended_hit_tokens"] / texts["mended_query_tokens"]
        say(
            model,
            "a client that mends its prompts",
            run,
            replay,
            promised,
            one.hits("mended", {}, mended=True),
        )


def say(model: str, what: str, run: float, replay: float, promised: float, measured: float) -> None:
    wrong = " WRONG SIGN" if (promised - replay) * (measured - run) < 0 else ""
    print(
        f"{model:<15} {what:<60} run {run:5.1f} replay {replay:5.1f} promised {promised:5.1f} measured {measured:5.1f} "
        f"points {promised - replay:+5.1f} / {measured - run:+5.1f}{wrong}",
        flush=True,
    )


def main() -> None:
    reader = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reader.add_argument("--models", default=",".join(POOLS))
    reader.add_argument("--circles", type=int, default=1)
    reader.add_argument("--measured", type=int, default=2, help="remedies that are measured, of each circle")
    reader.add_argument("--tries", type=int, default=12)
    reader.add_argument("--keep", type=Path, help="a folder for recordings, logs and explanations")
    asked = reader.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, asked.circles + 1):
            for model in asked.models.split(","):
                folder = (asked.keep or Path(name)) / f"{model}-{seed}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                circle(model, seed, folder, asked.tries, asked.measured)
                print(
                    f"  load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True
                )


if __name__ == "__main__":
    main()
