"""What the core records belongs to one EngineCore."""

from __future__ import annotations

import time

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import Breaker


def test_each_engine_has_books_and_a_clock() -> None:
    state.activate(CoreSettings())
    state.part("pool", True)
    installed = state.books()
    one, other = installed.branch(lambda: 1.0), installed.branch(lambda: 2.0)
    with state.using(one):
        assert state.clock() == 1.0 and state.active()
        state.gauge(lambda: {"given": 3})
        state.count("audits")
    with state.using(other):
        assert state.clock() == 2.0
        state.gauge(lambda: {"given": 4})
        Breaker().trip(ValueError("it broke"))
    assert state.books() is installed and installed.clock is time.monotonic
    assert one.state()["counters"] == {"given": 3, "audits": 1} and one.state()["parts"]["pool"]
    assert other.state()["counters"] == {"given": 4} and not other.state()["parts"]["pool"]
    assert any("it broke" in note for note in other.notes) and not one.notes
    whole = state.merged([one.state(), other.state()])
    assert whole is not None
    assert whole["counters"] == {"given": 7, "audits": 1} and not whole["parts"]["pool"]
    assert state.counters() == {}, "nothing of theirs is in the process's books"
