"""Seconds to each command's answer, and how they grow: `python bench/answers.py [--only NAME] [--times N]`.

Each command runs as a user's does, in its own process, `--times` times; the least wall and CPU time (with its
children's) and the memory of its largest process are printed. With `--traces` and `--models`: `capacity` on five
models, too. With `--tokenizer` and `--kvlint`: `explain-log` beside kvlint, by turns: `--only kvlint`, or one of its
logs, as `--only "kvlint, 3000"`. `--kvtune PATH` names another checkout's command, to compare by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SIM = ("profile", "llama-3.1-8b", "--on", "sim", "--like-device", "h100", "--tries", "0", "--json")
WINDOWS = ("profile", "gpt-oss-20b", *SIM[2:])


def load(requests: int = 1000, prompt: int = 2000, output: int = 100) -> tuple[str, str]:
    return "-w", f"decode:requests={requests},prompt={prompt},output={output},rate=20"


CAPACITY = (
    ("gpt-oss-20b", "h100", 1),
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-70b", "320GiB", 1),
    ("qwen3-next", "h100", 4),
    ("gemma-3-27b-it", "h100", 1),
)
"""Model, device, how many of them: two hold no KV cache beside the weights of qwen3-next in bf16."""


def answers(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "--help", ("--help",)
    yield "doctor MODEL", ("doctor", "llama-3.1-8b", "--fail-on", "error")
    yield "explain RUN, 36 requests", ("explain", "last")
    yield "explain-log, 1,000 requests", ("explain-log", str(folder / "log.jsonl"), "--text-only")
    yield "profile on sim, 1,000 requests", (*SIM, *load())
    yield "the same, requests x10", (*SIM, *load(requests=10_000))
    yield "the same, tokens x10", (*SIM, *load(prompt=20_000))
    yield "the same, blocks x10", (*SIM, *load(), "--", "--num-gpu-blocks-override", "290000")
    yield "the same, two groups", (*WINDOWS, *load())
    tap = ("-w", f"requests:path={folder / 'tap.jsonl'}")
    yield "capacity, log of 141 requests", ("capacity", "llama-3.1-8b", *SIM[4:6], *tap)


def capacities(models: Path, traces: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield how many recorded agent sessions fit each of the models."""
    for model, device, gpus in CAPACITY:
        load = f"trace:format=weka,path={traces}"
        flags = ("--", "--load-format", "dummy", "--skip-tokenizer-init", "--tensor-parallel-size", str(gpus))
        words = ("capacity", str(models / model), "--like-device", device, "-w", load, *flags)
        yield f"capacity, {model} {device}", words


def prepare(kvtune: str, folder: Path) -> None:
    """Make the run and the log that are explained."""
    work = "rounds:prefixes=6,prefix=700,suffix=40,output=8,rounds=6"
    command = (kvtune, "profile", "tiny-gemma3", "--on", "sim", "-w", work, "--json")
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    with (folder / "log.jsonl").open("w") as log:
        for number in range(1000):
            system = f"You are agent {number % 20}. " + "Follow the rules of the house. " * 100
            text = f"{system}\nRequest {number}: " + "what next? " * 20
            log.write(json.dumps({"t": number / 10, "prompt": text}) + "\n")
    rng = random.Random(0)
    with (folder / "tap.jsonl").open("w") as log:
        histories = {session: rng.choices(range(1000), k=800) for session in range(12)}
        for number in range(141):
            history = histories[number % 12]
            history += rng.choices(range(1000), k=200)
            answer = rng.choices(range(1000), k=60)
            line = {
                "prompt": history,
                "answer": answer,
                "t0": 1.0e9 + number / 2,
                "t1": 1.0e9 + number / 2 + 1,
            }
            log.write(json.dumps(line) + "\n")
            history += answer


def measure(command: tuple[str, ...], times: int, folder: Path) -> tuple[float, float, float, int]:
    """Return the least wall and CPU seconds, the most MiB of a process, and the exit code."""
    wall, cpu, memory, code = [], [], [], 0
    environment = {**os.environ, "KVTUNE_REPLAYS": "off"}  # the same command again makes its replays again
    for _ in range(times):
        began_s = time.monotonic()
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = code = os.waitstatus_to_exitcode(status)
        wall.append(time.monotonic() - began_s)
        cpu.append(usage.ru_utime + usage.ru_stime)
        memory.append(usage.ru_maxrss / 1024)
    return min(wall), min(cpu), max(memory), code


def show(title: str, command: tuple[str, ...], times: int, folder: Path) -> None:
    wall_s, cpu_s, mebibytes, code = measure(command, times, folder)
    print(f"{title:<32} {wall_s:7.2f} s  {cpu_s:7.2f} CPU-s  {mebibytes:6.0f} MiB  exit {code}", flush=True)


def support(log: Path, requests: int, rules: int) -> None:
    """Write a log of a support desk: time, id, user and tenant stand before `rules` rules that all prompts have."""
    rng = random.Random(0)
    words = (
        "always",
        "never",
        "answer",
        "the",
        "customer",
        "order",
        "refund",
        "page",
        "date",
        "asks",
        "for",
        "a",
    )
    text = "\n".join(f"Rule {number}: {' '.join(rng.choices(words, k=14))}." for number in range(rules))
    with log.open("w") as stream:
        for number in range(requests):
            system = (
                f"Current time: 2026-09-{1 + number // 1440:02}T{number // 60 % 24:02}:{number % 60:02}:00Z\n"
                f"Request id: req_{rng.randrange(10**8):08d}f3\nuser: customer{number}@example.com\n"
                f"You are {('Acme', 'Northwind', 'Globex', 'Initech')[number % 4]}'s support assistant.\n{text}"
            )
            roles = {"system": system, "user": f"Where is my order number {100_000 + number}?"}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
            stream.write(json.dumps({"messages": messages}) + "\n")


def beside_kvlint(kvtune: str, kvlint: str, tokenizer: str, only: str, times: int, folder: Path) -> None:
    for requests, rules in ((3_000, 31), (10_000, 31), (10_000, 173)):  # rules of about 770 and 4,000 tokens
        title, log = f"kvlint, {requests} requests, {rules} rules", folder / f"{requests}-{rules}.jsonl"
        if only not in title:
            continue
        support(log, requests, rules)
        for _ in range(times):
            show(title, (kvlint, "lint", str(log), "--model", tokenizer), 1, folder)
            own = (kvtune, "explain-log", str(log), "--bounds-only", "--tokenizer", tokenizer)
            show("kvtune explain-log of the same", own, 1, folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kvtune", default=str(Path(sys.executable).with_name("kvtune")))
    parser.add_argument("--only", default="")
    parser.add_argument("--traces", default="", help="a folder of recorded agent sessions")
    parser.add_argument("--models", default="", help="a folder of models' config.json")
    parser.add_argument("--tokenizer", default="", help="a folder with a tokenizer and a chat template")
    parser.add_argument(
        "--kvlint", default="", help="the path of its command, installed apart from kvtune's environment"
    )
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = [*answers(folder)]
        if options.traces:
            asked += capacities(Path(options.models), Path(options.traces).resolve())
        if any(options.only in title for title, _ in asked):
            prepare(options.kvtune, folder)
        for title, words in asked:
            if options.only in title:
                show(title, (options.kvtune, *words), options.times, folder)
        if options.kvlint:
            tokenizer = str(Path(options.tokenizer).resolve())
            beside_kvlint(options.kvtune, options.kvlint, tokenizer, options.only, options.times, folder)


if __name__ == "__main__":
    main()
