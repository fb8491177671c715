"""The core in a run file: EngineCore's report and those of the workers, which size blocks."""

from __future__ import annotations

import pytest

from kvtune.data.run.types import CoreInfo
from kvtune.lab.engine.record import _core_notes
from kvtune.plugin.core.state import CoreState
from kvtune.reading.report.banners import banners
from tests.golden.synthetic import rounds_run


def state(parts: dict[str, bool], notes: list[str]) -> CoreState:
    """What `core.state.state()` returns in a process with these parts and notes."""
    return {
        "active": True,
        "why": "",
        "settings": {"packed": True},
        "parts": parts,
        "counters": {},
        "notes": notes,
    }


ENGINE = state({"packed": True, "pool": True}, ["a"])


@pytest.mark.parametrize(("worker", "in_force"), [(True, True), (False, False)])
def test_blocks_are_packed_if_engine_core_and_workers_report_it(worker: bool, in_force: bool) -> None:
    core = CoreInfo.reported(
        "kvtune", {"packed": True}, ENGINE, [state({"packed": True}, []), state({"packed": worker}, [])]
    )
    assert core.parts == {"packed": in_force, "pool": True} and core.active


def test_a_workers_refusal_is_in_the_notes_and_on_the_page() -> None:
    why = "packed: a KV connector moves pages by stock's layout"
    assert _core_notes("0.32.0", [ENGINE, state({}, [why, "a"]), state({}, [])]) == ["a", why]
    core = CoreInfo(name="kvtune", active=True, parts={"packed": False})
    run = rounds_run(core=core)
    titles = [banner.title for banner in banners(run)]
    assert "Blocks stayed vLLM's own: packed is not in force." in titles
    in_force = rounds_run(core=CoreInfo(name="kvtune", active=True, parts={"packed": True}))
    assert not any("packed" in banner.title for banner in banners(in_force))
