"""Exact replays of sessions: what a point has, and what the range over seeds promises of others."""

from __future__ import annotations

from functools import partial

import pytest

from kvtune.answers.capacity.question import Question, answer
from kvtune.answers.capacity.replays import Bench, Seed, Task, Window
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.reading.analysis.preemption import preemption
from kvtune.requests.loads.spec import build, with_keys
from tests.simulator import Lent, on

pytestmark = pytest.mark.vllm


def replayed(bench: Bench, tasks: list[Task]) -> list[Seed]:
    """Replay each task, and return the figures in the order of the tasks."""
    waiting = list(tasks)
    while waiting or bench.running:
        while waiting and bench.is_free:
            bench.begin(waiting.pop())
        bench.ended()
    seeds = [bench.made[task] for task in tasks]
    assert all(isinstance(seed, Seed) for seed in seeds), seeds
    return [seed for seed in seeds if isinstance(seed, Seed)]


@pytest.mark.full
def test_a_point_has_the_tokens_that_its_engine_computed_twice() -> None:
    spec = "agents:context=800,tools=20,output=300,turns=8,think=1,different=100,longest=1500"
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "60", "--max-model-len", "1600"]
    setup = Setup(model="tiny-llama", engine_args=flags, device=Simulated()).sized()
    window = Window(0.0, 60.0)
    with Lent() as simulators:
        bench = Bench(simulators, spec, 1 / 60, window, unit=32)
        (seed,) = replayed(bench, [Task(8, 0, setup)])
        load = build(with_keys(spec, sessions=8, hours=1 / 60))
        ((_, run),) = simulators.run(on(load, [setup.replayed(end_s=60.0, token_rows=0)]))
    assert isinstance(run, Run)
    known = preemption(run)
    assert known is not None and known.tokens and seed.preempted
    assert seed.computed_twice == known.causes
    assert seed.twice == pytest.approx(known.share, rel=0.01), (
        "a step that ends after the window is not in it"
    )


@pytest.mark.full
def test_at_the_low_end_seeds_that_were_not_searched_keep_and_at_the_high_end_none_does() -> None:
    spec = "agents:context=800,tools=60,output=30,turns=15,think=6,different=40,longest=6000,max_think=60"
    flags = ["--block-size", "16", "--num-gpu-blocks-override", "900", "--max-model-len", "8192"]
    setup = Setup(model="tiny-llama", engine_args=flags, device=Simulated()).sized()
    with Lent() as simulators:
        benches: list[Bench] = []

        def bench_of(spec: str, hours: float, window: Window) -> Bench:
            benches.append(Bench(simulators, spec, hours, window))
            return benches[0]

        told = answer(
            Question("tiny-llama", f"{spec},hours=0.3", setup, remedies=False), bench_of, lambda _: None
        )
        ends = told.answers[0].sessions
        assert 1 < ends.low < ends.high <= 3 * ends.low and told.answers[0].limit == "pool"
        task = partial(Task, setup=setup)
        low, high = (
            replayed(benches[0], [task(n, seed) for seed in (50, 51, 52)]) for n in (ends.low, ends.high)
        )
    assert all(seed.kept >= 0.9 for seed in low), low
    assert all(seed.kept < 0.9 for seed in high), high
