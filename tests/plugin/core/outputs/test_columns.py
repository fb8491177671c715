"""Columns against vLLM's own output processor: the same chunks, states and statistics, whatever happens between."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.outputs import install
from tests.plugin.core.outputs.column_rig import Twins

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def installed() -> None:
    install.install(CoreSettings())


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    log_stats=st.booleans(),
    interval=st.sampled_from((1, 1, 1, 4)),
    text=st.booleans(),
    most=st.sampled_from((1, 1, 3)),
    share=st.sampled_from((1.0, 0.5, 0.1)),
)
def test_every_schedule_of_outputs_gives_what_stock_gives(
    seed: int, log_stats: bool, interval: int, text: bool, most: int, share: float
) -> None:
    twins = Twins(seed, log_stats=log_stats, interval=interval, text=text)
    draw = twins.draw
    for _ in range(12):
        twins.add()
    for _ in range(60):
        if draw.random() < 0.25:
            twins.add()
        if draw.random() < 0.08:
            twins.abort(internal=draw.random() < 0.5)
        twins.step(most)
        twins.take(share)
        twins.compare()
    twins.take(1.0)
    twins.compare()
    assert twins.by_column > 0
