"""An engine without requests refers to none of those it had: their tokens would stay until the next ones come."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.core.steady_rig import OUTLET, Outlet, Shape, Twins

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def ended(twins: Twins, aborts: bool) -> list[weakref.ref[Any]]:
    """Requests that ended on the steady path; one of them was not a plain decode."""
    for i in range(8):
        options = {"logprobs": 1} if i == 7 else {}
        twins.add(name=f"r-{i}", prompt=[i, *range(5 + 3 * i)], output=3 if i == 7 else 30, **options)
    refs = [weakref.ref(one) for one in twins.ours.requests.values()]
    while twins.ours.has_requests():
        twins.step()
        if aborts and twins.steps == 12:
            for i in range(8):
                twins.abort(f"r-{i}")
    while twins.queue:
        twins.update()
    assert twins.ours.steady_steps > 3
    gc.collect()
    return refs


@BOTH
@pytest.mark.parametrize("aborts", [False, True], ids=["read", "aborted"])
def test_a_scheduler_forgets_the_rows_of_its_last_steady_step(asynchronous: bool, aborts: bool) -> None:
    twins = Twins(Shape(asynchronous=asynchronous))
    refs = ended(twins, aborts)
    assert [ref() for ref in refs if ref() is not None] == []


def test_columns_forget_the_rows_of_their_last_step_once_no_request_is_left() -> None:
    from kvtune.core.outputs.install import _wrap_finished_step

    twins = Twins(Shape())
    twins.read_columns(0)
    refs = ended(twins, aborts=False)
    outlet: Outlet = getattr(twins.ours, OUTLET)
    assert twins.readers[0].messages > 3
    engine = SimpleNamespace(scheduler=SimpleNamespace(requests={"another": 1}), **{OUTLET: outlet})
    step_ends: Any = _wrap_finished_step(lambda engine, outputs: None)
    step_ends(engine, {})
    assert [ref() for ref in refs if ref() is not None]  # while requests live the rows may be of use
    engine.scheduler.requests.clear()
    step_ends(engine, {})
    gc.collect()
    assert [ref() for ref in refs if ref() is not None] == []
