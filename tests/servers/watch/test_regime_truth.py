"""Loads that are bound by each regime, on the CPU engine and on a timed device: what `watch` says of them is true.

The truth is the scheduler's own count of what held requests back (tests/servers/watch/witness.py), and the device's
own time.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest

from kvtune.data.layout.model_config import shape_at_hand
from kvtune.data.layout.models import builtin, engine_defaults
from kvtune.lab.device.cost import StepCost
from kvtune.lab.device.settings import Timed, write_device
from kvtune.servers.watch.metrics import wanted
from kvtune.servers.watch.regime import Finding, Limits
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.watched import Watched
from tests.lab.engine.serving import environment, served, tokenizer_in
from tests.servers.watch.regimes import Engine, Load, Tried, Truth

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(3000)]

MODEL = "tiny-llama"
SEED = int(os.environ.get("SEED") or 66)
LOOK_S, WATCH_S = 0.5, 4.0

TEXT = Engine(64, 4096, 1200, longest=16384)
TWO_FIT = Engine(64, 2048, 140)
SLOW = Engine(64, 2048, 1200, step_us=0.0, token_us=8000.0)
EDGES = [
    (TEXT, [Load(12, 0, 1, words=2400)]),
    (TWO_FIT, [Load(20, 1500, 200)]),
    (replace(TWO_FIT, told=False), [Load(20, 1500, 200)]),
    (SLOW, [Load(12, 1900, 1, warm_s=19.0)]),
]
"""Loads at the edge of a regime: nothing ever runs at a look; looks show the state before a long step; no step ends."""


def draws() -> list[tuple[Engine, list[Load]]]:
    """Six engines with five loads each: 30 settings. What an engine's limits and its loads are is drawn."""
    draw = random.Random(SEED)

    def shuffled(*values: Any) -> list[Any]:
        return draw.sample(values, len(values))

    columns = (
        shuffled(4, 8, 16, 64, 64, 128),
        shuffled(256, 256, 512, 512, 1024, 2048),
        shuffled(80, 200, 200, 1200, 1200, 1200),
        shuffled(None, None, None, 0.0, 5_000.0, 30_000.0),
        shuffled(True, True, True, True, False, False),
    )
    made = []
    for seats, step_tokens, blocks, step_us, told in zip(*columns, strict=True):
        token_us = draw.choice([0.0, 60.0]) if step_us else 0.0
        engine = Engine(seats, max(step_tokens, seats), blocks, step_us, token_us, told)
        kinds = draw.sample(["nothing", "few", "seats", "long", "long answers", "streams"], 5)
        made.append((engine, [load(kind, draw, engine) for kind in kinds]))
    return made


def load(kind: str, draw: random.Random, engine: Engine) -> Load:
    few = draw.randint(1, 3)
    return {
        "nothing": Load(draw.choice([0, 1]), 100, 2, pause_s=draw.choice([2.0, 5.0])),
        "few": Load(few, draw.choice([50, 400]), draw.choice([20, 100])),
        "seats": Load(engine.seats + draw.randint(4, 20), draw.choice([20, 60]), draw.choice([30, 120])),
        "long": Load(draw.randint(6, 24), draw.choice([600, 1500, 1900]), draw.choice([1, 4])),
        "long answers": Load(draw.randint(8, 30), draw.choice([100, 500]), draw.choice([400, 1200])),
        "streams": Load(draw.choice([32, 64]), 20, draw.choice([200, 600]), stream=True),
    }[kind]


@contextmanager
def serving(folder: Path, engine: Engine) -> Iterator[tuple[str, Path]]:
    """The URL of a server with these limits, and the file of its witness."""
    witness = folder / "witness.jsonl"
    witness.touch()
    chosen = {**engine_defaults(MODEL), "max-model-len": str(engine.longest), "block-size": "32"}
    for unwanted in ("kv-cache-memory-bytes", "skip-tokenizer-init"):
        del chosen[unwanted]
    chosen |= {
        "num-gpu-blocks-override": str(engine.blocks),
        "max-num-seqs": str(engine.seats),
        "max-num-batched-tokens": str(engine.step_tokens),
        "served-model-name": MODEL,
        "tokenizer": str(tokenizer_in(folder)),
        "scheduler-cls": f"tests.servers.watch.witness.{'Witness' if engine.step_us is None else 'AsyncWitness'}",
    }
    flags = [word for name, value in chosen.items() for word in (f"--{name}", value) if word]
    variables = {**environment("stock", folder), "VLLM_CPU_KVCACHE_SPACE": "1", "WITNESS": str(witness)}
    variables["VLLM_SERVER_DEV_MODE"] = str(int(engine.told))
    if engine.step_us is None:
        variables["VLLM_PLUGINS"] = ""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(builtin(MODEL))]
    else:
        cost = StepCost(
            step_us=engine.step_us, prefill_token_us=engine.token_us, decode_us=0.0, kv_token_us=0.0
        )
        write_device(Timed(cost=cost, name="made"), folder)
        command = [sys.executable, "-m", "tests.servers.watch.timed_server", str(builtin(MODEL))]
    with served(folder, command, flags, variables) as base:
        if engine.told:  # the first answer takes vLLM seconds
            httpx.get(f"{base}/server_info", timeout=60).raise_for_status()
        yield base, witness


@contextmanager
def sending(base: str, load: Load, seed: int) -> Iterator[None]:
    """Clients that ask again and again, each in its own words, until the block ends."""
    stop = threading.Event()
    draw = random.Random(seed)
    text = " ".join(draw.choices(["time", "block", "cache", "prompt", "engine"], k=load.words))

    async def ask(client: aiohttp.ClientSession) -> None:
        while True:
            prompt = text or [10 + draw.randrange(400) for _ in range(load.prompt)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": load.output, "ignore_eos": True}
            body |= {"temperature": 0, "stream": load.stream, "detokenize": False}
            async with client.post(f"{base}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content.iter_any():
                    pass
            if load.pause_s:
                await asyncio.sleep(load.pause_s)

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            tasks = [asyncio.create_task(ask(client)) for _ in range(load.clients)]
            while not stop.is_set():
                await asyncio.sleep(0.02)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.2)  # the loop closes what was broken off
        failed.extend(error for error in ended if isinstance(error, Exception))

    failed: list[BaseException] = []
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


def truth_of(witness: Path, engine: Engine, load: Load, first: float, last: float) -> Truth:
    empty = waited = device = asked = 0.0
    held: dict[str, float] = {}
    preempted = 0
    at, requests, why, ran = first, 0, list[str](), 0.0
    for line in witness.read_text().splitlines():
        then, what, count, now_held, tokens, lost = json.loads(line)
        begin, end = max(at, first), min(then, last)
        if end > begin:
            empty += (end - begin) * (requests == 0)
            waited += (end - begin) * bool(why)
            asked += (end - begin) * requests
            for case in why:
                held[case] = held.get(case, 0.0) + end - begin
        inside = first <= then <= last
        if what == "schedule":
            why, ran = now_held, then
            preempted += lost * inside
            if inside and tokens and engine.step_us is not None:
                device += 1e-6 * (engine.step_us + engine.token_us * tokens)
        if what == "computed" and inside and engine.step_us is None:
            device += then - max(ran, first)
        at, requests = then, count
    if last > at:
        empty += (last - max(at, first)) * (requests == 0)
    whole = last - first
    busy = max(whole - empty, 1e-9)
    # The scheduler does not see what an API server still reads.
    share = asked / (whole * load.clients) if load.clients and not load.pause_s else 1.0
    shares = {case: seconds / waited for case, seconds in held.items()} if waited else {}
    return Truth(empty / whole, waited / whole, shares, preempted, min(1.0, device / busy), share)


def watched(base: str) -> tuple[Finding, Limits, list[tuple[float, str]]]:
    """What a watch finds, the limits that it knew, and the scrapes that it judged: times and texts."""
    server = Server(base)
    texts: list[tuple[float, str]] = []
    ask = server.client.ask

    def keeping(path: str, *rest: Any, **more: Any) -> bytes:
        answer = ask(path, *rest, **more)
        if path == "/metrics":
            texts.append((time.time(), wanted(answer.decode())))
        return answer

    server.client.ask = keeping  # type: ignore[method-assign]
    watching = Watched(server, shape_at_hand=shape_at_hand)
    try:
        watching.start()
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(LOOK_S)
            shot = watching.look()
        assert shot.regime is not None and watching.facts is not None
        return shot.regime, watching.facts.limits, texts
    finally:
        watching.close()


def settings(folder: Path, drawn: list[tuple[Engine, list[Load]]]) -> Iterator[tuple[Tried, Finding]]:
    for number, (engine, loads) in enumerate(drawn):
        place = folder / str(number)
        place.mkdir()
        with serving(place, engine) as (base, witness):
            for turn, load in enumerate(loads):
                with sending(base, load, seed=100 * number + turn):
                    time.sleep(load.warm_s)
                    found, limits, texts = watched(base)
                truth = truth_of(witness, engine, load, texts[0][0], texts[-1][0])
                yield Tried(engine, load, limits, texts, truth, found.regime), found
                time.sleep(1.0)


def try_all(folder: Path, name: str, drawn: list[tuple[Engine, list[Load]]]) -> list[Tried]:
    """Nothing that is said of these settings is wrong."""
    tried = []
    for each, found in settings(folder, drawn):
        print(each.engine, each.load, found.sentence, each.truth, sep="\n  ", flush=True)
        tried.append(each)
    if to := os.environ.get("RECORD_TO"):
        (Path(to) / f"{name}.xz").write_bytes(lzma.compress(msgspec.json.encode(tried), preset=9))
    assert not [each for each in tried if not each.truth.holds(each.found)]
    return tried


def test_a_named_regime_is_true_or_it_cannot_tell(tmp_path: Path) -> None:
    named = Counter(each.found for each in try_all(tmp_path, "regimes", draws()))
    assert named.total() == 30 and named["cannot tell"] < 20, named


def test_the_edges_of_the_regimes_are_told(tmp_path: Path) -> None:
    found = [each.found for each in try_all(tmp_path, "edges", EDGES)]
    assert found == ["host-bound", "pool-bound", "pool-bound", "cannot tell"]
