"""A failure's requests become fewer, of as few rounds as will do."""

from __future__ import annotations

from collections.abc import Sequence

from tests.tools.soak.failure import fewest
from tests.tools.soak.trouble import Round, trouble

ROUNDS = [trouble(5, number) for number in range(3)]


def numbers(rounds: Sequence[Round]) -> set[int]:
    return {ask.number for each in rounds for ask in each.asks}


def test_a_round_that_fails_alone_is_shrunk_alone() -> None:
    culprits = {ROUNDS[2].asks[4].number, ROUNDS[2].asks[40].number}
    few = fewest(ROUNDS, lambda rounds: culprits <= numbers(rounds))
    assert few is not None and len(few) == 1
    assert culprits <= numbers(few) and len(numbers(few)) < 20
    assert few[0].faults == ROUNDS[2].faults


def test_a_round_that_needs_the_one_before_it_is_shrunk_with_it() -> None:
    culprits = {ROUNDS[1].asks[7].number, ROUNDS[2].asks[3].number}
    few = fewest(ROUNDS, lambda rounds: culprits <= numbers(rounds))
    assert few is not None and [each.number for each in few] == [1, 2]
    assert culprits <= numbers(few) and len(numbers(few)) < 30


def test_what_holds_on_fresh_servers_is_not_shrunk() -> None:
    assert fewest(ROUNDS, lambda rounds: False) is None
