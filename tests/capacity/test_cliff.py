"""The search of tests/tools/bench/cliff.py, on step times that are given: no engine, no clock."""

from __future__ import annotations

import pytest

from kvtune.capacity.estimate import Engine, Window
from kvtune.capacity.replays import Task, figures
from kvtune.capacity.search import FULL, Estimates
from kvtune.engine.setup import Setup, Simulated
from kvtune.fake_device.cost import StepCost
from kvtune.workload.spec import build, session_load, with_keys
from tests.simulator import simulate
from tests.tools.bench.cliff import FLAGS, LOADS, MODEL, filled, spec_of

COST = StepCost(step_us=4_000.0, prefill_token_us=40.0, decode_us=100.0, kv_token_us=0.0)
SECONDS = 60.0
WINDOW = Window(SECONDS / 3, SECONDS)


@pytest.mark.parametrize("full_from", [1, 2, 17, 39, 64, 65])
@pytest.mark.parametrize("near", [1, 20, 64])
def test_the_first_full_number_is_found_and_each_is_tried_once(full_from: int, near: int) -> None:
    tried: list[int] = []

    def waiting(sessions: int) -> float:
        tried.append(sessions)
        return 0.9 if sessions >= full_from else 0.1

    assert filled(waiting, near, 64) == (full_from if full_from <= 64 else 66)
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("name", LOADS)
def test_the_estimate_places_the_cliff_of_a_replay_with_given_step_times(name: str) -> None:
    """Step times are the same for both, so what differs is the estimate alone: a quarter at most."""
    spec = spec_of(name)
    engine = Engine(pool=32_000, unit=32, chunk=256, max_num_seqs=64, cost=COST)
    predicted = Estimates(session_load(spec), engine, WINDOW, [0]).filling().low
    on = Setup(model=MODEL, engine_args=FLAGS, device=Simulated(cost=COST, end_s=SECONDS, token_rows=0))

    def waiting(sessions: int) -> float:
        load = build(with_keys(spec, sessions=sessions), seed=0)
        return figures(simulate(load, on), load, WINDOW, engine.unit, Task(sessions, 0, on)).waiting

    seen = filled(waiting, predicted, 64)
    assert predicted == pytest.approx(seen, rel=0.25)
    assert waiting(seen) > FULL >= waiting(seen - 1)
