"""What a run file says of the core: EngineCore's account, and the workers', where blocks are sized."""

from __future__ import annotations

import pytest

from kvtune.engine.record import _core, _core_notes
from kvtune.report.banners import banners
from kvtune.run.types import CoreInfo
from tests.golden.synthetic import rounds_run

ASKED = CoreInfo(name="kvtune", settings={"packed": True})
ENGINE = {
    "active": True,
    "settings": {"packed": True},
    "parts": {"packed": True, "pool": True},
    "notes": ["a"],
}


@pytest.mark.parametrize(("worker", "in_force"), [(True, True), (False, False)])
def test_blocks_are_packed_where_both_say_so(worker: bool, in_force: bool) -> None:
    found = _core(ASKED, ENGINE, [{"parts": {"packed": True}}, {"parts": {"packed": worker}}])
    assert found.parts == {"packed": in_force, "pool": True} and found.active


def test_a_refusal_of_the_workers_is_in_the_notes_and_on_the_page() -> None:
    why = "packed: a KV connector moves pages by stock's layout"
    assert _core_notes([ENGINE, {"notes": [why, "a"]}, {}]) == ["a", why]
    core = CoreInfo(name="kvtune", active=True, parts={"packed": False})
    run = rounds_run(core=core)
    titles = [banner.title for banner in banners(run)]
    assert "Blocks stayed vLLM's own: packed is not in force." in titles
    in_force = rounds_run(core=CoreInfo(name="kvtune", active=True, parts={"packed": True}))
    assert not any("packed" in banner.title for banner in banners(in_force))
