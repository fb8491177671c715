"""Every token of a prompt is a hit or has exactly one cause, whatever the boundaries say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtune.data.causes import REPLAYED
from kvtune.lab.sim.verdicts.causes import Boundaries, split

positions = st.integers(0, 2000)


def at(prompt: int = 100, *, evicted_for_draft: bool = False, **known: int) -> Boundaries:
    """A prompt of which everything was seen, kept and hit up to its last whole block of 16, unless said."""
    given_ = {"hit": 96, "alone": 96, "ever": 96, "reachable": 96, "whole": 96, "seen": 100, **known}
    return Boundaries(prompt=prompt, evicted_for_draft=evicted_for_draft, **given_)


def parts(boundaries: Boundaries) -> dict[str, int]:
    return {cause: tokens for cause, tokens in split(boundaries).misses.items() if tokens}


@given(st.builds(Boundaries, *[positions] * 7, st.booleans(), positions, positions, st.booleans()))
def test_causes_add_up_to_the_prompt_and_are_never_negative(boundaries: Boundaries) -> None:
    counts = split(boundaries).misses
    assert set(counts) == set(REPLAYED)
    assert min(counts.values()) >= 0
    assert sum(counts.values()) + min(boundaries.hit, boundaries.prompt) == boundaries.prompt


def test_first_visit_is_cold() -> None:
    assert parts(Boundaries(100, 0, 0, 0, 0, 0, 0)) == {"cold": 100}


def test_a_resent_prompt_recomputes_its_last_token() -> None:
    assert parts(at()) == {"partial_block": 3, "last_token": 1}


def test_a_resent_prompt_of_whole_blocks_recomputes_its_last_block() -> None:
    aligned = Boundaries(prompt=96, hit=80, alone=80, ever=80, reachable=80, whole=96, seen=96)
    assert parts(aligned) == {"last_token": 16}


def test_a_new_suffix_is_cold_behind_a_partial_block() -> None:
    assert parts(at(hit=48, alone=48, ever=48, reachable=48, whole=48, seen=50)) == {
        "partial_block": 2,
        "cold": 50,
    }


def test_a_window_that_was_not_kept_loses_all_tokens_before_it() -> None:
    assert parts(at(hit=0, alone=0, ever=0))["not_retained"] == 96


def test_tokens_behind_an_evicted_block_were_not_retained() -> None:
    assert parts(at(hit=32, alone=32, ever=64)) == {
        "evicted": 32,
        "not_retained": 32,
        "partial_block": 3,
        "last_token": 1,
    }


def test_groups_at_different_boundaries_lag() -> None:
    assert parts(at(hit=0, alone=64, ever=96)) == {
        "lagging_group": 64,
        "evicted": 32,
        "partial_block": 3,
        "last_token": 1,
    }


def test_a_skipped_lookup_counts_all_that_could_have_hit() -> None:
    skipped = Boundaries(100, 0, 0, 0, 64, 64, 70, skipped=True)
    assert parts(skipped) == {"skipped_lookup": 64, "partial_block": 6, "cold": 30}


def test_the_block_that_a_drafter_recomputes_is_not_the_last_tokens() -> None:
    dropped = at(hit=80, alone=80, ever=80, reachable=80, undropped=96)
    assert parts(dropped) == {"eagle_drop": 16, "partial_block": 3, "last_token": 1}


def test_what_the_model_itself_could_have_hit_is_lost_to_the_draft_model() -> None:
    lacking = at(hit=0, target=64, alone=80)
    assert parts(lacking) == {
        "draft_group": 64,
        "lagging_group": 16,
        "evicted": 16,
        "partial_block": 3,
        "last_token": 1,
    }
    taken = at(hit=0, target=64, alone=80, evicted_for_draft=True)
    assert parts(taken) == {
        "draft_group": 80,
        "lagging_group": 16,
        "partial_block": 3,
        "last_token": 1,
    }
