"""The load that a recipe holds for: written from the answer of `kvtune capacity`, and replayed to verify it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from kvtune import __version__
from kvtune.answers.capacity.estimate import Window
from kvtune.answers.capacity.question import WARM_SHARE, engine_of
from kvtune.answers.capacity.replays import Bench, Seed, Task
from kvtune.answers.capacity.result import Capacity
from kvtune.answers.capacity.search import MET
from kvtune.answers.tune.recipes.make import assembled
from kvtune.answers.tune.recipes.shelf import find, load, shipped
from kvtune.answers.tune.recipes.verify import VerifiedSessions, expired, usable
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.masking import without_secrets
from kvtune.base.units import count, percent
from kvtune.data.recipe import (
    Recipe,
    SessionReplays,
    SessionsEvidence,
    engine_flags,
    sessions_of,
    text_of,
    write_recipe,
)
from kvtune.data.run.signature import identity, refuse_foreign, signature
from kvtune.lab.device.cost import StepCost
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.offload_flags import joined
from kvtune.lab.setup.resolve import tokenizer_of
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.sources import Sources
from kvtune.requests.loads.spec import build, parsed, with_keys

AGAIN = "run `kvtune capacity MODEL -w LOAD --recipe RECIPE --save FILE` again"


def saved_as(setup: Setup, spec: str) -> str:
    """Return the identity that such a recipe's file carries: of the question, not of the answer."""
    return identity("capacity", setup.filed(), spec)


@dataclass(frozen=True, slots=True)
class Saving:
    """A recipe to write. `base`: the one whose settings are replayed; `of`: what marks its file."""

    path: Path
    setup: Setup
    base: Recipe | None
    of: str
    force: bool

    @classmethod
    def begin(cls, path: Path, setup: Setup, spec: str, recipe: str, *, force: bool = False) -> Self:
        """Return it; UsageError, before any work, if the file may not be written or would not hold.

        `recipe`: a file or a name, "" for none. Its own file may be written again, if it did not come with kvtune.
        """
        owner, base = saved_as(setup, spec), None
        if recipe:
            source = find(recipe)
            base = load(source)
            refuse_other_settings(base, str(source), setup)
            if path.resolve() == source.resolve():
                if shipped(source):
                    raise UsageError(f"--save: {path} came with kvtune", "give another file")
                force = True
        refuse_foreign(path, owner, force=force)
        return cls(path, setup, base, owner, force)

    def write(self, capacity: Capacity) -> Path:
        """Write the recipe. KvtuneError if the hits stay with no number of sessions."""
        made = holding(self.base, self.setup, capacity)
        refuse_foreign(self.path, self.of, force=self.force)
        write_recipe(made, self.path, signature(self.of))
        return self.path


def refuse_other_settings(recipe: Recipe, where: str, setup: Setup) -> None:
    """Raise UsageError if flags change or add what the recipe sets: it would not hold for the load."""
    set_up = _recipe(setup, {}, "", "").engine
    for name, value in set_up.items():
        if name not in recipe.engine or text_of(recipe.engine[name]).lower() != text_of(value).lower():
            says = f"has {text_of(recipe.engine[name])}" if name in recipe.engine else "does not set it"
            raise UsageError(
                f"--save: {name} is {text_of(value)}, and {where} {says}",
                "leave the flag out, or leave --recipe out and save a new recipe",
            )


def holding(base: Recipe | None, setup: Setup, capacity: Capacity) -> Recipe:
    """Return the recipe with what was found. `base`: the one whose settings were replayed; None: a new one of `setup`.

    KvtuneError if the hits stay with no number of sessions.
    """
    if not capacity.held:
        least = min(point.sessions for point in capacity.curve if point.by == "replay")
        raise KvtuneError(
            f"no recipe was written: with {least} sessions at once, not every seed keeps {percent(capacity.keep)} of "
            "what is possible",
            "a larger pool, a lower --keep, or --sessions N with a smaller number",
        )
    asked = next(answer for answer in capacity.answers if answer.keep == capacity.keep)
    ends = {capacity.held, max(capacity.held, min(asked.sessions.high, asked.sessions.most))}
    engine, end_s = capacity.engine, capacity.hours * 3600
    held = SessionsEvidence(
        up_to=capacity.held,
        keep=capacity.keep,
        workload=capacity.load.played,
        measured_s=(end_s * WARM_SHARE, end_s),
        engine_args=without_secrets(setup.engine_args),
        replays={
            str(point.sessions): _replays(point.seeds)
            for point in capacity.curve
            if point.by == "replay" and point.sessions in ends
        },
        searched=[asked.sessions.low, asked.sessions.high],
        slo=dict(capacity.slo.limits) if capacity.slo is not None else {},
        like_device=engine.like_device,
        like_run=bool(setup.simulated.specs),
        pool_blocks=capacity.pool.blocks,
        block_tokens=capacity.pool.block_tokens,
        async_scheduling=engine.async_scheduling,
        cost={
            name: value
            for name, value in msgspec.to_builtins(setup.simulated.cost).items()
            if name.endswith("_us") and "error" not in name
        },
        cost_source=capacity.cost.source,
        vllm=engine.vllm,
        kvtune=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    evidence = {"sessions": msgspec.to_builtins(held)}
    if base is not None:
        return replace(base, evidence={**base.evidence, **evidence})
    facts = {name: getattr(engine, name) for name in ("device", "device_name", "state_dtype")}
    made = _recipe(setup, facts, engine.vllm, f"holds for up to {capacity.held} sessions at once")
    return replace(made, evidence=evidence)


def _recipe(setup: Setup, engine: Mapping[str, str], vllm: str, note: str) -> Recipe:
    python = ".".join(map(str, sys.version_info[:3]))
    summary = {"engine": engine, "python": python}
    return assembled(replace(setup, vllm=vllm), {}, summary, "simulated", {}, note)


def _replays(seeds: list[Seed]) -> SessionReplays:
    return SessionReplays(
        seeds=[seed.seed for seed in seeds],
        workload_hashes=[seed.workload_hash for seed in seeds],
        hit_tokens=[seed.hit_tokens or 0 for seed in seeds],
        possible_tokens=[seed.possible_tokens or 0 for seed in seeds],
        met=[seed.met for seed in seeds if seed.met is not None],
    )


def verify_sessions(
    recipe: Recipe,
    where: str,
    *,
    model: str = "",
    trace: Path | None = None,
    trusted: bool = False,
    phase: Callable[[str], None] = lambda text: None,
    lab: Lab = LAB,
) -> VerifiedSessions:
    """Replay the sessions of the recipe on the engine that it sets up here.

    UsageError if its log is gone, or is another one.
    """
    held = sessions_of(recipe)
    assert held is not None
    setup = _set_up(recipe, held, where, model, trace, trusted)
    tokenizer = tokenizer_of(setup.model, setup.engine_args)
    spec, numbers = setup.load.spec, sorted(map(int, held.replays))
    hours = parsed(spec, 0)[1].get("hours")
    if hours is None:
        raise UsageError(f"{where}: the load {spec!r} has no sessions", AGAIN)
    filed = held.replays[str(held.up_to)]
    sources = Sources()
    at_most = with_keys(spec, sessions=held.up_to)
    first = build(at_most, seed=filed.seeds[0], tokenizer=tokenizer, sources=sources)
    if first.hash != filed.workload_hashes[0]:
        raise UsageError(
            f"{where}: the load {spec!r} is not the one that it holds for: its requests are others",
            f"restore its file, or {AGAIN}",
        )
    by_number: dict[int, list[Seed]] = {number: [] for number in numbers}
    with lab.simulators(setup.model, setup.platform) as simulators:
        window = Window(*held.measured_s)
        bench = Bench(simulators, spec, float(hours), window, tokenizer, held.slo, sources=sources)
        info = bench.engine(setup)
        tasks = [Task(n, seed, setup) for n in numbers for seed in held.replays[str(n)].seeds]
        for task, figures in bench.replayed(tasks, engine_of(info, setup.simulated.cost).unit):
            if isinstance(figures, KvtuneError):
                raise figures
            by_number[task.sessions].append(figures)
            phase(f"replayed {bench.made} of {len(tasks)}")
    seeds = sorted(by_number[held.up_to], key=lambda seed: filed.seeds.index(seed.seed))
    holds = all(seed.kept >= held.keep and (seed.met is None or seed.met >= MET) for seed in seeds)
    ends = {number: _replays(sorted(by_number[number], key=lambda seed: seed.seed)) for number in numbers}
    others = expired(replace(recipe, recipe=replace(recipe.recipe, vllm=held.vllm, kvtune=held.kvtune)))
    text = _said(held, holds, ends, info.num_blocks, info.block_size)
    return VerifiedSessions(
        holds=holds,
        text=f"made with {', '.join(others)}; {text}" if others else text,
        up_to=held.up_to,
        keep=held.keep,
        replays={
            str(number): {"kept": each.kept, **msgspec.to_builtins(each)} for number, each in ends.items()
        },
        pool_tokens=info.num_blocks * info.block_size,
        differences=others,
    )


def _set_up(
    recipe: Recipe, held: SessionsEvidence, where: str, model: str, trace: Path | None, trusted: bool
) -> Setup:
    """Return the engine that the recipe sets up, with the pool and step times of its replays."""
    evidence = {
        "workload": held.workload,
        "seed": 0,
        "workload_hash": "",
        "engine_args": held.engine_args,
        "like_device": held.like_device,
    }
    setup = Setup.of_recipe(
        replace(recipe, evidence=evidence), where, model=model, trace=trace, trusted=trusted
    )
    settings = dict(recipe.core) if recipe.recipe.core == "kvtune" else {}
    flags = joined(setup.engine_args, engine_flags(usable(recipe)[0]))
    setup = replace(setup, engine_args=flags, core_settings=settings).replayed(cost=_cost(held, where))
    if held.like_run:
        setup = setup.with_pool(held.pool_blocks, held.block_tokens)
        setup = setup.replayed(async_scheduling=held.async_scheduling)
    return setup.sized()


def _cost(held: SessionsEvidence, where: str) -> StepCost:
    try:
        return msgspec.convert(held.cost, StepCost)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: [evidence.sessions.cost] {error}", AGAIN) from error


def _said(
    held: SessionsEvidence, holds: bool, ends: Mapping[int, SessionReplays], blocks: int, block_tokens: int
) -> str:
    words = "holds" if holds else "does not hold"
    parts = [f"{words} for up to {held.up_to} sessions at once, over {percent(held.keep)} asked for"]
    for number, now in ends.items():
        then = held.replays[str(number)]
        same = now.hit_tokens == then.hit_tokens and now.possible_tokens == then.possible_tokens
        before = (
            ", the same tokens as when it was made" if same else f"; when it was made {shares(then.kept)}"
        )
        parts.append(f"{number} keep {shares(now.kept)} of what is possible{before}")
        if now.met:
            parts.append(f"{shares(now.met)} of their requests within limits")
    tokens = blocks * block_tokens
    if (made := held.pool_blocks * held.block_tokens) and tokens != made:
        parts.append(f"the pool has {count(tokens)} tokens, {count(made)} when it was made")
    return "; ".join(parts)


def shares(values: list[float]) -> str:
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"
