"""Says what can hit on a server: the unit of hits, what stock vLLM keeps of windows and states, what preemption cost.

In: the labels and counters of /metrics, and the model's shape where its config.json is at hand. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvtune.base.units import count, percent
from kvtune.data.layout.plan import ModelShape
from kvtune.servers.watch.metrics import DRAFTS, Between, Scrape

PROMPTS = "request_prompt_tokens"
ONLY_ENDS = "0"
"""The label of --prefix-cache-retention-interval where vLLM keeps windows and states at the ends of prompts only."""
STATES = "the recurrent states"


class Possible(msgspec.Struct, frozen=True):
    """What can hit. `unit_tokens`: hits end at its multiples; at least, unless `exact`. None: not known.

    `short_share`: of the prompts since the server's start, those of `unit_tokens` or fewer, at least.
    `kept_at_ends`: what stock keeps at the ends of prompts only. `keeps_more`: the flags that keep it elsewhere, too.
    `lines`: all of it in words.
    """

    caching: bool | None
    unit_tokens: int | None
    exact: bool
    short_share: float | None
    kept_at_ends: list[str]
    lines: list[str]
    keeps_more: str = ""


def possible(between: Between, shape: ModelShape | None, longest: int, event_block: int = 0) -> Possible:
    """`longest`: max_model_len, 0 if unknown. `event_block`: tokens of the largest block of which an event came."""
    last = between.last
    enabled = last.cache.get("enable_prefix_caching")
    caching = None if enabled is None else enabled == "True"
    unit = last.match_unit or max(last.block_size or 0, event_block) or None
    exact = shape is not None or bool(event_block) or bool(last.match_unit)
    share = _short_share(last, unit) if unit and caching else None
    ends = list(_kept_at_ends(last, shape)) if caching else []
    block = max(last.block_size or 0, event_block)
    made = Possible(caching, unit, exact, share, ends, [], _keeps_more(last, ends, block) if ends else "")
    return msgspec.structs.replace(made, lines=list(_lines(made, between, longest)))


def _lines(made: Possible, between: Between, longest: int) -> Iterator[str]:
    last = between.last
    if made.caching is False:
        yield (
            "prefix caching is off, by --no-enable-prefix-caching or by vLLM for this model: every prompt is computed "
            "from its first token; --enable-prefix-caching turns it on where vLLM allows it"
        )
    if made.caching and made.unit_tokens:
        unit = count(made.unit_tokens)
        least = "" if made.exact else "at least "
        also = ""
        if made.short_share:
            also = f"; {percent(made.short_share)} of the prompts since the server's start, or more, were as short"
        yield f"hits end at multiples of {least}{unit} tokens: a prompt of {unit} or fewer cannot hit here{also}"
    if made.kept_at_ends:
        yield (
            f"stock vLLM keeps {' and '.join(made.kept_at_ends)} where a prompt ends only: a prefix that prompts "
            "share, with a block or more of other text behind it, misses at the second visit and hits from the third on"
        )
        yield made.keeps_more
    if preempted := between.counted("num_preemptions"):
        most = longest or last.number("kv_cache_size_tokens")
        cost = f": at most {count(preempted * most)} tokens were computed again for it" if most else ""
        yield f"{count(preempted)} preemptions in the last {between.seconds:.0f} s{cost}"
    if made.caching:
        yield "prompts with different values of cache_salt never share a hit; /metrics does not say who sends one"


def _kept_at_ends(last: Scrape, shape: ModelShape | None) -> Iterator[str]:
    """Yield what stock keeps at the ends of prompts only; nothing where a connector or kvtune's core keeps more."""
    if last.cache.get("prefix_cache_retention_interval") != ONLY_ENDS or last.core is not None:
        return
    if last.get("external_prefix_cache_queries"):
        return
    if shape is not None and shape.window_layers and shape.attention_layers:
        yield f"the windows of {count(shape.window)} tokens"
    states = (shape is not None and shape.state_layers) or last.cache.get("mamba_cache_mode") == "align"
    if states and last.cache.get("enable_mamba_shared_prefix_checkpoint") != "True":
        yield STATES


def _keeps_more(last: Scrape, ends: list[str], block: int) -> str:
    """Return the flags that keep windows or states at more places, and the command that replays what they bring."""
    if STATES not in ends:
        return "--prefix-cache-retention-interval keeps more windows, kvtune's core those where prompts go on"
    whole = f"both the same multiple of a block{f', {count(block)} tokens' if block else ''}"
    parts = [f"--prefix-cache-retention-interval with --max-num-batched-tokens, {whole}, keeps more states"]
    if not last.match_unit:
        parts.append("--prefix-match-unit hits closer to a prompt's end where it is sent again or goes on")
    if last.get(DRAFTS) is not None:
        parts.append(
            "the server drafts: --enable-mamba-shared-prefix-checkpoint with --prefix-match-unit keeps the state "
            "where prompts part"
        )
    return "; ".join([*parts, "`kvtune sweep MODEL -w LOG --states` replays what each brings"])


def _short_share(last: Scrape, unit: int) -> float | None:
    """Return the share of prompts in the buckets up to `unit` tokens: more may be in the bucket that it lies in."""
    bounds = last.buckets.get(PROMPTS) or {}
    total = max(bounds.values(), default=0.0)
    if not total:
        return None
    return max((number for bound, number in bounds.items() if bound <= unit), default=0.0) / total
