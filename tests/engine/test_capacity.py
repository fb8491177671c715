"""What replays say of N sessions at once, before any engine ran, and what the CPU engine then hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtune.engine.setup import Setup, Simulated
from kvtune.workload.spec import build
from tests.engine.real import profiled
from tests.recorded_sessions import unpacked
from tests.simulator import simulate

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

FLAGS = ("--num-gpu-blocks-override", "40", "--block-size", "32", "--max-model-len", "1024")
AGENTS = (
    "agents:sessions={sessions},different=20,turns=6,context=120,tools=20,output=8,window=600,longest=900,"
    "subagents=0.2,max_think=0,hours=0.0001,concurrency=1"
)


@pytest.mark.parametrize("sessions", [2, 4, 8])
def test_the_engine_hits_what_was_predicted(tmp_path: Path, sessions: int) -> None:
    """One request at a time and no pauses: the order is fixed, so each request's hits are predicted to the token."""
    load = AGENTS.format(sessions=sessions)
    on_paper = Setup(model="tiny-llama", engine_args=list(FLAGS), core="stock", device=Simulated())
    predicted = simulate(build(load), on_paper).table("requests")["hit_tokens"]
    run = profiled(tmp_path, "tiny-llama", "-w", load, "--core", "stock", engine=FLAGS).run
    np.testing.assert_array_equal(run.table("requests")["hit_tokens"], predicted)
    assert 0.1 < predicted.sum() / run.table("requests")["prompt_tokens"].sum() < 0.8


def test_the_engine_plays_recorded_sessions_with_their_pauses(tmp_path: Path) -> None:
    """A turn is sent no earlier than all that it waits for and its pause."""
    folder = unpacked(tmp_path)
    load = f"trace:path={folder},limit=3,sessions=2,longest=40k,max_think=20,speed=400,hours=0.0002"
    flags = ("--num-gpu-blocks-override", "2600", "--block-size", "32", "--max-model-len", "40960")
    (out := tmp_path / "out").mkdir()
    run = profiled(out, "tiny-llama", "-w", load, engine=flags).run
    requests = run.table("requests")
    sent, ended = requests["sent_s"], requests["finished_s"]
    for at, request in enumerate(build(load).requests):
        for before in request.after:
            assert sent[at] >= ended[before] + request.think_s - 1e-3
    assert np.isfinite(ended).all()
