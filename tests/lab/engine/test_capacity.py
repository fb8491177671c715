"""What replays say of N sessions at once, before any engine ran, and what the CPU engine then hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtune.requests.loads.spec import build
from tests.lab.engine.real import profiled
from tests.recorded_sessions import unpacked

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]


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
