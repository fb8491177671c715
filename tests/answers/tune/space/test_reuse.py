"""What `two_class` tries follows from the load's own distances."""

from __future__ import annotations

from kvtune.answers.tune.space.reuse import reuse_values
from kvtune.requests.loads.spec import build

SUMMARY = {"wall_s": 60.0, "engine": {"block_size": 16, "num_blocks": 50}}
ROUNDS = "rounds:prefixes=10,prefix=160,suffix=16,output=16,rounds=3"


def test_the_bonus_is_how_long_the_loads_prefixes_stay_away() -> None:
    """Each of ten prefixes comes back ten requests later; 30 requests take 60 s."""
    values = reuse_values(build(ROUNDS, seed=0), SUMMARY)
    assert values["reuse_bonus_s"] == (20.0, 1e9)


def test_the_ghost_reaches_as_far_back_as_they_were_evicted() -> None:
    """Between two visits about 2,000 tokens are stored, and the pool holds 800."""
    assert reuse_values(build(ROUNDS, seed=0), SUMMARY)["ghost_factor"] == (3.0,)
    larger = {**SUMMARY, "engine": {"block_size": 16, "num_blocks": 5000}}
    assert reuse_values(build(ROUNDS, seed=0), larger)["ghost_factor"] == (1.0,)


def test_a_load_in_which_nothing_comes_back_proposes_nothing() -> None:
    assert reuse_values(build("prefill:requests=5,prompt=100", seed=0), SUMMARY) == {}
