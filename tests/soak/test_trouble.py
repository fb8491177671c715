"""The rounds of a soak: from a seed, within the servers' limits, and with all that a bad day has."""

from __future__ import annotations

from tests.tools.soak.trouble import LONGEST, prompt, trouble

ROUNDS = [trouble(3, number) for number in range(60)]


def test_a_seed_gives_the_same_rounds_and_another_seed_others() -> None:
    assert [trouble(3, number) for number in range(60)] == ROUNDS
    assert trouble(4, 0) != ROUNDS[0]
    ask = ROUNDS[0].asks[0]
    assert prompt(3, ask) == prompt(3, ask) != prompt(4, ask)


def test_requests_fit_but_for_those_that_are_meant_not_to() -> None:
    for each in ROUNDS:
        assert len({ask.number for ask in each.asks}) == len(each.asks)
        for ask in each.asks:
            fits = ask.prompt_tokens >= 1 and ask.prompt_tokens + ask.output <= LONGEST and ask.output > 0
            assert fits == (ask.special not in ("too long", "no tokens")), ask


def test_prompts_share_what_they_say_they_share() -> None:
    first, second = [ask for each in ROUNDS for ask in each.asks if ask.stem == 0 and ask.shared >= 32][:2]
    shared = min(first.shared, second.shared)
    assert prompt(3, first)[:shared] == prompt(3, second)[:shared]
    assert len(prompt(3, first)) == first.prompt_tokens
