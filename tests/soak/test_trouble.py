"""The rounds of a soak: from a seed, within the servers' limits, and with all that a bad day has."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.tools.soak.client import body
from tests.tools.soak.trouble import ERRORS, LONGEST, SEQUENCES, THEMES, Round, prompt, trouble

ROUNDS = [trouble(3, number) for number in range(60)]


def test_a_seed_gives_the_same_rounds_and_another_seed_others() -> None:
    assert [trouble(3, number) for number in range(60)] == ROUNDS
    assert trouble(4, 0) != ROUNDS[0]
    ask = ROUNDS[0].asks[0]
    assert prompt(3, ask) == prompt(3, ask) != prompt(4, ask)


def test_a_round_survives_json() -> None:
    assert [Round.from_json(json.loads(json.dumps(each.to_json()))) for each in ROUNDS] == ROUNDS


def test_all_kinds_of_trouble_come() -> None:
    asks = [ask for each in ROUNDS for ask in each.asks]
    assert {each.theme for each in ROUNDS} == set(THEMES)
    assert {ask.client for ask in asks} == {"reads", "whole", "cuts", "leaves", "slow", "stuck"}
    specials = {"", "logprobs", "stop", "json", "choices", "sampled", *ERRORS}
    assert {ask.special for ask in asks} == specials
    assert {fault.kind for each in ROUNDS for fault in each.faults} == {"reset", "pause", "clock", "py-spy"}
    assert {fault.value for each in ROUNDS for fault in each.faults if fault.kind == "reset"} == {0.0, 1.0}
    assert len({ask.priority for ask in asks}) > 2
    assert {1, LONGEST - 8} <= {ask.prompt_tokens for ask in asks}
    at_once = max(Counter(ask.at_s for each in ROUNDS for ask in each.asks).values())
    assert at_once > SEQUENCES


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


@pytest.mark.parametrize(
    ("special", "key"),
    [("logprobs", "logprobs"), ("stop", "stop"), ("json", "structured_outputs"), ("choices", "n")],
)
def test_a_special_request_says_so_in_its_body(special: str, key: str) -> None:
    plain = next(ask for each in ROUNDS for ask in each.asks if ask.special == "")
    one = next(ask for each in ROUNDS for ask in each.asks if ask.special == special)
    assert key in body(3, one) and key not in body(3, plain)
