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
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
WEIGHTS = str(Path(__file__).parents[1] / "tests" / "weights")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WEIGHTS, os.environ.get("PYTHONPATH"))))
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}

from tests.lab.engine.checked import FAULTS, SERVERS, check, server  # noqa: E402


def row(name: str, answers: list[dict[str, Any]], seconds: float) -> str:
    """A row of the table: how the runs ended, and each path as wrong/hits over all runs."""
    verdicts = Counter(answer["verdict"] for answer in answers)
    paths: dict[str, list[int]] = {}
    missing: dict[str, str] = {}
    for path in (path for answer in answers for path in answer["paths"]):
        sums = paths.setdefault(path["name"], [0, 0])
        sums[0], sums[1] = sums[0] + path["wrong"], sums[1] + path["hits"]
        if not path["hits"]:
            missing[path["name"]] = path["why_not"]
    shown = {path: sums for path, sums in paths.items() if sums[1]}
    never = {path: why for path, why in missing.items() if path not in shown}
    hits, wrong = (sum(sums[i] for sums in shown.values()) for i in (1, 0))
    nats = max((answer["limit_nats"] for answer in answers), default=0.0)
    told = sum(answer["exchanged"]["wrong"] for answer in answers)
    exchanged = sum(answer["exchanged"]["hits"] for answer in answers)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    each = " ".join(f"{path} {sums[0]}/{sums[1]}" for path, sums in shown.items())
    why = "; ".join(f"{path}: {text}" for path, text in never.items())
    unsalted = sum(answer["unsalted"] for answer in answers)
    known = f"{told}/{exchanged} | {nats:.2g} | {unsalted}"
    return f"| {name} | {said} | {wrong}/{hits} | {known} | {each} | {why} | {seconds / max(1, len(answers)):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--models", nargs="*", default=[], choices=[*SERVERS, []], help="layouts; all by default"
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first run's seed")
    parser.add_argument(
        "--faults", nargs="*", choices=[*FAULTS, []], help="which are planted; all without a name"
    )
    parser.add_argument("--prompts", default="22")
    parser.add_argument("--core", default="stock", choices=["stock", "kvtune"])
    parser.add_argument("-o", "--output", type=Path, help="a file; each answer is added to it as a line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the server ends with us
    served = [(name, "") for name in options.models or SERVERS]
    if options.faults is not None:
        faults = options.faults or FAULTS
        served = [(name, fault) for fault in faults for name in options.models or [FAULTS[fault]]]
    print(
        "| server | verdicts | wrong/hits | exchanged told | limit | unsalted | wrong/hits by path | never shown | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, fault in served:
        title = f"{name}, {fault}" if fault else name
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(row(title, *checked(Path(folder), name, fault, options)), flush=True)
            except AssertionError as error:
                lines = next(Path(folder).glob("serve-*.log")).read_text(errors="replace").splitlines()
                said = [line for line in lines if "Error: " in line]
                print(f"{title}: {said[0] if said else error}", file=sys.stderr, flush=True)


def checked(
    folder: Path, name: str, fault: str, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """The answers of all runs on one server, and how long they took."""
    answers = []
    fill = [] if fault else ["--fill"]
    with server(folder, name, fault, options.core) as base:
        began = time.monotonic()
        for seed in range(options.first, options.first + options.runs):
            _, answer = check(base, "--prompts", options.prompts, "--seed", str(seed), *fill)
            answers.append({"server": name, "fault": fault, "core": options.core, "seed": seed, **answer})
            if options.output:
                with options.output.open("a") as kept:
                    kept.write(json.dumps(answers[-1]) + "\n")
        return answers, time.monotonic() - began


if __name__ == "__main__":
    main()
