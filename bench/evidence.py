"""The published results on vLLM's KV cache, measured again on this machine: `make evidence` writes the page.

    python -m bench.evidence [--only pinning,free-list] [--scale cpu|gpu] [--repeat 3] [-o reports]

A case is an experiment whose sides are whole runs of `kvtune profile`; `kvtune compare` checks that two sides did the
same work and prints their figures. A call goes on where an earlier one stopped: remove OUTPUT/evidence-runs to measure
everything again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import gemma
from kvtune.data.run.file import SUFFIX, read_label, read_run
from kvtune.data.show.parts import Banner, Section, grid
from kvtune.lab.engine.experiment import BASELINE, Side, experiment
from kvtune.reading.analysis.comparison.compare import value_at
from kvtune.reading.analysis.spread import mean_difference

IDENTITY = "evidence of published results"
ANSWERS = "answers"
"""In a path's place: how many answers are equal."""


def core(**settings: object) -> tuple[str, ...]:
    """Words of `profile` that set the core's settings."""
    words = (("--set", f"core.{name}={str(value).lower()}") for name, value in settings.items())
    return tuple(word for pair in words for word in pair)


OFF = dict.fromkeys(("pool", "pinning", "rows", "steady", "empty_blocks", "freeze", "front_end"), False)
"""The core with every idea off."""
EMPTY_BLOCKS, ROWS = core(**OFF | {"empty_blocks": True}), core(**OFF | {"rows": True})
STOCK, FIRST, PIN = ("--core", "stock"), (), core(policy="pin")
SIDES: dict[str, dict[str, tuple[str, ...]]] = {
    "decode": {BASELINE: core(**OFF), "empty_blocks": EMPTY_BLOCKS, "rows": ROWS},
    "decode 8B": {BASELINE: core(**OFF), "rows": ROWS},
    "prefill": {BASELINE: core(**OFF), "empty_blocks": EMPTY_BLOCKS},
    "prefixes": {"stock": STOCK, "pin": PIN, "pin, min-drop 0": (*PIN, *core(min_drop=0)), "first": FIRST},
    "half": {"stock": STOCK, "first": FIRST},
    # On a CPU, stock crashes on Mamba-2 with caching if a chunk ends inside a state; whole_states prevents that.
    "hybrid": {"stock's blocks": core(**OFF, whole_states=True), "packed": core(**OFF, packed=True)},
    "real": {"stock": STOCK, "first": FIRST},
}
"""Words of `profile` by side."""
ONCE = ("hybrid", "real")
"""One run a side: only counts are read, which every repeat has alike."""

POOL = "--num-gpu-blocks-override 3800 --block-size 32 --max-num-batched-tokens 1024"
GPU_POOL = "--num-gpu-blocks-override 64000 --block-size 16 --max-model-len 16384"
REAL = (
    f"{gemma.FOLDER} -w rounds:prefixes=4,prefix=1200,suffix=64,output=8,rounds=3 -- --dtype float32 "
    "--max-model-len 2048 --max-num-seqs 2 --max-num-batched-tokens 512 --block-size 16 "
    "--kv-cache-memory-bytes 1G --num-gpu-blocks-override 430"
)
LOADS: dict[str, dict[str, str]] = {
    "cpu": {
        "decode": "tiny-opt -w decode:requests=512,prompt=48,output=100 -- --max-num-seqs 512",
        "prefill": "tiny-opt -w prefill:requests=32,prompt=1900,output=48",
        "prefixes": f"tiny-gemma3 -w rounds:prefixes=24,prefix=1500,suffix=64,output=16,rounds=2 -- {POOL}",
        "half": f"tiny-gemma3 -w rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3 -- {POOL}",
        "hybrid": "tiny-granite -w rounds:prefixes=6,prefix=1500,suffix=64,output=16,rounds=3 "
        "-- --enable-prefix-caching",
        "real": REAL,
    },
    "gpu": {
        "decode": "opt-125m -w decode:requests=512,prompt=48,output=1000 -- --max-num-seqs 512",
        "decode 8B": "llama-3-8b -w decode:requests=256,prompt=48,output=300",
        "prefill": "opt-125m -w prefill:requests=512,prompt=1900,output=48",
        "prefixes": f"gemma-3-4b -w rounds:prefixes=30,prefix=14000,suffix=64,output=16,rounds=2 -- {GPU_POOL}",
        "half": f"gemma-3-4b -w rounds:prefixes=15,prefix=14000,suffix=64,output=16,rounds=3 -- {GPU_POOL}",
        "real": REAL,
    },
}
"""What `profile` is told of a case, by kind of machine: model, workload and vLLM's flags."""
NOTES = {
    "cpu": "Not measured on a GPU: tiny models with random weights on a CPU engine, pools and prefixes in the "
    "published proportions. Where a GPU computes for longer, the host's share is smaller.",
    "gpu": "Real shapes with random weights in bfloat16 on one GPU, lengths cut so that it ends in minutes.",
}


def command(case: str, scale: str, side: str, *options: str) -> list[str]:
    """Words of the command that makes one run of this side."""
    load, dashes, flags = LOADS[scale][case].partition(" -- ")
    words = ["profile", *load.split(), *SIDES[case][side], *options]
    return [*words, *([dashes.strip()] if flags else []), *flags.split()]


@dataclass(frozen=True)
class Ratio:
    """b over a, between `low` and `high` with 95 % confidence."""

    ratio: float
    low: float
    high: float
    runs: int


SPEED, PAUSE = "throughput_tok_s", "gc.engine_core.pause_ms.total"
YOUNG, HITS = "gc.engine_core.collections.0", "rounds.2.hit_tokens"
TTFT2, TTFT3 = "rounds.1.ttft_ms_mean", "rounds.2.ttft_ms_mean"

Asked = tuple[str, str, str, str, str, str, float | None]
"""Case, sides a and b, path in their `--json`, title, direction, and the published ratio of b over a."""

CLAIMS: dict[str, tuple[str, str, tuple[Asked, ...]]] = {
    "empty-blocks": (
        "Empty block lists shared instead of allocated (vLLM has adopted it; the core skips the calls as well)",
        "collector's cost down, throughput +3 to 4 % (opt-125m, 48/2000 and 2000/48)",
        (
            ("decode", BASELINE, "empty_blocks", SPEED, "tokens/s", "higher", 1.03),
            ("decode", BASELINE, "empty_blocks", PAUSE, "collector's pauses", "lower", None),
            ("prefill", BASELINE, "empty_blocks", SPEED, "tokens/s, prefill", "higher", 1.03),
        ),
    ),
    "token-rows": (
        "Sampled tokens as arrays instead of lists of lists",
        "throughput +30 % (opt-125m, 48/2000), +5 % (48/500), +6 % (8B)",
        (
            ("decode", BASELINE, "rows", SPEED, "tokens/s", "higher", 1.30),
            ("decode 8B", BASELINE, "rows", SPEED, "tokens/s, 8B", "higher", 1.06),
            ("decode", BASELINE, "rows", YOUNG, "young collections", "lower", None),
            ("decode", BASELINE, "rows", PAUSE, "collector's pauses", "lower", None),
        ),
    ),
    "pinning": (
        "Sliding-window blocks pinned in a second tier",
        "30 prefixes of 28k tokens: first token -78 %, throughput +28 %; equal at 15; min-drop 16 like 0",
        (
            ("prefixes", "stock", "pin", TTFT2, "first token, round 2, published policy", "lower", 0.22),
            ("prefixes", "stock", "first", TTFT2, "first token, round 2, our default", "lower", 0.22),
            ("prefixes", "stock", "first", SPEED, "tokens/s", "higher", 1.28),
            ("half", "stock", "first", TTFT3, "first token, half the prefixes, round 3", "equal", 1.0),
            ("prefixes", "pin, min-drop 0", "pin", TTFT2, "min-drop 16 against 0, round 2", "equal", 1.0),
        ),
    ),
    "free-list": (
        "Prefix caching with O(1) removal from the free list (vLLM has adopted it)",
        "a hit costs the same in a pool of any size",
        (),
    ),
    "aggregate-blocks": (
        "Block size from all attention layers together (hybrid attention + state-space models)",
        "blocks of about 400 tokens down to about 100",
        (
            ("hybrid", "stock's blocks", "packed", "engine.block_size", "tokens a block", "lower", 0.25),
            ("hybrid", "stock's blocks", "packed", HITS, "hit tokens, round 3", "higher", None),
        ),
    ),
    "real-weights": (
        "Real weights: Gemma-3 270M answers the same with the core on and off",
        "accuracy unchanged",
        (
            ("real", "stock", "first", ANSWERS, "answers equal token by token", "equal", 1.0),
            ("real", "stock", "first", HITS, "hit tokens, round 3", "higher", None),
        ),
    ),
}


def kvtune(*words: str) -> dict[str, Any]:
    """What a command prints with `--json`. SystemExit where it fails: its messages stand above."""
    print(f"kvtune {shlex.join(words)}", file=sys.stderr, flush=True)
    made = subprocess.run([sys.executable, "-m", "kvtune", *words], stdout=subprocess.PIPE, check=False)
    if made.returncode:
        raise SystemExit(made.returncode)
    printed: dict[str, Any] = json.loads(made.stdout)
    return printed


def runs_of(case: str, scale: str, folder: Path, repeats: int) -> dict[str, list[str]]:
    """Run files by side: those of an earlier call, and new ones."""

    def runs(side: Side[Path]) -> Path:
        return folder / f"{scale}-{case}-{side.name}"

    def make(side: Side[Path]) -> Path:
        words = command(case, scale, side.name, "--tries", "0", "--json", "-o", str(runs(side)))
        return Path(kvtune(*words)["run_file"])

    def kept(side: Side[Path]) -> Path | None:
        paths = sorted(runs(side).glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        made = [path for path in paths if read_label(path).state == "complete"]
        return made[len(side.runs)] if len(made) > len(side.runs) else None

    sides: list[Side[Path]] = [Side(name, {}) for name in SIDES[case]]
    ended = experiment(sides, 1 if case in ONCE else repeats, make, kept=kept)
    if ended.error is not None:
        raise ended.error
    return {side.name: [str(path) for path in side.runs] for side in sides}


def compared(files: dict[str, list[str]], a: str, b: str) -> tuple[list[Any], list[Any]]:
    """The `--json` objects of the runs of two sides, which `compare` found to have done the same work."""
    runs = kvtune("compare", *files[a], *files[b], "--json")["runs"]
    return runs[: len(files[a])], runs[len(files[a]) :]


def ratio_of(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    """The ratio of the means; its interval is that of their difference (Welch), in shares of a's mean."""
    fewest = min(len(a), len(b))
    if not fewest or not sum(a):
        return None
    mean = sum(a) / len(a)
    ratio = sum(b) / len(b) / mean
    low, high = mean_difference(a, b) if fewest > 1 else ((ratio - 1) * mean,) * 2
    return Ratio(ratio, max(0.0, 1 + low / mean), 1 + high / mean, fewest)


def verdict(measured: Ratio | None, direction: str, published: float | None) -> str:
    """Whether the ratio supports the claim: an equality within a tenth, a gain with half of what was published."""
    if measured is None:
        return "not measured"
    shown = not measured.low <= 1 <= measured.high
    if direction == "equal":
        holds = measured.low >= 0.9 and measured.high <= 1.1
        return "holds" if holds else "does not hold here" if shown else "no difference shown"
    if not shown:
        return "no difference shown"
    if (measured.ratio < 1) != (direction == "lower"):
        return "does not hold here"
    enough = published is None or abs(measured.ratio - 1) >= abs(published - 1) / 2
    return "holds" if enough else "smaller here"


Row = tuple[str, ...]
HEADS = ("figure", "work", "ratio", "95 % interval", "published", "runs a side", "verdict")


def row(title: str, work: str, r: Ratio | None, direction: str, published: float | None = None) -> Row:
    """One figure of a claim on the page."""
    ratio, between, runs = ("–",) * 3
    if r is not None:
        ratio, between, runs = f"{r.ratio:.3f}", f"{r.low:.3f} to {r.high:.3f}", str(r.runs)
    text = "–" if published is None else f"{published:.2f}"
    return title, work, ratio, between, text, runs, verdict(r, direction, published)


def row_of(asked: Asked, work: str, files: dict[str, list[str]]) -> tuple[Row, str]:
    """A figure from the run files of its two sides (none: not measured), and the machine in words."""
    _, a, b, path, title, direction, published = asked
    values: tuple[list[float], list[float]] = ([], [])
    machine = ""
    if files:
        one, two = compared(files, a, b)
        machine = machine_of(one[0])
        left, right = ([value_at(run, path) for run in side if path != ANSWERS] for side in (one, two))
        values = [v for v in left if v is not None], [v for v in right if v is not None]
        if path == ANSWERS:
            own, other = (read_run(Path(files[s][0])).table("requests")["answer_crc"] for s in (a, b))
            values = [float(len(own))], [float((own == other).sum())]
    return row(f"{title}: {b} over {a}", work, ratio_of(*values), direction, published), machine


def free_list() -> list[Row]:
    """What a hit costs by the pool's size: the pools alone, as bench/pool.py times them."""
    from bench.pool import measure, operations, operations_of_deque

    cost_s: list[dict[str, list[float]]] = []
    for size in (1_000, 200_000):
        sides = {"deque": operations_of_deque(size)}
        sides |= {name: operations(size, policy) for name, policy in (("list", ""), ("first", "first"))}
        rates = measure(sides, "hit")
        cost_s.append({name: [1 / rate for rate in rates[name]] for name in rates})
    small, large = cost_s
    work, among = "block pool alone (bench/pool.py)", "a hit among 200,000 blocks"
    names = {"deque": "linear removal", "list": "vLLM's linked list", "first": "the core's queues"}
    rows = [
        row(
            f"{among} over one among 1,000, {title}",
            work,
            ratio_of(small[name], large[name]),
            "higher" if name == "deque" else "equal",
        )
        for name, title in names.items()
    ]
    gain = ratio_of(large["deque"], large["list"])
    return [*rows, row(f"{among}: linked list over linear removal", work, gain, "lower")]


def planned_blocks() -> list[Row]:
    """Tokens a block under both rules for published shapes, by arithmetic: no engine of that size runs."""
    from kvtune.data.layout.plan import GPU, ModelShape, StateTensor, legal_aggregate, plan_per_layer
    from kvtune.reading.bounds.given import shape_named

    states = (StateTensor("conv", (3, 3328), 2), StateTensor("ssm", (48, 64, 128), 2))
    granite = ModelShape("Granite-4.0-H-Tiny", 4, 4, 128, 2, state_layers=36, states=states)
    rows = []
    for shape in (granite, shape_named("qwen3-next-80b")):
        now = plan_per_layer(shape, GPU).block_tokens
        packed = legal_aggregate(shape, GPU, now)[0].block_tokens
        ratio, work = ratio_of([now], [packed]), f"{shape.name}, planned, not run"
        rows.append(row(f"tokens a block: {packed} over {now}", work, ratio, "lower", 0.25))
    return rows


def section(name: str, rows: Sequence[Row], lines: Sequence[str]) -> Section:
    """A claim's part of the page."""
    title, published, _ = CLAIMS[name]
    said = [cells[-1] for cells in rows]
    short = ", ".join(f"{said.count(word)} of {len(said)} {word}" for word in dict.fromkeys(said))
    table = grid(HEADS, rows, "A ratio is the second side's figure over the first's")
    lead = f"Published: {published}. Here: {short}."
    return Section(name, title, lead, tables=(table,), notes=tuple(dict.fromkeys(lines)))


def page(sections: Sequence[Section], note: str, machine: str) -> str:
    """The HTML file."""
    from kvtune.data.show.page import document_page
    from kvtune.data.show.parts import Document

    lines = (
        "A side's runs are whole runs on fresh engines; sides take turns, in reverse order every second time.",
        "Intervals are Welch's of the difference of means, as `kvtune compare` has them, divided by the first mean.",
        "holds: the interval is on the claim's side of 1 and at least half of what was published is reached, or an "
        "equality within a tenth; smaller here: less than half; no difference shown: the interval contains 1.",
        "To measure it again: make evidence.",
    )
    how = Section("how", "How it was measured", notes=lines)
    return document_page(
        Document(
            name="make evidence",
            subject="The published results, measured again",
            headline=machine,
            sections=(*sections, how),
            identity=IDENTITY,
            title="Evidence · kvtune",
            banners=(Banner("info", "Scaled.", note),),
        )
    )


def machine_of(run: dict[str, Any]) -> str:
    engine, host = run["engine"], run["host"]
    device = engine["device_name"] or engine["device"]
    versions = f"vLLM {engine['vllm']}, Python {run['python']}, kvtune {run['kvtune']}"
    return f"{versions}, {host['cpu']} ({host['cores']} cores), {device}, {datetime.now(UTC):%Y-%m-%d}"


def measured(names: Sequence[str], scale: str, folder: Path, repeats: int) -> tuple[list[Section], str]:
    """The sections of these claims, and the machine in words."""
    sections, machine = [], f"{datetime.now(UTC):%Y-%m-%d}"
    for name in names:
        rows: list[Row] = []
        lines: list[str] = []
        for asked in CLAIMS[name][2]:
            case, *sides = asked[:3]
            if case not in LOADS[scale]:
                continue
            files: dict[str, list[str]] = {}
            if case == "real" and not gemma.is_prepared(gemma.FOLDER):
                lines += ["not measured: the weights are not here; `make gemma`, then again"]
            else:
                files = runs_of(case, scale, folder, repeats)
            made, where = row_of(asked, LOADS[scale][case].partition(" -- ")[0], files)
            machine = where or machine
            rows.append(made)
            lines += [shlex.join(("kvtune", *command(case, scale, side))) for side in sides]
        extra = {"free-list": free_list, "aggregate-blocks": planned_blocks}.get(name)
        sections.append(section(name, [*rows, *(extra() if extra else [])], lines))
    return sections, machine


def main(words: Sequence[str] | None = None) -> int:
    names = list(CLAIMS)
    parser = argparse.ArgumentParser(description="Measure the published results again.")
    parser.add_argument("--only", default=",".join(names), help="claims, separated by commas")
    gpu = "gpu" if shutil.which("nvidia-smi") else "cpu"
    parser.add_argument("--scale", choices=tuple(LOADS), default=gpu)
    parser.add_argument("--repeat", type=int, default=3, help="runs a side, at least 2")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports"))
    options = parser.parse_args(words)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--only: there is no claim {', '.join(sorted(unknown))}; claims: {', '.join(names)}")
    folder = options.output / "evidence-runs"
    folder.mkdir(parents=True, exist_ok=True)
    sections, machine = measured(chosen, options.scale, folder, max(2, options.repeat))
    path = options.output / "evidence.html"
    path.write_text(page(sections, NOTES[options.scale], machine))
    print(f"page  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
