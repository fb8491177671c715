"""A run of two engines that share a load: each has steps, requests and a cache of its own. Made runs."""

from __future__ import annotations

import numpy as np
import pytest

from kvtune.answers.explain.explanation import as_routed
from kvtune.base.errors import UsageError
from kvtune.data.run.engines import of_engine, ranks, served_by
from kvtune.data.run.extras import GIVEN
from kvtune.data.run.types import EngineInfo, ProcessInfo, Run
from kvtune.lab.device.fit import fit
from kvtune.lab.setup.setup import Load, Setup
from kvtune.plugin.core.state import CoreState, merged
from kvtune.reading.analysis.step_time import step_time
from kvtune.requests.loads.spec import build
from tests.reading.analysis.made import served, table, workload_of

STEPS = 60
TWO = [
    ProcessInfo(pid=1, role="front_end"),
    ProcessInfo(pid=2, role="engine_core", name="EngineCore_DP0"),
    ProcessInfo(pid=3, role="engine_core", name="EngineCore_DP1"),
]


def shared() -> Run:
    """Four requests in turns on two engines; steps of 8 and 16 ms at the same times, nearly without gaps."""
    starts = [i * 0.02 for i in range(STEPS)]
    steps = table(
        "steps",
        process=[1, 2] * STEPS,
        t_s=[t for start in starts for t in (start, start + 0.001)],
        step_us=[8_000.0, 16_000.0] * STEPS,
        scheduled_tokens=[2] * 2 * STEPS,
        requests=[2] * 2 * STEPS,
        running=[2] * 2 * STEPS,
    )
    work = workload_of([[]] * 4, output=STEPS // 2)
    run = served(
        work,
        [0, 16, 32, 48],
        sent=[0.0] * 4,
        tables={"steps": steps, "tokens": table("tokens", request=[0, 1, 2, 3], t_s=[0.1, 0.2, 0.3, 0.4])},
        processes=TWO,
        wall_s=STEPS * 0.02,
        engine=EngineInfo(vllm="0.32.0", device="cpu", engines=2, kv_specs={"version": 1}),
    )
    run.table("requests")["engine"][:] = [0, 1, 0, 1]
    return run


def test_each_engine_has_its_requests_and_its_steps() -> None:
    run = shared()
    assert ranks(run) == [0, 1]
    assert served_by(run, 1).tolist() == [False, True, False, True]
    second = of_engine(run, 1)
    assert set(second.table("steps")["process"]) == {2} and len(second.table("steps")["t_s"]) == STEPS
    assert second.table("tokens")["request"].tolist() == [1, 3]
    assert np.isfinite(second.table("requests")["sent_s"]).tolist() == [False, True, False, True]


def test_a_run_of_one_engine_is_all_its_own() -> None:
    one = served(workload_of([[]] * 2), [0, 0])
    assert ranks(one) == [0] and of_engine(one, 0) is one and served_by(one, 0).all()


def test_two_engines_are_busy_for_their_share_of_the_time_at_most() -> None:
    """8 and 16 ms of every 20 ms: 60 % on average, not 120 %."""
    assert step_time(shared()).busy_share == pytest.approx(0.6)


def test_a_step_cost_is_fitted_to_the_steps_of_one_engine() -> None:
    """From the end of an engine's step to its own next one are 12 ms; the other engine's steps do not count."""
    cost = fit(shared())
    assert cost.between_us == pytest.approx(12_000.0, rel=0.01)
    assert cost.step_us + 2 * cost.decode_us == pytest.approx(8_000.0, rel=0.05)


def test_like_refuses_a_run_of_several_engines() -> None:
    job = Setup(model="tiny-opt", load=Load.of(build("rounds", seed=0)), core="kvtune")
    with pytest.raises(UsageError, match="2 engines shared that run's load"):
        job.like(shared())


def test_a_run_of_several_engines_is_replayed_as_it_was_routed() -> None:
    setup = Setup(model="tiny-opt")
    routed = as_routed(shared(), setup).simulated
    assert (routed.replicas, routed.router, routed.routed) == (2, GIVEN, [0, 1, 0, 1])
    assert as_routed(served(workload_of([[]] * 2), [0, 0]), setup) is setup


def test_the_cores_of_several_engines_are_one_report() -> None:
    def state(active: bool, hits: int, rows: bool, note: str) -> CoreState:
        return {
            "active": active,
            "why": "" if active else "switched off",
            "settings": {"slack": 128},
            "parts": {"pool": True, "rows": rows},
            "counters": {"hits": hits},
            "notes": ["same", note],
        }

    both = merged([state(True, 3, True, "a"), state(False, 4, False, "b")])
    assert both is not None and not both["active"] and both["why"] == "switched off"
    assert both["parts"] == {"pool": True, "rows": False} and both["counters"] == {"hits": 7}
    assert both["notes"] == ["same", "a", "b"] and merged([]) is None
