from __future__ import annotations

import pytest

from kvtune.base.errors import EXIT_UNKNOWN, EXIT_USAGE, KvtuneError, UsageError
from kvtune.reading.analysis.comparison.fail_on import parse_fail_on

A = {
    "ttft_ms": {"mean": 20.0, "p99": None},
    "rounds": [{"hit_tokens": 0}, {"hit_tokens": 50}],
    "gc": {},
    "name": "x",
}
B = {
    "ttft_ms": {"mean": 21.5, "p99": None},
    "rounds": [{"hit_tokens": 5}, {"hit_tokens": 40}],
    "gc": {},
    "name": "x",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("ttft_ms.mean > +5%", True),
        ("ttft_ms.mean > 5%", True),
        ("ttft_ms.mean>+7.5%", False),
        ("ttft_ms.mean >= +7.5%", True),
        ("ttft_ms.mean > +8%", False),
        ("ttft_ms.mean > +1", True),
        ("ttft_ms.mean > +2", False),
        ("ttft_ms.mean > 21", True),
        ("ttft_ms.mean > 22", False),
        ("ttft_ms.mean == 21.5", True),
        ("ttft_ms.mean != 21.5", False),
        ("rounds.1.hit_tokens < -10%", True),
        ("rounds[1].hit_tokens < -20%", False),
        ("rounds[1].hit_tokens <= -10", True),
        ("rounds.0.hit_tokens > +1000%", True),  # from nothing: more than any share
        ("ttft_ms.mean > +5% and rounds[1].hit_tokens > 45", False),
        ("ttft_ms.mean > +5% and rounds[1].hit_tokens > 35", True),
        ("ttft_ms.mean > +50% or rounds[1].hit_tokens > 35", True),
        ("ttft_ms.mean > 5% or ttft_ms.mean > 5% and ttft_ms.mean > 50%", True),
    ],
)
def test_conditions_hold_as_written(text: str, holds: bool) -> None:
    outcome = parse_fail_on(text).evaluate(A, B)
    assert outcome.holds is holds
    assert bool(outcome.reasons) is holds


def test_the_reason_has_the_values() -> None:
    (reason,) = parse_fail_on("ttft_ms.mean > +5%").evaluate(A, B).reasons
    assert reason == "ttft_ms.mean > +5%: 20 -> 21.5 is +7.5 %"
    (reason,) = parse_fail_on("ttft_ms.mean > 5").evaluate(A, B).reasons
    assert reason == "ttft_ms.mean > 5: it is 21.5"


def test_zero_to_zero_is_no_change() -> None:
    zero = {"x": 0.0}
    assert not parse_fail_on("x > +5%").evaluate(zero, zero).holds
    assert parse_fail_on("x < -5%").evaluate(zero, {"x": -1.0}).holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft_ms.mean",
        "ttft_ms.mean > x",
        "> 5%",
        "ttft_ms.mean > 5% and",
        "a > 1 or",
        "a => 1",
        "a > 1 5",
    ],
)
def test_a_part_that_is_not_a_condition_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-on") as caught:
        parse_fail_on(text)
    assert "ttft_ms.mean > +5%" in caught.value.hint


def test_unknown_fields_and_missing_values_are_named() -> None:
    with pytest.raises(UsageError, match=r"no field 'ttft_ms\.men'") as unknown:
        parse_fail_on("ttft_ms.men > 5%").evaluate(A, B)
    assert unknown.value.exit_code == EXIT_USAGE
    assert "ttft_ms.mean" in unknown.value.hint
    for path in ("ttft_ms.p99", "gc.engine_core.pause_ms.total", "name"):
        with pytest.raises(KvtuneError, match="has no value") as missing:
            parse_fail_on(f"{path} > 5").evaluate(A, B)
        assert missing.value.exit_code == EXIT_UNKNOWN
    with pytest.raises(UsageError):
        parse_fail_on("rounds.7.hit_tokens > 5").evaluate(A, B)
