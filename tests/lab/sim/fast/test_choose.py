"""Which steppers a replay gets: by the engine's scheduler and model, the mode, and observers."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.clock import VirtualClock
from kvtune.requests.loads.spec import build as workload_of

# vLLM's imports warn (deprecations of torch): not ours to turn into errors.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

FLAGS = ["--max-model-len", "2048", "--num-gpu-blocks-override", "60"]


def chosen(model: str, *flags: str, needs_single_steps: bool = False, **settings: Any) -> list[str]:
    """Names of the steppers, in the order in which they are asked."""
    pytest.importorskip("vllm")
    from kvtune.lab.sim.build import build
    from kvtune.lab.sim.player import Player

    class Watcher:
        def __init__(self) -> None:
            self.needs_single_steps = needs_single_steps

    wanted = Setup(model=model, engine_args=[*FLAGS, *flags], device=Simulated(**settings))
    clock = VirtualClock()
    engine = build(wanted, clock)
    try:
        player = Player(workload_of("rounds", seed=0), wanted.simulated, engine, clock, [Watcher()])  # type: ignore[list-item]
        return [type(stepper).__name__ for stepper in player._steppers]
    finally:
        engine.scheduler.shutdown()


def test_decode_steps_are_taken_in_bulk() -> None:
    for ahead in (False, True):
        assert chosen("tiny-llama", async_scheduling=ahead) == ["StrideStepper", "ColumnStepper"]
    assert chosen("tiny-qwen3next") == ["StrideStepper", "ColumnStepper"]


def test_without_shortcuts_vllm_makes_every_step() -> None:
    assert chosen("tiny-llama", shortcuts=False) == ["EngineStepper"]
    assert chosen("tiny-llama", shortcuts=False, async_scheduling=True) == ["EngineStepper"]


def test_an_observer_of_single_steps_sees_no_strides() -> None:
    assert chosen("tiny-llama", needs_single_steps=True) == ["EngineStepper"]
