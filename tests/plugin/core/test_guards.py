"""Any line of the core may raise: the step ends as stock's would, and every part is vLLM's own from then on.

The lines are those that three loads run, found by tracing, so a line or an override that is new is among them. `make
test` makes the first line of each function of two loads raise, `make full` every line.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from bench import audit
    from kvtune.data.knobs import CoreSettings
    from kvtune.plugin.core import state
    from kvtune.plugin.core.breaker import SWITCHES
    from kvtune.plugin.core.outputs import install
    from tests.plugin.core.guard_rig import Line, lines_of, overrides, raising, run_by
    from tests.plugin.core.outputs import column_rig
    from tests.plugin.core.pool_rig import random_steps
    from tests.plugin.core.steady_rig import Shape, Twins
    from tests.plugin.core.test_breaker import Whole

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ARMED = 40
"""The step from which on a line raises."""


class Unarmed:
    """Stands for `raising` where nothing raises."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def whole(asynchronous: bool, plant: Any = None, policy: str = "first", states: int = 0) -> Whole:
    """A random load on the whole core: each step leaves a consistent pool, and every request gets its tokens."""
    engine = Whole(asynchronous, policy, states)
    random_steps(engine, 7, ARMED, lambda: None)
    with plant or Unarmed():
        random_steps(engine, 8, 110, lambda: None if plant is None else clean(engine))
        engine.drain()
        engine.scheduler.reset_prefix_cache()
        random_steps(engine, 9, 20, lambda: None)
        engine.drain()
        engine.step()  # a scheduler stands down where its next step begins
    clean(engine)
    assert {name: engine.got[name] for name in engine.wanted} == engine.wanted
    return engine


def clean(engine: Whole) -> None:
    assert audit.check(engine.scheduler) == []


def decode(asynchronous: bool, plant: Any = None) -> Twins:
    """Decoding beside stock: the same decisions, blocks, hashes and outputs in every step."""
    twins = Twins(Shape(asynchronous=asynchronous, windows=(12,), blocks=200))
    twins.read_columns(0)

    def steps(count: int, first: int) -> None:
        for step in range(count):
            if step % 9 == 0:
                for i in range(3):
                    twins.add(
                        name=f"r-{first + 3 * step + i}", prompt=[i, step, *range(9 + i)], output=12 + 7 * i
                    )
            if step == 20:
                twins.abort(next(iter(twins.ours.requests)))
            twins.step()
            twins.compare()

    steps(ARMED, 0)
    assert twins.ours.steady_steps > 5
    with plant or Unarmed():
        steps(60, 1000)
    return twins


def front_end(_: bool, plant: Any = None) -> column_rig.Twins:
    """Columns beside vLLM's own output processor: the same chunks and states; statistics may lack a step's."""
    twins = column_rig.Twins(5, log_stats=plant is None)
    draw = twins.draw

    def steps(count: int) -> None:
        for _ in range(count):
            if draw.random() < 0.25:
                twins.add()
            if draw.random() < 0.08:
                twins.abort(internal=draw.random() < 0.5)
            twins.step(draw.choice((1, 1, 3)))
            twins.take(0.5)
            twins.compare()

    for _ in range(12):
        twins.add()
    steps(10)
    with plant or Unarmed():
        steps(50)
    twins.take(1.0)
    twins.compare()
    return twins


LOADS: dict[str, Callable[..., Any]] = {
    "whole": whole,
    "states": partial(whole, states=2),
    "decode": decode,
    "front_end": front_end,
}
POLICIES = {policy: partial(whole, policy=policy) for policy in ("chat", "two_class", "pin")}


@pytest.fixture(autouse=True)
def installed() -> None:
    install.install(CoreSettings())


def is_off(load: str, made: Any) -> str:
    """What of the core is left after an error; empty if nothing is."""
    reported = state.state()
    if not any("from here on" in note for note in reported["notes"]):
        return "no note"
    on = [name for name in SWITCHES if reported["parts"].get(name)]
    if load == "front_end":
        return "front_end" if "front_end" in on else ""
    scheduler = made.ours if load == "decode" else made.scheduler
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    parts = (scheduler, manager, pool, pool.free_block_queue, *manager.coordinator.single_type_managers)
    ours = [type(part).__name__ for part in parts if type(part).__module__.startswith("kvtune.")]
    return ", ".join([*on, *ours])


def guarded(load: str, line: Line, asynchronous: bool) -> str:
    """Run a load in which a line raises. Return what went wrong, or an empty string."""
    state.use(state.Books())
    try:
        made = (LOADS | POLICIES)[load](asynchronous, raising(line))
    except BaseException as error:
        return f"{line}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    left = is_off(load, made)
    return f"{line}: {left}" if left else ""


def firsts(lines: list[Line]) -> list[Line]:
    """The first line of each function."""
    return list({line.function: line for line in reversed(lines)}.values())


@pytest.mark.parametrize("load", ["decode", "front_end"])
def test_the_first_line_of_every_function_may_raise(load: str) -> None:
    lines = lines_of(LOADS[load], True)
    assert len(firsts(lines)) > 15
    assert [wrong for line in firsts(lines) if (wrong := guarded(load, line, True))] == []


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("load", [*LOADS, *POLICIES])
def test_every_line_may_raise(load: str, asynchronous: bool) -> None:
    lines = lines_of((LOADS | POLICIES)[load], asynchronous)
    assert [wrong for line in lines if (wrong := guarded(load, line, asynchronous))] == []


@pytest.mark.full
def test_the_loads_run_every_override_of_a_method_of_vllms() -> None:
    run = {(line.file, line.function) for load in LOADS.values() for line in run_by(load, True)}
    missing = {f"{owner}.{name}" for file, owner, name in overrides() if (file, f"{owner}.{name}") not in run}
    assert missing == set(NOT_RUN)


NOT_RUN = {
    "PolicyPool.unpin_blocks": "a KV connector's",
    "KeepingManager.pop_blocks_for_free": "of frees that are deferred: it does what `free` does",
    "NoopSlots.pop_blocks_for_free": "the same",
    "ColumnCollector.get": "a caller's task: test_callers.py",
    "Queues.get_all_free_blocks": "for tests and tools",
    "Queues.popleft": "the pool's constructor calls it, on vLLM's own queue",
}
"""Overrides that no load above runs, with the place that does."""
