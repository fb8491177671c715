"""`kvtune check` again and again, on real servers of each layout: `python -m bench.checks [--runs 10] [--faults]`.

One server for each layout, or for each planted fault; every run has another seed. Prints a row a server: verdicts,
hits, wrong hits, which paths were shown. `-o` keeps each answer. With --core, the server runs kvtune's core.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
WEIGHTS = str(Path(__file__).parents[1] / "tests" / "weights")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WEIGHTS, os.environ.get("PYTHONPATH"))))
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

from tests.lab.engine.checked import FAULTS, OTHERS, SERVERS, check, plant, server  # noqa: E402

HEAD = ("server", "verdicts", "wrong/hits", "exchanged told", "limit", "unsalted", "by path", "never shown")

PROMPTS = {"one_in_20": "12"}
"""Of runs with a fault, where fewer would not do."""


def row(name: str, answers: list[dict[str, Any]]) -> tuple[str, ...]:
    """How the runs ended, and the wrong hits and all hits of each path, over all runs."""
    verdicts = Counter(answer["verdict"] for answer in answers)
    counts: dict[str, Counter[str]] = {}
    for path in (path for answer in answers for path in [*answer["paths"], answer["exchanged"]]):
        counts.setdefault(path["name"], Counter()).update(wrong=path["wrong"], hits=path["hits"])
    exchanged = counts.pop("exchanged")
    shown = {path: each for path, each in counts.items() if each["hits"]}
    never = {path["name"]: path["why_not"] for path in answers[-1]["paths"] if path["name"] not in shown}
    total = sum(shown.values(), Counter())
    return (
        name,
        ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()),
        f"{total['wrong']}/{total['hits']}",
        f"{exchanged['wrong']}/{exchanged['hits']}",
        f"{max(answer['limit_nats'] for answer in answers):.2g}",
        str(sum(answer["unsalted"] for answer in answers)),
        " ".join(f"{path} {each['wrong']}/{each['hits']}" for path, each in shown.items()),
        "; ".join(f"{path}: {why}" for path, why in never.items()),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=[], choices=[*SERVERS, *OTHERS, []], help="layouts")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--fill", type=int, default=1, help="runs that fill the pool, one after the other")
    parser.add_argument("--at-once", type=int, default=5, help="the others at a time; not with a tier")
    parser.add_argument("--faults", nargs="*", help="which are planted; all without a name")
    parser.add_argument("--prompts", default="22")
    parser.add_argument("--core", default="stock", choices=["stock", "kvtune"])
    parser.add_argument("-o", "--output", type=Path, help="a file; each answer is added to it as a line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server ends with us
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for name in options.models or list(SERVERS if options.faults is None else FAULTS):
        faults = [""] if options.faults is None else options.faults or FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            try:
                if any(faults):
                    plant(Path(folder), "")
                with server(Path(folder), name, options.core) as base:
                    for fault in faults:
                        plant(Path(folder), fault)
                        print("|", " | ".join(checked(base, name, fault, options)), "|", flush=True)
            except AssertionError as error:
                lines = next(Path(folder).glob("serve-*.log")).read_text(errors="replace").splitlines()
                said = [line for line in lines if "ERROR" in line and "Error: " in line]
                print(f"{name}: {said[0] if said else error}", file=sys.stderr, flush=True)


def checked(base: str, name: str, fault: str, options: argparse.Namespace) -> tuple[str, ...]:
    """Run all checks on one server."""
    prompts = PROMPTS.get(fault, "6") if fault else options.prompts

    def run(seed: int, *more: str) -> dict[str, Any]:
        _, answer = check(base, "--prompts", prompts, "--seed", str(seed), *more)
        if options.output:
            with options.output.open("a") as kept:
                about = {"server": name, "fault": fault, "core": options.core, "seed": seed}
                kept.write(json.dumps(about | answer) + "\n")
        return answer

    seeds = range(options.runs)
    tier = "kv-offloading-size" in (SERVERS | OTHERS)[name].flags
    alone = options.runs if tier else 0 if fault else options.fill
    answers = [run(seed, "--fill") for seed in seeds[:alone]]
    with ThreadPoolExecutor(options.at_once) as pool:
        answers += pool.map(run, seeds[alone:])
    return row(f"{name}, {fault}" if fault else name, answers)


if __name__ == "__main__":
    main()
