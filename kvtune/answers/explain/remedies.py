"""Proposes settings that may turn a run's misses into hits, those first that may win most. `explain` replays them.

What an option may win is arithmetic: the tokens of the causes that it is for, times the share of them that it can turn
into hits. Of evicted tokens that share follows from how long before the miss the eviction was (`Situation.kept`). For a
run of stock vLLM, options that need no kvtune come first. Pure functions of the causes and of the replayed settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from kvtune.answers.states.choices import (
    UNIT,
    Choice,
    Engine,
    at_interval,
    by_core,
    drafting,
    fine_ends,
    fine_partings,
)
from kvtune.base.bounded import decode_json
from kvtune.base.units import size
from kvtune.data.causes import CAUSES
from kvtune.data.flags import draft_settings, flag_texts
from kvtune.data.knobs import CORE, CoreSettings, keeps_specs
from kvtune.data.layout.plan import CPU, GPU
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.platform import here
from kvtune.lab.setup.resolve import ranks
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.vllm.names import speculation_reads
from kvtune.reading.analysis.replayed import WORTH_SHARE

GIB = 1 << 30


class Evicted(Protocol):
    """Tokens lost to evictions of one kind."""

    @property
    def tokens(self) -> int: ...

    def within(self, seconds: float) -> float:
        """Return the share of them that were evicted less than this before they were missed."""
        ...


FEWER_SEQUENCES = 64
"""The `--max-num-seqs` to try if the run did not record its own; otherwise half of the recorded one."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts about the replay that remedies depend on. `unit`: hits end at multiples of this many tokens."""

    setup: Setup
    blocks: int
    unit: int
    retention: int | None
    window: int
    states: bool
    block: int = 0  # tokens of a state's block; 0: the unit
    pool_bytes: int = 0  # 0 unless the model has states, and its blocks can be packed on this machine
    pool_gib: float = 0.0
    sequences: int | None = None  # most requests in a step
    chunk: int = 0  # most tokens in a step; 0: not known
    least_block: int = GPU.alignment  # the smallest block that the device's attention kernels take
    cpu: bool = False
    float32_states: bool = False  # the CPU keeps recurrent states in float32, and a flag changes that
    evictions: Sequence[Evicted] = ()
    stands_in: bool = False  # the set-up's model is another, with the run's KV specs
    turn_s: float = 0.0
    """Seconds in which the run writes as many tokens as the pool holds; 0: not known."""

    def kept(self, pools: float) -> float:
        """Return the share of the evicted tokens that memory of this many more pools would have kept.

        An LRU cache keeps what comes again before its whole size has been written anew. Ages are known by median and
        maximum, and taken as evenly spread between these; without ages half of the tokens come back within a pool.
        """
        tokens = sum(eviction.tokens for eviction in self.evictions)
        if not tokens or not self.turn_s:
            return pools / (pools + 1)
        return (
            sum(eviction.tokens * eviction.within(pools * self.turn_s) for eviction in self.evictions)
            / tokens
        )

    @property
    def engine(self) -> Engine:
        """What decides which states the engine keeps."""
        pool_bytes = int(self.pool_gib * GIB)
        block = self.block or self.unit
        return Engine(self.setup, block, self.unit, self.chunk, self.sequences or 0, pool_bytes)

    @property
    def all_ranks_gib(self) -> float:
        """The size of the pool on all ranks, as `--kv-offloading-size` counts."""
        return self.pool_gib * ranks(self.setup.engine_args)

    @property
    def tier_gib(self) -> float:
        """The size of the tier of host memory in GiB; 0 without one."""
        return float(flag_texts(self.setup.engine_args).get("kv-offloading-size") or 0)

    @property
    def core(self) -> CoreSettings:
        from kvtune.plugin.core.settings import parse

        return parse(self.setup.core_settings)


def situation(
    setup: Setup,
    engine: EngineInfo,
    *,
    ran_on: str = "",
    evictions: Sequence[Evicted] = (),
    tokens_s: float = 0.0,
    stands_in: bool = False,
) -> Situation:
    """Return the facts about the replay that remedies depend on.

    `ran_on`: the run's device, or "" without its model. Blocks of other sizes can be simulated only with the model, and
    only for this machine's device. `tokens_s`: tokens that the run wrote to the cache in a second; 0: not known.
    """
    windows = [int(group.get("sliding_window") or 0) for group in engine.groups]
    retention = engine.settings.get("retention_interval", 0)
    on_cpu = engine.device == "cpu" and setup.platform is None
    return Situation(
        setup,
        engine.num_blocks,
        int(engine.settings.get("hit_alignment_tokens") or engine.block_size or 16),
        None if retention is None else int(retention),
        max(windows, default=0),
        has_states(engine),
        max((int(group.get("block_size", 0)) for group in engine.groups), default=0),
        engine.pool_bytes if has_states(engine) and ran_on == engine.device else 0,
        engine.pool_bytes / GIB,
        engine.settings.get("max_num_seqs"),
        int(engine.settings.get("max_num_batched_tokens") or 0),
        (CPU if on_cpu else GPU).alignment,
        on_cpu,
        engine.state_dtype == "float32" and here().float32_states and engine.device == "cpu",
        evictions,
        stands_in,
        engine.pool_tokens / tokens_s if tokens_s else 0.0,
    )


def has_states(engine: EngineInfo) -> bool:
    return any("mamba" in str(group.get("kind", "")).lower() for group in engine.groups)


def floor_of(engine: EngineInfo, packed: bool) -> str:
    """Return, in words, the shortest shared prefix that can hit in a model with states, and why; else ""."""
    if not has_states(engine):
        return ""
    tokens = max(int(group.get("block_size", 0)) for group in engine.groups)
    holds = (
        "its pages in all attention layers together hold states (core.packed)"
        if packed
        else "its page in one attention layer must hold one state (core.packed makes blocks smaller, where supported)"
    )
    return f"a block is {tokens:,} tokens, and no shorter prefix can hit: {holds}"


def other_core(here: Situation) -> Change:
    """Return the same engine with the other core: stock instead of kvtune, or kvtune instead of stock."""
    if here.setup.core == "stock":
        return Change("--core kvtune", here.setup.with_core(), name="kvtune's core")
    stock = here.setup.stock()
    if here.core.packed:  # stock's blocks have another size
        stock = _same_bytes(stock, int(here.pool_gib * GIB))
    return Change("--core stock", stock)


def candidates(
    misses: dict[str, int], query_tokens: int, here: Situation, *, preempted: bool = False
) -> list[Change]:
    """Return changes without repeats, those first that may win most tokens.

    `preempted`: the pool is too small for the requests in flight. Changes against that come before all others. To stock
    vLLM, changes that need kvtune's core come last.
    """
    changes: dict[str, Change] = {}
    for cause in CAUSES.values():
        tokens = misses.get(cause.key, 0)
        if not cause.helps or tokens < WORTH_SHARE * query_tokens:
            continue
        for change in _possible(REMEDIES[cause.helps](here)):
            may_win = change.share * tokens
            before = changes.get(change.change, replace(change, cause=cause.key, place=len(changes)))
            # For both causes: it is named for the one in which it may win more.
            larger = cause.key if may_win > before.may_win else before.cause
            changes[change.change] = replace(before, cause=larger, may_win=before.may_win + may_win)
    stock = here.setup.core == "stock"
    ranked = sorted(
        changes.values(), key=lambda change: (stock and change.setup.core == "kvtune", -change.may_win)
    )
    first = [
        replace(change, cause=PREEMPTED) for change in _possible(_for_preemption(here) if preempted else ())
    ]
    named = {change.change for change in first}
    return [*first, *(change for change in ranked if change.change not in named)]


def _possible(changes: Iterable[Change]) -> Iterator[Change]:
    return (change for change in changes if not change.why_not)


def combined(changes: Sequence[Change], here: Situation) -> list[Change]:
    """Return the first two changes, each together with twice the pool, for runs that no single change helps."""
    twice = larger_pool(here, 2.0)
    sizes = {"num-gpu-blocks-override", "kv-cache-memory-bytes"}  # changes that size the pool themselves
    keep = (
        []
        if twice.why_not
        else [change for change in changes if not sizes & changed_flags(change, here.setup).keys()]
    )
    return [
        replace(
            change,
            change=f"{change.change}, and {twice.change}",
            setup=change.setup.with_flags(num_gpu_blocks_override=2 * here.blocks),
            cost=", ".join(filter(None, (change.cost, twice.cost))),
        )
        for change in keep[:2]
    ]


def changed_flags(change: Change, run: Setup) -> dict[str, str | None]:
    """Return the vLLM flags that a change sets, with the value None for a flag that it removes."""
    old, new = (flag_texts(setup.engine_args) for setup in (run, change.setup))
    changed: dict[str, str | None] = {name: value for name, value in new.items() if old.get(name) != value}
    if change.setup.simulated.block_tokens != run.simulated.block_tokens:
        changed["block-size"] = str(change.setup.simulated.block_tokens)
    return {**dict.fromkeys(old.keys() - new.keys()), **changed}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an engine that may move an answer: a row of the table. `capacity` tries those with a short `name`.

    `change`: the difference in words. `share`: of a cause's tokens, those that it may turn into hits. `why_not`: why
    it is not worth a replay here. For a run's misses: the `cause` that it is for, the tokens that it `may_win`, its
    `place` among all, the cheaper ones of a cause first.
    """

    change: str
    setup: Setup
    cost: str = ""
    share: float = 0.0
    name: str = ""
    why_not: str = ""
    cause: str = ""
    may_win: float = 0.0
    place: int = 0


def larger_pool(here: Situation, factor: float) -> Change:
    blocks, more = int(here.blocks * factor), (factor - 1) * here.pool_gib * GIB
    return Change(
        f"{factor:g}x the pool ({here.blocks:,} -> {blocks:,} blocks)",
        here.setup.with_flags(num_gpu_blocks_override=blocks),
        f"{size(more) if more else f'{factor - 1:.0%}'} more device memory",
        here.kept(factor - 1),
        f"pool x{factor:g}",
        "" if here.blocks else "the pool's blocks are not known",
    )


def host_tier(here: Situation, pools: float) -> Change:
    """Return the change to host memory of this many times the pool."""
    given = flag_texts(here.setup.engine_args).keys() & {"kv-offloading-size", "kv-transfer-config"}
    gib = pools * here.all_ranks_gib
    held = size(gib * GIB)
    return Change(
        f"--kv-offloading-size {gib:.3g}, host memory of {pools:g}x the pool",
        here.setup.with_flags(kv_offloading_size=f"{gib:.6g}"),
        f"{held} of host memory{ON_CPU if here.cpu else ''}",
        here.kept(pools),
        f"host tier of {held}",
        f"the engine has --{min(given)}"
        if given
        else ""
        if here.pool_gib
        else "the pool's bytes are not known",
    )


def fewer_requests(here: Situation, most: int) -> Change:
    before = f"{here.sequences} -> " if here.sequences else ""
    setup = here.setup.with_flags(max_num_seqs=most)
    cost, name = "requests that wait longer", f"{most} requests at once"
    return Change(f"--max-num-seqs {before}{most}", setup, cost, RARELY, name)


def shorter_steps(here: Situation, most: int, share: float) -> Change:
    setup, cost = here.setup.with_flags(max_num_batched_tokens=most), f"steps of at most {most:,} tokens"
    change, name = f"--max-num-batched-tokens {here.chunk} -> {most}", f"steps of {most:,} tokens"
    return Change(change, setup, cost, share, name)


def free_blocks(here: Situation, share: float) -> Change:
    """Return the change to a pool of which this share stays free when a waiting request is let in."""
    given = float(flag_texts(here.setup.engine_args).get("watermark") or 0)
    return Change(
        f"--watermark {share}",
        here.setup.with_flags(watermark=str(share)),
        f"new requests wait until {share:.0%} of the pool is free",
        RARELY,
        f"{100 * share:g} % of the pool kept free",
        "" if given < share else f"{given:.0%} of the pool is kept free already",
    )


def interval_of(here: Situation, tokens: int) -> int:
    """Return the smallest interval of whole blocks that has at least these tokens.

    With states it is the chunk, too: never one that a server could not serve with.
    """
    block, least = (here.engine.block, here.engine.least_chunk) if here.states else (here.unit, 0)
    return -(-max(tokens, least) // block) * block


def kept_windows(here: Situation, interval: int, share: float) -> Change:
    """Return the change to windows, or states, that are kept at this interval."""
    name = f"windows kept every {interval:,} tokens"
    if here.states:
        return replace(_kept_states(here, at_interval(here.engine, interval), share), name=name)
    now = "dense" if here.retention is None else str(here.retention)
    return Change(
        f"--prefix-cache-retention-interval {now} -> {interval}",
        here.setup.with_flags(prefix_cache_retention_interval=interval),
        MORE_BLOCKS,
        share,
        name,
    )


def _for_eviction(here: Situation) -> Iterator[Change]:
    yield from (*_orders(here), larger_pool(here, 1.5), larger_pool(here, 2.0), host_tier(here, 4.0))
    if here.sequences and here.sequences > 1:
        yield fewer_requests(here, here.sequences // 2)
    if here.chunk and (smaller := here.chunk // 2) >= max(here.window, here.unit, here.engine.least_chunk):
        yield shorter_steps(here, smaller, RARELY)


def _for_preemption(here: Situation) -> Iterator[Change]:
    yield fewer_requests(here, max(1, here.sequences // 2) if here.sequences else FEWER_SEQUENCES)
    yield from (free_blocks(here, WATERMARK), larger_pool(here, 1.5), larger_pool(here, 2.0))


def _orders(here: Situation) -> Iterator[Change]:
    """Yield the eviction policies that are worth a replay. Each of them loses hits on some loads."""
    core = here.core if here.setup.core == "kvtune" else CoreSettings()
    now = f"core.policy {core.policy}" if here.setup.core == "kvtune" else "--core kvtune, core.policy"
    cost = "hits of loads that repeat otherwise"
    if not core.reuse_bonus_s:
        bonus_s = CORE["reuse_bonus_s"].high
        yield Change(
            f"{now} -> two_class, reuse_bonus_s {bonus_s:g}",
            here.setup.with_core(policy="two_class", reuse_bonus_s=bonus_s),
            cost,
            here.kept(1.0),
        )
    if here.window and core.policy != "chat":
        yield Change(
            f"{now} -> chat",
            here.setup.with_core(policy="chat", reuse_bonus_s=0.0),
            cost,
            0.9 * here.kept(1.0),
        )


def _for_tier(here: Situation) -> Iterator[Change]:
    """Yield remedies for a tier of host memory that is too small."""
    for factor in (2, 4) if here.tier_gib else ():
        gib = f"{factor * here.tier_gib:.6g}"
        yield Change(
            f"--kv-offloading-size {here.tier_gib:g} -> {gib}",
            here.setup.with_flags(kv_offloading_size=gib),
            f"{gib} GiB of host memory{ON_CPU if here.cpu else ''}",
            factor / (factor + 0.1),
        )
    yield from _for_eviction(here)


def _for_window_not_stored(here: Situation) -> Iterator[Change]:
    """Yield remedies for windows missing in the tier, in which vLLM stores a window only at intervals."""
    yield from _retention_intervals(here)
    for change in _for_tier(here):
        yield replace(change, share=change.share / 2)


def _for_never_stored(here: Situation) -> Iterator[Change]:
    given = flag_texts(here.setup.engine_args).get("kv-transfer-config", "")
    transfer: object = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with suppress(ValueError):
        transfer = decode_json(given) if given else transfer
    if not isinstance(transfer, dict):
        return
    extra = transfer.get("kv_connector_extra_config") or {}
    usual = {"store_threshold": 0, "offload_prompt_only": True, "eviction_policy": "lru"}
    for name, value in (("store_threshold", 0), ("offload_prompt_only", False), ("eviction_policy", "lru")):
        if extra.get(name, usual[name]) != value:
            changed = {**transfer, "kv_connector_extra_config": {**extra, name: value}}
            text = json.dumps(changed, separators=(",", ":"))
            change = f"--kv-transfer-config with {name} {json.dumps(value)}"
            yield Change(
                change, here.setup.with_flags(kv_transfer_config=text), "more copies to host memory", 1.0
            )
    yield from _for_eviction(here)


def _for_retention(here: Situation) -> Iterator[Change]:
    yield from _speculation(here)
    if here.states and here.engine.drafts:
        yield _kept_states(here, fine_partings(here.engine), 0.5)
        yield _kept_states(here, drafting(here.engine), 0.3)
    if here.setup.core == "kvtune" and not here.states:
        slack = here.core.slack
        for more, share in ((max(2 * slack, here.unit), 0.8), (max(4 * slack, 4 * here.unit), 0.7)):
            if more <= CORE["slack"].high:
                yield Change(
                    f"core.slack {slack} -> {more}", here.setup.with_core(slack=more), MORE_BLOCKS, share
                )
        windows = here.core.windows
        more_windows = here.setup.with_core(windows=windows + 4)
        yield Change(f"core.windows {windows} -> {windows + 4}", more_windows, MORE_BLOCKS, 0.6)
        return
    yield from _retention_intervals(here)


def _retention_intervals(here: Situation) -> Iterator[Change]:
    if here.states:
        for slack in here.engine.slacks:
            yield _kept_states(here, by_core(here.engine, slack), 0.95)
    least = interval_of(here, max(here.window, here.unit))
    for interval, share in ((least, 0.9), (4 * least, 0.6)):
        if interval != here.retention:
            yield kept_windows(here, interval, share)
    if here.states and here.retention != 0 and here.chunk > least:
        yield shorter_steps(here, least, 0.8)


def _for_dropped(here: Situation) -> Iterator[Change]:
    yield from _speculation(here)
    if here.states:
        finer = 1 - here.engine.fine_unit / here.engine.block
        yield _kept_states(here, fine_partings(here.engine), finer)
        if here.engine.drafts:
            yield _kept_states(here, drafting(here.engine), 1.0)
    yield from _for_partial(here)


def _kept_states(here: Situation, choice: Choice, share: float) -> Change:
    """Return a choice of states as a change. For a model without states it is not asked."""
    now = f" (hits now end at multiples of {here.unit})" if UNIT in choice.settings else ""
    why = choice.why_not
    if here.stands_in and not all(map(keeps_specs, choice.settings)):
        why = "it changes the KV specs, and the replayed model stands in for the run's"
    return Change(f"{choice.words}{now}", choice.of(here.engine), choice.price, share, why_not=why)


def _speculation(here: Situation) -> Iterator[Change]:
    """Yield settings with which EAGLE and MTP keep the last block of a hit, if the installed vLLM has them."""
    given = draft_settings(here.setup.engine_args) or {}
    for name, value, cost in SPECULATION if given.get("method") in DROPPING else ():
        if speculation_reads(name) and given.get(name, False) != value:
            text = json.dumps({**given, name: value}, separators=(",", ":"))
            change = f"--speculative-config with {name} {json.dumps(value)}"
            yield Change(change, here.setup.with_flags(speculative_config=text), cost, 1.0)


def _for_partial(here: Situation) -> Iterator[Change]:
    """Yield smaller blocks: a hit ends at a whole one, so half a block is lost on average."""
    if here.states:
        packed = here.setup.core == "kvtune" and here.core.packed
        if here.pool_bytes and not packed:
            change = "core.packed: the smallest blocks that hold a state (same memory)"
            yield Change(
                change,
                _same_bytes(here.setup.with_core(packed=True), here.pool_bytes),
                "an experimental layout",
                0.8,
            )
        if here.pool_bytes and here.float32_states and not packed:
            change = "--mamba-ssm-cache-dtype bfloat16: states of half the size, smaller blocks (same memory)"
            changed = _same_bytes(here.setup.with_flags(mamba_ssm_cache_dtype="bfloat16"), here.pool_bytes)
            yield Change(change, changed, "states of fewer digits", 0.5)
        yield _kept_states(here, fine_ends(here.engine), 1 - here.engine.fine_unit / here.engine.block)
        return
    block = here.setup.simulated.block_tokens or here.unit
    smaller = max(here.least_block, block // 4)
    if block % 32 == 0 and smaller < block:
        changed = (
            here.setup.with_flags(num_gpu_blocks_override=here.blocks * block // smaller)
            if here.blocks
            else here.setup
        )
        yield Change(
            f"blocks of {block} -> {smaller} tokens (same memory)",
            changed.replayed(block_tokens=smaller),
            f"{block // smaller}x as many blocks to handle",
            1 - smaller / block,
        )


def _same_bytes(setup: Setup, pool_bytes: int) -> Setup:
    """Return a set-up whose blocks have another size, with a pool of as many bytes as now."""
    return setup.replayed(specs={}).with_flags(
        num_gpu_blocks_override=None, block_size=None, kv_cache_memory_bytes=pool_bytes
    )


def _for_skipped(here: Situation) -> Iterator[Change]:
    setup = here.setup.with_flags(no_enable_prefix_caching=None, enable_prefix_caching="")
    yield Change("--enable-prefix-caching", setup, "", 1.0)


RARELY = 0.1
"""The share of evicted tokens that fewer requests at once, or shorter steps, may keep: they free little memory."""
ON_CPU = "; on a CPU kvtune's plugin must be installed beside vLLM, whose own offloading is for GPUs"
PREEMPTED = "preempted"
WATERMARK = 0.1
"""The share of the pool that vLLM keeps free when it lets a waiting request in."""
MORE_BLOCKS = "more blocks a prompt"
DROPPING = ("eagle", "eagle3", "mtp")
SPECULATION = (
    ("disable_lookahead_block_hashes", False, "other hashes than engines that share a store with it"),
    ("disable_eagle_block_drop", True, "perhaps fewer accepted drafts; experimental in vLLM"),
)
"""Settings that keep the last block of a hit under EAGLE and MTP: name, value, cost."""


REMEDIES: dict[str, Callable[[Situation], Iterator[Change]]] = {
    "eviction": _for_eviction,
    "dropping": _for_dropped,
    "retention": _for_retention,
    "smaller blocks": _for_partial,
    "caching": _for_skipped,
    "tier": _for_tier,
    "storing": _for_never_stored,
    "storing windows": _for_window_not_stored,
}
"""What may win a cause's tokens, by the table's `helps`."""
