"""A stock `vllm serve`, without any plugin, watched from outside: in a real terminal, by scripts, over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtune.data.layout.models import builtin, engine_defaults
from kvtune.data.run.file import read_run
from tests.lab.engine.serving import free_port, metric, served
from tests.servers.watch.load import Load, send_all, write
from tests.servers.watch.played import alone
from tests.servers.watch.traffic import Traffic
from tests.tokenizers import make_tokenizer

LOOKS = 1500
"""At a terminal, five to the second: what has not come by then hangs."""
pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]

POOLS = {"tiny-llama": 200, "tiny-gemma3": 400, "tiny-qwen3next": 400}
ROOT = Path(__file__).parents[3]
STOCK = {
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
KVTUNE = (sys.executable, "-m", "kvtune")


@contextmanager
def stock(
    folder: Path, model: str, port: int = 0, served_from: Path | None = None, **more: str
) -> Iterator[str]:
    """`vllm serve` with KV events, and nothing of kvtune's. `served_from`: a folder with a tokenizer, too.

    `more`: further flags by name, with `_` for `-`.
    """
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {
        "endpoint": f"tcp://*:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    chosen = {**engine_defaults(model), "load-format": "dummy", "max-model-len": "4096", "block-size": "32"}
    del chosen["kv-cache-memory-bytes"]
    chosen |= {"num-gpu-blocks-override": str(POOLS[model]), "kv-events-config": json.dumps(events)}
    if served_from is not None:
        del chosen["skip-tokenizer-init"]
    chosen |= {
        "model": str(served_from or builtin(model)),
        "served-model-name": model,
        "enable-prompt-tokens-details": "",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    flags = [word for name, value in chosen.items() for word in (f"--{name}", value) if word]
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    with served(folder, command, flags, STOCK, port) as base:
        yield base


def kvtune(*words: str) -> str:
    done = subprocess.run([*KVTUNE, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Ended:
    """What a command printed."""

    out: str = ""
    said: str = ""


@contextmanager
def watching(*words: str) -> Iterator[Ended]:
    """A command that records a server while the block sends load; it is ended with the block, and must succeed."""
    ended = Ended()
    command = [*KVTUNE, *words, "--seconds", "1000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        try:
            assert child.stderr is not None and "recording" in child.stderr.readline()
            time.sleep(2)  # its first look comes before the load
            yield ended
            time.sleep(2)
            child.terminate()
            ended.out, ended.said = child.communicate()
        finally:
            child.kill()
    assert child.returncode == 0, ended.said


@pytest.mark.parametrize("model", POOLS)
def test_what_can_hit_is_what_hits(tmp_path: Path, model: str) -> None:
    """The unit of hits, and at which visit a shared prefix hits: as `watch` says before the first request."""
    with stock(tmp_path, model) as base:
        said = json.loads(kvtune("watch", base, "--json", "--seconds", "0.5"))["possible"]
        unit = said["unit_tokens"]

        def hit(words: list[int]) -> int:
            body = {"model": model, "prompt": words, "max_tokens": 1, "temperature": 0}
            usage = httpx.post(f"{base}/v1/completions", json=body, timeout=120).json()["usage"]
            return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        def text(word: int, length: int) -> list[int]:
            return [10 + (word * number) % 400 for number in range(1, length + 1)]

        short, longer = text(7, unit), text(11, unit + 1)
        assert [hit(short), hit(short)] == [0, 0] and [hit(longer), hit(longer)] == [0, unit]
        shared = text(13, 4 * max(unit, 160))
        visits = [hit([*shared, *text(word, 2 * unit)]) for word in (17, 19, 23)]
    second = bool(said["kept_at_ends"]) is False
    assert said["exact"] and [bool(tokens) for tokens in visits] == [False, second, True], (said, visits)


@pytest.mark.parametrize("model", POOLS)
def test_each_request_is_accounted_for_and_its_replay_hits_the_same(tmp_path: Path, model: str) -> None:
    log, run = tmp_path / "log.jsonl", tmp_path / "server.kvrun"
    with stock(tmp_path, model) as base:
        with watching("record", base, "-o", str(run), "--requests", str(log)):
            write(asyncio.run(send_all(base, model, Load(1))), log)
        shot = json.loads(kvtune("watch", base, "--json"))
        queries, hits = (metric(base, f"vllm:prefix_cache_{kind}_total") for kind in ("queries", "hits"))
    whole = shot["periods"]["since start"]
    assert (whole["query_tokens"], whole["hit_tokens"]) == (queries, hits) and shot["events"]["complete"]
    assert sum(whole["misses"].values()) == queries - hits
    server = read_run(run).header.extra.server
    assert server is not None and (server.logged, server.reported, server.agree) == (51, 51, 51)
    explained = json.loads(
        kvtune("explain", str(run), "--trace", str(log), "--model", model, "--tries", "0", "--json")
    )
    # 14 requests at once may be batched in another order by the replay.
    assert abs(explained["prefix_cache"]["hit_tokens"] - hits) <= 0.01 * queries
    # Three requests change a token of a prefix: server's account and replay know what stands after it.
    recorded = read_run(run).header.extra.misses["diverged"]
    assert recorded == explained["prefix_cache"]["misses"]["diverged"] == 399 + 392 + 385
    assert sum(group["tokens_after"] for group in explained["texts"]["groups"]) == recorded


@pytest.mark.parametrize(
    ("model", "scale", "more"),
    [
        ("tiny-llama", 1, {"num_gpu_blocks_override": "300"}),
        ("tiny-gemma3", 1, {"num_gpu_blocks_override": "900"}),
        ("tiny-qwen3next", 3, {"num_gpu_blocks_override": "120"}),
    ],
)
def test_long_and_dirty_traffic_is_accounted_for_to_the_token(
    tmp_path: Path, model: str, scale: int, more: dict[str, str]
) -> None:
    """Sessions, agents, documents, floods, chunks, salts, aborts and a reset; the client's `usage` is the truth."""
    log, run = tmp_path / "log.jsonl", tmp_path / "server.kvrun"
    with stock(tmp_path, model, max_num_batched_tokens="1024", **more) as base:
        with watching("record", base, "-o", str(run), "--requests", str(log)):
            sent = asyncio.run(Traffic(base, model, scale=scale).run())
            answered = [one for one in sent if one.hit >= 0]
            rows = ({**asdict(one), "name": one.kind, "cache_salt": one.salt} for one in answered)
            log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        shot = json.loads(kvtune("watch", base, "--json"))
    hits = sum(one.hit for one in answered)
    recorded = read_run(run)
    server = recorded.header.extra.server
    assert server is not None and server.complete and server.resets == 1 and server.parts == []
    assert server.logged == server.reported == server.agree == len(answered)
    assert server.hit_tokens == hits == recorded.table("requests")["hit_tokens"].sum()
    assert sum(server.misses.values()) == server.query_tokens - hits
    assert not server.misses.get("unknown") and server.misses["reset"] and server.misses["other_salt"]
    log_says = recorded.header.extra.misses
    for cause in ("evicted", "not_retained", "reset"):
        assert server.misses.get(cause, 0) == log_says.get(cause, 0), cause
    whole = shot["periods"]["since start"]
    assert whole["hit_tokens"] == hits and sum(whole["misses"].values()) == whole["query_tokens"] - hits


@pytest.mark.parametrize(
    ("model", "more", "names"),
    [
        ("tiny-llama", {"api_server_count": "2"}, ["stored_twice"]),
        ("tiny-gemma3", {"data_parallel_size": "2"}, ["stored_twice", "sparse_groups"]),
        ("tiny-qwen3next", {}, ["stored_twice", "sparse_groups"]),
        # The part's parent is the boundary before it, which no event names.
        (
            "tiny-qwen3next",
            {"prefix_match_unit": "32"},
            ["orphans", "stored_twice", "sparse_groups"],
        ),
    ],
)
def test_the_audit_finds_what_vllm_does_by_design(
    tmp_path: Path, model: str, more: dict[str, str], names: list[str]
) -> None:
    with stock(tmp_path, model, **more) as base:
        asyncio.run(send_all(base, model, Load(1)))
        words = [*KVTUNE, "watch", base, "--audit", "--seconds", "2", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and answer["complete"], done.stderr
    assert [each["name"] for each in answer["findings"]] == names


def chats(base: str) -> list[dict[str, Any]]:
    """Chats and text that share a system prompt, as a client logs them: bodies and answers, without token ids."""
    system = {
        "role": "system",
        "content": "You are a helpful assistant. " * 12 + "Time: 2026-11-26T12:00:00Z",
    }
    later = {**system, "content": system["content"].replace("12:00", "13:00")}
    tool = {"name": "get_weather", "description": "The weather of a city", "parameters": {"type": "object"}}
    tools = {"tools": [{"type": "function", "function": tool}], "tool_choice": "none"}
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    rows: list[dict[str, Any]] = []

    def ask(kind: str, **body: Any) -> str:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        sent = {"model": "tiny-llama", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
        t0 = time.time()
        answer = httpx.post(f"{base}{path}", json=sent, timeout=None)
        t1 = time.time()
        assert answer.status_code == 200, answer.text
        response = {"status_code": 200, "body": answer.json()}
        rows.append({"custom_id": kind, "url": path, "body": sent, "response": response, "t0": t0, "t1": t1})
        choice = answer.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    turns: list[dict[str, str]] = [system]
    for number in range(4):
        turns.append({"role": "user", "content": f"Question {number}: is it cold in Paris? " * 3})
        turns.append({"role": "assistant", "content": ask("turn", messages=list(turns))})
    for question in ("And in Rome?", "And in Oslo?"):
        asked = {"role": "user", "content": question * 5}
        ask("later", messages=[later, asked])
        ask("tools", messages=[system, asked], **tools)
        ask("quiet", messages=[system, asked], **quiet)
        ask("text", prompt=f"{system['content']} {question}")
    return rows


def test_a_log_of_chats_has_its_ids_from_the_servers_tokenizer(tmp_path: Path) -> None:
    model, log = tmp_path / "model", tmp_path / "log.jsonl"
    shutil.copytree(builtin("tiny-llama"), model)
    make_tokenizer(model)
    with stock(tmp_path, "tiny-llama", served_from=model) as base:
        with watching("record", base, "-o", str(tmp_path / "a.kvrun"), "--requests", str(log)) as recording:
            rows = chats(base)
            log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = recording.said
        out = kvtune("explain", str(tmp_path / "a.kvrun"), "--json")
        shown = kvtune("watch", base, "--once", "--with-text")
    server, usages = json.loads(out), [row["response"]["body"]["usage"] for row in rows]
    assert "left out" not in said and len(rows) == 12
    assert (server["logged"], server["reported"], server["agree"]) == (12, 12, 12)
    assert server["query_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    hits = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for usage in usages)
    assert server["hit_tokens"] == hits > 0.3 * server["query_tokens"]
    assert "You are a" in shown.replace("<|im_start|>system", "")


class Pane:
    """A real terminal, by tmux."""

    def __init__(self, name: str) -> None:
        self._name = name

    def tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._name, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def text(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "w")

    def until(self, holds: Callable[[str], bool]) -> str:
        for _ in range(LOOKS):
            if holds(text := self.text()):
                return text
            time.sleep(0.2)
        pytest.fail(f"it never came; the terminal shows\n{text}")


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Pane]:
    made = Pane(f"kvtune-{os.getpid()}")
    yield made
    subprocess.run(["tmux", "-L", made._name, "kill-server"], capture_output=True, check=False)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_terminal_under_load_at_a_resize_and_over_a_restart(tmp_path: Path, pane: Pane) -> None:
    port = free_port()
    with stock(tmp_path, "tiny-llama", port) as base:
        command = (
            f"cd {ROOT} && NO_COLOR=1 {sys.executable} -m kvtune watch {base}; echo ended $?; sleep 1000"
        )
        pane.tmux("new-session", "-d", "-s", "w", "-x", "80", "-y", "24", command)
        pane.until(lambda text: "prefix cache" in text)
        asyncio.run(send_all(base, "tiny-llama", Load(1)))
        shown = pane.until(lambda text: "never seen before" in text and "differs at token" in text)
        assert all(len(line) <= 80 for line in shown.splitlines())
        assert "preempted" in shown and "evicted" in shown and "q quit" in shown
        pane.tmux("resize-window", "-t", "w", "-x", "60", "-y", "16")
        pane.until(lambda text: "q quit" in text.splitlines()[-1] and len(text.splitlines()) <= 16)
        pane.tmux("send-keys", "-t", "w", "?")
        pane.until(lambda text: "where the other prompt tokens went" in text)
        pane.tmux("send-keys", "-t", "w", "?")
        pane.tmux("resize-window", "-t", "w", "-x", "80", "-y", "24")
    pane.until(lambda text: "asking again" in text)
    with stock(tmp_path, "tiny-llama", port) as base:
        pane.until(lambda text: "started anew" in text and "asking again" not in text)
        asyncio.run(send_all(base, "tiny-llama", Load(2), crowd=False))
        pane.until(lambda text: "never seen before" in text)
        pane.tmux("send-keys", "-t", "w", "q")
        pane.until(lambda text: "ended 0" in text)


async def _hurried(base: str, lengths: Sequence[int], patience: float) -> list[int]:
    """Send prompts one after another, so that the server never rests. A third of the clients break off.

    Their prompts are whole blocks of 32. Return the lengths of those that were answered.
    """
    answered: list[int] = []

    async def ask(number: int, length: int, seconds: float) -> None:
        prompt = [10 + (number * 7919 + n * 31) % 400 for n in range(length)]
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        with contextlib.suppress(httpx.TimeoutException):
            async with httpx.AsyncClient(timeout=seconds) as client:
                (await client.post(f"{base}/v1/completions", json=body)).raise_for_status()
                answered.append(length)

    tasks = []
    for number, length in enumerate(lengths):
        breaks = number % 3 == 1 and length < 10_000
        tasks.append(asyncio.create_task(ask(number, length, patience if breaks else 600)))
        await asyncio.sleep(1.0)
    await asyncio.gather(*tasks)
    return answered


def test_clients_that_break_off_and_long_prompts_leave_every_other_cause_right(tmp_path: Path) -> None:
    lengths = [700 + 13 * n if n % 3 != 1 else 6_400 + 32 * n for n in range(24)]
    lengths += [38_000, 6_400, 777, 903]
    more = {"max_model_len": "40000", "max_num_batched_tokens": "256", "num_gpu_blocks_override": "4000"}
    with stock(tmp_path, "tiny-llama", **more) as base:
        group = alone(base)
        try:
            group.start()
            shots, stop = [], threading.Event()

            def look() -> None:
                while not stop.wait(0.25):
                    shots.append(group.look())

            looking = threading.Thread(target=look)
            looking.start()
            answered = asyncio.run(_hurried(base, lengths, 0.5))
            time.sleep(3)
            stop.set()
            looking.join()
            time.sleep(11)
            shot = group.look()
        finally:
            group.close()
    period = shot.periods["since start"]
    assert sorted(answered)[-1] == 38_000
    misses, asked = Counter(period.misses), sum(answered)
    tails = sum(length % 32 for length in answered)
    single = misses["tails"] - tails  # chunks of one block: they may be an answer's
    assert single in range(0, 32 * len(lengths), 32) and not period.hit_tokens
    assert misses["cold"] >= asked - tails - single
    assert misses.total() == period.query_tokens
    assert set(misses) <= {"cold", "tails", "aborted"} and not period.recomputed
