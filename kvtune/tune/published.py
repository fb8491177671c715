"""`kvtune evidence`, put together: runs cases, judges each figure, gives one plain object. CLI's process."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtune import __version__
from kvtune.analysis.evidence import Ratio, judge, ratio, reason
from kvtune.analysis.rebuild import workload_of
from kvtune.analysis.summary import summary
from kvtune.engine.claims import CASES, CLAIMS, Asked, Case, Claim, Side
from kvtune.engine.evidence import Done, command, run_case
from kvtune.engine.plan import Event
from kvtune.engine.resolve import check_engine
from kvtune.errors import KvtuneError, UsageError
from kvtune.run.file import read_run
from kvtune.run.host import this_host

SCHEMA = 1
AGGREGATE = "aggregate-blocks"
FREE_LIST = "free-list"
NAMES = (*(claim.name for claim in CLAIMS), AGGREGATE)
SCALE = (
    "Tiny models with random weights, sized for a CPU engine, pools and prefixes in the published proportions. "
    "Ratios carry over to a host-bound engine; where a GPU computes for longer, the host's share is smaller."
)
NO_GPU = "Not yet measured on a GPU: these loads are sized for a CPU engine."

Start = Callable[[Case, Side, int], Callable[[Event], None]]
Summaries = Mapping[tuple[str, str], list[dict[str, Any]]]


def chosen(only: str) -> tuple[str, ...]:
    """Names of claims from a comma list; all for an empty one."""
    names = tuple(name.strip() for name in only.split(",") if name.strip()) or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise UsageError(f"--only {', '.join(unknown)} is no claim", f"it takes {', '.join(NAMES)}")
    return names


def cases_of(names: Sequence[str]) -> list[Case]:
    """The cases that these claims need, each once."""
    needed = dict.fromkeys(f.case for claim in CLAIMS if claim.name in names for f in claim.figures)
    return [CASES[name] for name in needed]


def evidence(names: Sequence[str], folder: Path, on_start: Start) -> dict[str, Any]:
    """Run what is missing, judge all. A run that failed is named under its claim; the others stand."""
    version = check_engine()
    done = [d for case in cases_of(names) for d in run_case(case, folder, on_start)]
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in done:
        if one.path:
            run = read_run(folder / one.path)
            seen.setdefault((one.case, one.side), []).append(summary(run, workload_of(run)))
    claims = [_claim(claim, seen, done) for claim in CLAIMS if claim.name in names]
    for claim in claims:
        if claim["name"] == FREE_LIST:
            _free_list(claim)
    if AGGREGATE in names:
        claims.append(_aggregate())
    host = this_host()
    return {
        "schema": SCHEMA,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "vllm": version,
            "python": platform.python_version(),
            "kvtune": __version__,
            "cpu": host.cpu,
            "cores": host.cores,
        },
        "scale": SCALE,
        "gpu": NO_GPU,
        "command": "make evidence"
        if set(names) == set(NAMES)
        else f"kvtune evidence --only {','.join(names)}",
        "claims": claims,
    }


def _claim(claim: Claim, seen: Summaries, done: Sequence[Done]) -> dict[str, Any]:
    figures = [_figure(asked, seen) for asked in claim.figures]
    cases = {asked.case for asked in claim.figures}
    why = [f"failed: {d.case}, {d.side}: {d.why}" for d in done if d.why and d.case in cases]
    if any(f["verdict"] not in ("holds", "not measured") for f in figures):
        first = claim.figures[0]
        baseline = seen.get((first.case, first.a))
        why += [text] if baseline and (text := reason(baseline[0])) else []
    return {
        "name": claim.name,
        "title": claim.title,
        "published": claim.published,
        "verdict": in_short(figures),
        "figures": figures,
        "why": why,
    }


def in_short(figures: Sequence[Mapping[str, Any]]) -> str:
    """How many figures of a claim hold, in words."""
    counts: dict[str, int] = {}
    for figure in figures:
        counts[figure["verdict"]] = counts.get(figure["verdict"], 0) + 1
    return "Here: " + ", ".join(f"{n} of {len(figures)} {verdict}" for verdict, n in counts.items()) + "."


def _figure(asked: Asked, seen: Summaries) -> dict[str, Any]:
    case = CASES[asked.case]
    a, b = (
        [value for s in seen.get((asked.case, side), []) if (value := value_at(s, asked.measure)) is not None]
        for side in (asked.a, asked.b)
    )
    sides = {side.name: side for side in case.sides}
    return _row(
        ratio(a, b),
        title=f"{asked.title}: {asked.b} over {asked.a}",
        work=f"{case.model} {case.workload}",
        direction=asked.direction,
        published=asked.published,
        commands=[command(case, sides[name]) for name in (asked.a, asked.b)],
    )


def _row(
    found: Ratio, *, title: str, work: str, direction: str, published: float | None, commands: list[str]
) -> dict[str, Any]:
    return {
        "title": title,
        "work": work,
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "runs": found.runs,
        "direction": direction,
        "published": published,
        "verdict": judge(found, direction, published),
        "commands": commands,
    }


def value_at(found: Mapping[str, Any], path: str) -> float | None:
    """The number at a dotted path, also through lists; None where there is none."""
    value: Any = found
    for name in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return float(value) if isinstance(value, (int, float)) else None


def _free_list(claim: dict[str, Any]) -> None:
    """Add what a hit costs by pool size, measured on vLLM's own pool in a process of its own."""
    line = "python -m kvtune.sim.free_list"
    made = subprocess.run(
        [sys.executable, "-m", "kvtune.sim.free_list"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if made.returncode:
        raise KvtuneError(
            f"{line} failed: {made.stderr.strip().splitlines()[-1:]}", "run it alone to see why"
        )
    by_size: dict[str, dict[str, list[float]]] = json.loads(made.stdout.strip().splitlines()[-1])
    sizes = list(by_size)
    small, large = by_size[sizes[0]], by_size[sizes[-1]]
    for kind, title, direction in (
        (
            "linear",
            f"a hit among {int(sizes[-1]):,} blocks over one among {int(sizes[0]):,}, linear removal",
            "higher",
        ),
        ("stock", "the same, vLLM's linked list", "equal"),
        ("tiers", "the same, kvtune's tiers", "equal"),
    ):
        found = ratio(small[kind], large[kind])
        claim["figures"].append(
            _row(
                found,
                title=title,
                work="block pool alone",
                direction=direction,
                published=None,
                commands=[line],
            )
        )
    found = ratio(large["linear"], large["stock"])
    claim["figures"].append(
        _row(
            found,
            title=f"a hit among {int(sizes[-1]):,} blocks: linked list over linear removal",
            work="block pool alone",
            direction="lower",
            published=None,
            commands=[line],
        )
    )
    told = "; ".join(
        f"{int(size):,} blocks: " + ", ".join(f"{k} {statistics.median(v):.2f} us" for k, v in kinds.items())
        for size, kinds in by_size.items()
    )
    claim["why"].append(f"microseconds a hit: {told}")
    claim["verdict"] = in_short(claim["figures"])


def _aggregate() -> dict[str, Any]:
    """Block sizes under both rules for published shapes, exact. No engine with that layout is run by this command."""
    from kvtune.sim.planner import GPU, ModelShape, StateTensor, legal_aggregate, plan_per_layer

    half = 2  # bytes of a bfloat16
    shapes = (
        ModelShape(
            name="Granite-4.0-H-Tiny",
            attention_layers=4,
            kv_heads=4,
            head_dim=128,
            kv_element_bytes=half,
            state_layers=36,
            states=(StateTensor("conv", (3, 3328), half), StateTensor("ssm", (48, 64, 128), half)),
        ),
        ModelShape(
            name="Qwen3-Next-80B-A3B",
            attention_layers=12,
            kv_heads=2,
            head_dim=256,
            kv_element_bytes=half,
            state_layers=36,
            states=(StateTensor("conv", (3, 8192), half), StateTensor("recurrent", (32, 128, 128), half)),
        ),
    )
    figures = []
    for shape in shapes:
        per_layer = plan_per_layer(shape, GPU).block_tokens
        aggregate = legal_aggregate(shape, GPU, per_layer)[0].block_tokens
        exact = aggregate / per_layer
        figures.append(
            _row(
                Ratio(exact, exact, exact, 1),
                title=f"tokens a block, aggregate rule over per layer: {aggregate} over {per_layer}",
                work=f"{shape.name}, planned, not run",
                direction="lower",
                published=0.25,
                commands=["kvtune doctor FOLDER_WITH_CONFIG_JSON"],
            )
        )
    return {
        "name": AGGREGATE,
        "title": "Block size from all attention layers together (hybrid attention + state-space models)",
        "published": "blocks of about 400 tokens down to about 100",
        "verdict": in_short(figures),
        "figures": figures,
        "why": ["arithmetic on the models' shapes: no engine with this layout is run by this command"],
    }
