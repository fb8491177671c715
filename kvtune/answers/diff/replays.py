"""A load through the schedulers of two versions, each in a simulator of its own environment; and where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import numpy as np
from msgspec import structs

from kvtune.answers.diff.answers import Answers, on_gpus
from kvtune.answers.diff.changes import changed
from kvtune.answers.diff.environments import Environment
from kvtune.answers.diff.result import Load, Parting, Replayed
from kvtune.answers.explain.explanation import add_up
from kvtune.base.errors import KvtuneError
from kvtune.data.run.types import Run
from kvtune.data.tally import Tally
from kvtune.lab.lab import Lab
from kvtune.lab.setup.resolve import tokenizer_of
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.vllm.symbols import PARTS
from kvtune.reading.analysis.latency import waits_ms
from kvtune.reading.analysis.spread import spread
from kvtune.requests.loads.spec import build

COMPOSITION = ("requests", "scheduled_tokens", "prefill_tokens", "preempted")
"""What a step is made of."""
DECIDED_BY = {"request": "pool", "step": "decode"}
"""The parts of vLLM (kvtune/plugin/vllm/symbols.py) that decide what hits, and what a step is made of."""


def replayed(
    lab: Lab,
    environments: Sequence[Environment],
    answers: Sequence[Answers],
    setup: Setup,
    workload: str,
    seed: int,
) -> Load:
    """Replay the load in both environments at once. What is wrong with it, or with one of them, is in `failed`."""
    try:
        load = build(workload, seed=seed, tokenizer=tokenizer_of(setup.model, setup.engine_args))
        gpus = max(getattr(side.models[setup.model].figures, "gpus", 1) for side in answers)
        setup = on_gpus(setup, gpus).stock().sized().replayed(verdicts=True).with_load(load)
    except KvtuneError as error:
        return Load(workload=workload, failed=[error.line])
    with ExitStack() as stack:
        benches = []
        for environment in environments:
            interpreter = stack.enter_context(environment.interpreter())
            benches.append(stack.enter_context(lab.simulators_of(interpreter, setup.platform)))
            benches[-1].submit(0, setup)
        runs, failed = [], []
        for environment, bench in zip(environments, benches, strict=True):
            try:
                outcome = bench.next_done()[1]
            except KvtuneError as error:  # its process ended
                outcome = error
            if isinstance(outcome, Run):
                runs.append(outcome)
            else:
                failed.append(f"{environment.name}: {outcome.message}")
    if failed:
        return Load(workload=workload, failed=failed)
    old, new = runs
    parted = list(partings(old, new, *(Path(side.version.site) for side in answers)))
    return Load(workload=workload, old=summed(old), new=summed(new), partings=parted)


def summed(run: Run) -> Replayed:
    sums, steps, requests = add_up(run, run), run.table("steps"), run.table("requests")
    prefill, scheduled = (int(steps[name].sum()) for name in ("prefill_tokens", "scheduled_tokens"))
    answered = requests["output_tokens"] > 1
    rest_ms = 1000 * (requests["finished_s"] - requests["first_token_s"])[answered]
    return Replayed(
        **structs.asdict(Tally.sum([sums.prefix_cache])),
        preemptions=sums.preemptions,
        tokens_computed_twice=sum(sum(causes.values()) for causes in sums.computed_twice.values()),
        steps=len(steps["t_s"]),
        requests_in_a_step=round(float(np.mean(steps["requests"])), 3),
        prefill_tokens=prefill,
        decode_tokens=scheduled - prefill,
        first_token_ms=round(spread(waits_ms(requests)).mean or 0.0, 3),
        token_gap_ms=round(spread(rest_ms / (requests["output_tokens"][answered] - 1)).mean or 0.0, 3),
    )


def partings(old: Run, new: Run, old_site: Path, new_site: Path) -> Iterator[Parting]:
    """Yield the first request whose hits differ, and the first step that is made of something else.

    The symbols are of vLLM's layout of blocks where the blocks' sizes differ.
    """
    layout = old.header.engine.block_size != new.header.engine.block_size
    for what, table, columns in (("request", "requests", ("hit_tokens",)), ("step", "steps", COMPOSITION)):
        sides = (
            zip(*(run.table(table)[name].tolist() for name in columns), strict=True) for run in (old, new)
        )
        pairs = enumerate(zip_longest(*sides), 1)
        number, differing = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, ()))
        if number:
            was, now = (_words(columns, values) for values in differing)
            part = "layout" if layout else DECIDED_BY[what]
            symbols = sorted({str(symbol) for symbol, _ in changed(old_site, new_site, {part: PARTS[part]})})
            yield Parting(what=what, number=number, old=was, new=now, symbols=symbols)


def _words(columns: Sequence[str], values: Sequence[int] | None) -> str:
    if values is None:
        return "none"
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in zip(columns, values, strict=True))
