"""Evidence without engine runs of a case: the block pool alone, planned block sizes, answers of real weights.

Each function returns the rows of a claim and the lines below them. CLI's process; engines and pools run in their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

from kvtune.analysis.claim_results import FigureResult
from kvtune.engine import gemma
from kvtune.errors import KvtuneError
from kvtune.evidence.judge import Ratio, judge, ratio

Rows = tuple[list[FigureResult], list[str]]


def row(
    measured: Ratio,
    *,
    title: str,
    work: str,
    direction: str,
    published: float | None,
    commands: Sequence[str],
) -> FigureResult:
    """One judged figure as plain data."""
    return {
        "title": title,
        "work": work,
        "ratio": measured.ratio,
        "low": measured.low,
        "high": measured.high,
        "runs": measured.runs,
        "direction": direction,
        "published": published,
        "verdict": judge(measured, direction, published),
        "commands": list(commands),
    }


def free_list() -> Rows:
    """The cost of a hit by pool size, on vLLM's own pool, in a process of its own."""
    line = "python -m kvtune.evidence.free_list"
    made = subprocess.run(
        [sys.executable, "-m", "kvtune.evidence.free_list"],
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
    among = f"a hit among {int(sizes[-1]):,} blocks"
    asked = (
        (f"{among} over one among {int(sizes[0]):,}, linear removal", "linear", "higher"),
        ("the same, vLLM's linked list", "stock", "equal"),
        ("the same, kvtune's tiers", "tiers", "equal"),
    )
    pairs = [(title, ratio(small[kind], large[kind]), direction) for title, kind, direction in asked]
    pairs.append(
        (f"{among}: linked list over linear removal", ratio(large["linear"], large["stock"]), "lower")
    )
    figures = [
        row(
            measured,
            title=title,
            work="block pool alone",
            direction=direction,
            published=None,
            commands=[line],
        )
        for title, measured, direction in pairs
    ]
    medians = "; ".join(
        f"{int(size):,} blocks: " + ", ".join(f"{k} {statistics.median(v):.2f} us" for k, v in kinds.items())
        for size, kinds in by_size.items()
    )
    return figures, [f"microseconds a hit: {medians}"]


def planned_blocks() -> Rows:
    """Block sizes under both rules for published shapes, by arithmetic: no engine of that size runs."""
    from kvtune.layout.plan import GPU, ModelShape, StateTensor, legal_aggregate, plan_per_layer

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
            row(
                Ratio(exact, exact, exact, 1),
                title=f"tokens a block, aggregate rule over per layer: {aggregate} over {per_layer}",
                work=f"{shape.name}, planned, not run",
                direction="lower",
                published=0.25,
                commands=["kvtune doctor FOLDER_WITH_CONFIG_JSON"],
            )
        )
    return figures, ["planned: arithmetic on the models' shapes; the other rows are of a tiny model that ran"]


def real_answers() -> Rows:
    """Questions on long shared texts, stock and kvtune's core."""
    from kvtune.evidence.answers import BLOCKS, answers, right, same
    from kvtune.evidence.reading import questions

    line = "kvtune evidence --only real-weights"
    folder = gemma.default_folder()
    if not gemma.is_prepared(folder):
        titles = ("equal answers over all", "right answers: kvtune over stock")
        none = Ratio(None, None, None, 0)
        return [
            row(none, title=t, work=gemma.NAME, direction="equal", published=1.0, commands=[line])
            for t in titles
        ], [f"not measured: the weights are not on this machine; `kvtune prepare {gemma.NAME}`, then again"]
    asked = questions()
    stock, ours = (answers(folder, core, asked, BLOCKS) for core in ("stock", "kvtune"))
    equal, total = same(stock, ours), len(asked)
    rights = right(stock, asked), right(ours, asked)
    texts = len({q.text for q in asked})
    work = f"{gemma.NAME}, {total} questions on {texts} texts, {BLOCKS} blocks of 16, greedy, float32"
    figures = [
        row(
            _exact(total, equal),
            title=f"answers equal token by token: {equal} of {total}",
            work=work,
            direction="equal",
            published=1.0,
            commands=[line],
        ),
        row(
            _exact(*rights),
            title=f"right answers: kvtune {rights[1]} over stock {rights[0]}, of {total}",
            work=work,
            direction="equal",
            published=1.0,
            commands=[line],
        ),
        row(
            _exact(stock.hit_tokens, ours.hit_tokens),
            title=f"hit tokens: kvtune {ours.hit_tokens:,} over stock {stock.hit_tokens:,} of {stock.prompt_tokens:,}",
            work=work,
            direction="higher",
            published=None,
            commands=[line],
        ),
    ]
    return figures, [f"preemptions: stock {stock.preemptions}, kvtune {ours.preemptions}"]


def _exact(a: int, b: int) -> Ratio:
    """A ratio of counts, which are the same in every repeat: its interval is itself."""
    value = b / a if a else None
    return Ratio(value, value, value, 1)
