"""Who was passed, since when and until when, against a list of all admissions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.admission.passes import Passes


@given(st.permutations(range(12)), st.integers(0, 12))
def test_waits_are_those_of_the_whole_history(order: list[int], admitted: int) -> None:
    """All came before the first admission; one is admitted a second, at second 0, 1, 2 .."""
    passes = Passes()
    for at_s, number in enumerate(order[:admitted]):
        passes.admitted(at_s)
        passes.passed(number, at_s)
    for number in order[admitted:]:
        by = [at_s for at_s, other in enumerate(order[:admitted]) if other > number]
        assert passes.since_s(number) == (by[0] if by else None)
        assert passes.wait_s(number, admitted) == (by[-1] + 1 - by[0] if by else None)


@given(st.permutations(range(12)))
def test_what_is_forgotten_is_not_asked_for_again(order: list[int]) -> None:
    whole, short = Passes(), Passes()
    for at_s, number in enumerate(order):
        waiting = sorted(order[at_s:])
        short.forget(waiting[0])
        assert [short.since_s(n) for n in waiting] == [whole.since_s(n) for n in waiting]
        for one in (whole, short):
            one.admitted(at_s)
            one.passed(number, at_s)
