"""Made-up studies for tests: journals as `sweep` and `tune` write them, with trials of a toy law. No measurement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from kvtune.answers.tune.objective import Objective, objective
from kvtune.answers.tune.result import StudyView, Trial
from kvtune.answers.tune.study import Study, view
from kvtune.answers.tune.trials.journal import FORMAT, Head
from kvtune.lab.setup.setup import Load, Pool, Setup

HIT_RATE = objective("hit-rate")


def bench(**changes: Any) -> Setup:
    base = Setup(
        model="tiny-gemma3",
        load=Load(spec="rounds:prefixes=24,prefix=1500,suffix=64,output=8,rounds=3", seed=0, hash="00ff"),
        engine_args=["--num-gpu-blocks-override", "3000", "--block-size", "32"],
        pool=Pool(block_tokens=32),
        vllm="0.32.0",
        core="kvtune",
    )
    return Setup.of_file({**base.filed(), **changes})


def summary(hit_rate: float, wait_ms: float) -> dict[str, Any]:
    return {
        "prefix_cache": {"hit_rate": hit_rate},
        "ttft_ms": {"mean": wait_ms, "p99": 2 * wait_ms},
        "throughput_tok_s": 40_000 / (wait_ms + 100 * abs(hit_rate - 0.4)),
    }


def grid_study(
    *,
    pins: Sequence[int] = (0, 1024, 2048),
    drops: Sequence[int] = (1, 16, 64),
    blocks: Sequence[int] = (32, 64),
    stock: float = 0.33,
    gain: float = 0.1,
    fails: Sequence[int] = (7,),
    why: str = "vLLM refuses this engine: no room for one request",
) -> Study:
    """A simulated sweep over pin window, smallest drop and block size; `gain` per step of the pin window."""
    trials = [
        Trial(number=0, settings={}, on="sim", core="stock", role="baseline", summary=summary(stock, 120))
    ]
    for n, (pin, drop, block) in enumerate(itertools.product(pins, drops, blocks), start=1):
        settings: dict[str, Any] = {"pin_window": pin, "min_drop": drop, "block_size": block}
        rate = min(1.0, 0.3 + gain * pins.index(pin) / max(1, len(pins) - 1) + 0.0004 * drop - block / 4000)
        failed = n in fails
        trials.append(
            Trial(
                number=n,
                settings=settings,
                on="sim",
                state="failed" if failed else "complete",
                why=why if failed else "",
                elapsed_s=0.8,
                summary={} if failed else summary(rate, 180 * (1 - rate)),
            )
        )
    return Study("sweep", bench(), tuple(trials))


def thousand() -> Study:
    return grid_study(
        pins=range(0, 25 * 128, 128),
        drops=(1, 2, 4, 8, 16, 32, 48, 64),
        blocks=(32, 64, 96, 128, 160),
        gain=0.5,
    )


def tuned_study() -> Study:
    """A search whose finalists ran on the engine three times each; their run files are gone."""
    base = grid_study(gain=0.3, fails=())
    best = max(base.trials[1:], key=lambda t: HIT_RATE.of(t.summary) or 0)
    more = []
    for turn in range(3):
        for role, settings, rate in (("baseline", {}, 0.33), ("trial", best.settings, 0.61)):
            more.append(
                Trial(
                    number=100 + len(more),
                    settings=settings,
                    on="engine",
                    core="stock" if role == "baseline" else "kvtune",
                    role=role,  # type: ignore[arg-type]
                    run_file=f"gone-{turn}.kvrun",
                    summary=summary(rate, 120 + turn),
                )
            )
    return Study("tune", bench(), (*base.trials, *more))


def journal(study: Study) -> bytes:
    """The bytes of its file."""
    head = Head(kvtune_journal=FORMAT, kind=study.kind, bench=study.setup.filed())
    return b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *study.trials))


def viewed(study: Study, by: Objective = HIT_RATE) -> StudyView:
    return view(study, by)
