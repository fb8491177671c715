"""Estimates against exact replays, on engines of one group of full attention."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvtune.answers.capacity.estimate import Window, estimate
from kvtune.answers.capacity.question import PLAUSIBLE, engine_of
from kvtune.answers.capacity.replays import Bench, Task, estimated
from kvtune.answers.capacity.result import Seed
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import StepCost
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.reading.analysis.preemption import preemption
from kvtune.requests.loads.sessions import Slots
from kvtune.requests.loads.spec import build, session_load, with_keys
from tests.simulator import Lent, on

pytestmark = pytest.mark.vllm

POINTS = 0.02
SURE = 0.75


@dataclass(frozen=True, slots=True)
class SetUp:
    """A drawn engine and load. `blocks` are of 16 tokens."""

    model: str
    blocks: int
    spec: str
    sessions: int
    seed: int
    cost: StepCost


def drawn(number: int) -> SetUp:
    rng = random.Random(number)
    context = rng.choice([400, 800, 1500])
    contexts = rng.choice([4, 6, 8, 12])
    blocks = int(contexts * 2.2 * context / 16)
    longest = min(8000, 16 * blocks - 64)
    spec = (
        f"agents:context={context},tools={rng.choice([30, 60, 100])},output={rng.choice([20, 40])},"
        f"turns={rng.choice([8, 15, 25])},think={rng.choice([5, 9])},different=60,window={5 * context},"
        f"subagents={rng.choice([0.0, 0.05])},share={rng.choice(['yes', 'no'])},longest={longest},"
        "max_think=300,hours=0.5"
    )
    return SetUp(
        model=rng.choice(["tiny-llama", "llama-3-8b"]),
        blocks=blocks,
        spec=spec,
        sessions=max(2, round(contexts * rng.uniform(0.6, 1.6))),
        seed=rng.randrange(1000),
        cost=rng.choice(PLAUSIBLE),
    )


def both(of: SetUp) -> tuple[Seed, Seed]:
    """Return the figures of the replay, and of the estimate."""
    longest = min(8192, 16 * of.blocks - 32)
    pool = ["--num-gpu-blocks-override", str(of.blocks)]
    flags = [*pool, "--max-model-len", str(longest)]
    on = Simulated(cost=of.cost, block_tokens=16)
    setup = Setup(model=of.model, engine_args=flags, device=on).sized()
    window = Window(600.0, 1800.0)
    with Lent() as simulators:
        bench = Bench(simulators, of.spec, 0.5, window)
        engine = engine_of(bench.engine(setup), of.cost)
        ((task, exact),) = bench.replayed([Task(of.sessions, of.seed, setup)], engine.unit)
    assert isinstance(exact, Seed), exact
    slots = Slots(session_load(of.spec), task.seed)
    return exact, estimated(estimate(slots, of.sessions, engine, window), of.seed, window)


def check(number: int) -> None:
    exact, guess = both(drawn(number))
    assert exact.requests > 50
    assert guess.infinite == pytest.approx(exact.infinite, abs=0.01)
    if max(exact.kept, guess.kept) >= SURE:  # then it may be printed
        assert abs(guess.kept - exact.kept) <= POINTS, (drawn(number), exact, guess)


@pytest.mark.full
def test_a_point_has_the_tokens_that_its_engine_computed_twice() -> None:
    spec = "agents:context=800,tools=20,output=300,turns=8,think=1,different=100,longest=1500"
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "60", "--max-model-len", "1600"]
    setup = Setup(model="tiny-llama", engine_args=flags, device=Simulated()).sized()
    window = Window(0.0, 60.0)
    with Lent() as simulators:
        bench = Bench(simulators, spec, 1 / 60, window)
        ((_, seed),) = bench.replayed([Task(8, 0, setup)], 32)
        load = build(with_keys(spec, sessions=8, hours=1 / 60))
        ((_, run),) = simulators.run(on(load, [setup.replayed(end_s=60.0, token_rows=0)]))
    assert isinstance(seed, Seed) and isinstance(run, Run)
    known = preemption(run)
    assert known is not None and known.tokens and seed.preempted
    assert seed.computed_twice == known.causes
    assert seed.twice == pytest.approx(known.share, rel=0.01), (
        "a step that ends after the window is not in it"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "number", [2, *(pytest.param(n, marks=pytest.mark.full) for n in range(23) if n != 2)]
)
def test_estimates_are_within_two_points_of_the_replay(number: int) -> None:
    check(number)
