"""What came of a tier of host memory: kvtune's figures, and what a client and a subscriber of their own count."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvtune.servers.watch.account import Account
from kvtune.servers.watch.events import Batch, Received, Removed
from kvtune.servers.watch.metrics import Scrape
from kvtune.servers.watch.screen import lines
from kvtune.servers.watch.tier import STORED, Tier, TierUse, use
from kvtune.servers.watch.watched import Watched
from tests.lab.engine.test_watch import kvtune
from tests.servers.watch.joined import join
from tests.servers.watch.test_account import stored
from tests.servers.watch.test_traffic import of_life, watched
from tests.servers.watch.tiers import SETS, Outside, send, serving
from tests.servers.watch.truth import traffic

SAYS = {
    "loads": "loaded ",
    "never": "window or state not stored in host memory",
    "small": "evicted from the pool and host memory, ",
    "states": "loaded ",
}
BELOW = {"medium": "CPU", "token_ids": [], "block_size": 0}


def check(name: str, told: dict[str, object], outside: Outside) -> None:
    """Kvtune's figures are those from outside; what the load was made for, happened."""
    counts = outside.told()
    ages = told.pop("evicted_s"), counts.pop("evicted_s")
    assert (ages[0] is None) == (ages[1] is None)
    assert ages[0] is None or ages[0] == pytest.approx(ages[1], rel=0.2)
    assert {key: told[key] for key in counts} == counts
    assert told["stored_bytes"] and SAYS[name] in str(told["verdict"])
    assert bool(told["loaded_tokens"]) == (name in ("loads", "states"))
    rest = told["rest"]
    assert isinstance(rest, dict) and sum(rest.values()) <= outside.missed
    assert sum(rest.values()) > outside.missed - len(outside.sent) * outside.of.block


@pytest.mark.parametrize("name", SETS)
def test_a_recorded_tiers_figures_are_an_own_count_and_no_cause_is_unknown(name: str) -> None:
    run = traffic(f"tier-{name}")
    outside = Outside(SETS[name], run.lives[0].payloads, run.sent)
    for watching in watched([run.lives[0]]):
        assert watching.totals.told
    shot = watching.snapshot()
    assert shot.tier is not None
    check(name, {key: getattr(shot.tier, key) for key in shot.tier.__struct_fields__}, outside)
    period = shot.periods["since start"]
    assert period.misses is not None and not period.misses.get("unknown")
    assert period.query_tokens - period.hit_tokens == outside.missed == sum(period.misses.values())
    log = of_life(run, 0)
    for cause in ("evicted", "not_retained"):
        assert period.misses.get(cause, 0) == log[cause], cause
    answered = join(run.lives[0].received(), run.asked(0), Account())
    assert [one.asked.name for one in answered if one.estimate != one.asked.hit] == []
    text = "\n".join(lines(shot, 160, 60))
    assert shot.tier.verdict[:60] in text and f"{shot.tier.asked_tokens:,}" in text


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SETS)
def test_a_tiers_figures_are_an_own_count(tmp_path: Path, name: str) -> None:
    with serving(SETS[name], tmp_path) as base:
        listener, sent = send(name, base)
        shot = json.loads(kvtune("watch", base, "--json", "--seconds", "1"))
    check(name, shot["tier"], Outside(SETS[name], listener.batches, sent))
    assert not shot["periods"]["since start"]["misses"].get("unknown")


def test_a_loaded_stretch_is_one_though_its_window_begins_later() -> None:
    """Of three loaded blocks the window's group has the last one alone; the next two blocks are computed."""
    account, window = Account(), {"group": 1, "kv_cache_spec_sliding_window": 5}
    both = [stored([1, 2, 3], None), stored([1, 2, 3], None, **window)]
    account.add(Received(0, Batch(1.0, [*both, Removed([], "CPU", 0)])))
    below = [stored([1, 2, 3], None, **BELOW), stored([3], None, group=1, **BELOW)]
    account.add(Received(0, Batch(2.0, below)))
    gone = [Removed([name], "GPU", group) for name in (1, 2, 3) for group in (0, 1)]
    account.add(Received(0, Batch(3.0, gone)))
    loaded = [stored([1, 2, 3], None), stored([3], 2, **window)]
    after = [stored([4, 5], 3), stored([4, 5], 3, **window)]
    account.add(Received(0, Batch(4.0, [*loaded, *after])))
    account.settle()
    assert account.tokens == Counter(cold=12 + 8, loaded=12)


def test_the_last_block_of_a_prompt_is_computed_where_windows_are_though_a_tier_holds_it() -> None:
    account, window = Account(), {"group": 1, "kv_cache_spec_sliding_window": 5}
    both = [stored([1, 2], None), stored([1, 2], None, **window)]
    below = [stored([1, 2], None, group=group, **BELOW) for group in (0, 1)]
    account.add(Received(0, Batch(1.0, [*both, *below])))
    account.add(Received(0, Batch(2.0, [stored([2], 1), stored([2], 1, **window)])))
    account.settle()
    assert account.tokens == Counter(cold=8, last_token=4)


def tier_of(group: int) -> Tier:
    made = Tier(kinds={0: "full_attention", 1: "mamba"})
    made.add(stored([1, 2], None, group=group, **BELOW), 1.0)
    made.asked.update({"window_not_stored": 8, "cold": 4})
    return made


def said(tiers: list[Tier], *, complete: bool = True, **values: float) -> TierUse | None:
    asked = {"external_prefix_cache_queries": 16.0, **values}
    return use(tiers, Scrape(21.0, asked if tiers else {}, {}, started=1.0), complete=complete)


def test_a_verdict_names_the_group_that_is_never_stored_and_what_is_not_published() -> None:
    made, silent = said([tier_of(0)]), said([tier_of(0)], complete=False)
    assert made is not None and silent is not None
    assert made.verdict == (
        "loaded 0 of 16 tokens that were asked for in 20 s; 50.0 % window or state not stored in host memory: "
        "group 1 (mamba) never is; 25.0 % never seen before; not published: vllm:kv_offload_store_bytes_total"
    )
    assert (silent.stored_blocks, silent.loadable_tokens, silent.rest) == (None, None, {})
    assert "not known: what it holds" in silent.verdict
    both = tier_of(0)
    both.add(stored([2], None, group=1, **BELOW), 2.0)
    made = said([both], **{STORED: 2048.0})
    assert made is not None and "never is" not in made.verdict and made.verdict.startswith("stored 2 KiB, ")
    assert said([]) is None


def test_a_block_is_held_until_the_last_tier_evicts_it_and_its_ages_are_known() -> None:
    tier = Tier()
    for medium, at in (("CPU", 1.0), ("STORAGE", 2.0)):
        tier.add(stored([7], None, **{**BELOW, "medium": medium}), at)
    tier.add(Removed([7, 8], "CPU", 0), 3.0)
    assert tier.masks(7, [0, 1]) == (1, 1) and tier.masks(8, [0]) == (0, 0)
    tier.add(Removed([7], "STORAGE", 0), 41.0)
    assert tier.masks(7, [0, 1]) == (0, 1) and tier.age_s([8, 7], [0], 301.0) == (40.0, 300.0)


def test_figures_begin_anew_with_the_server() -> None:
    run = traffic("tier-small")
    *_, watching = watched([run.lives[0]])
    assert isinstance(watching, Watched) and watching.snapshot().tier is not None
    watching.account.forget(0)
    assert (
        use([each.tier for each in watching.account.blocks.values()], Scrape(1.0, {}, {}), complete=True)
        is None
    )
