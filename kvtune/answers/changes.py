"""The table of changes: what may move an answer, what it costs, and why it does nothing here. Each is declared once.

A change is a function of the `Situation` in CHANGES, and the questions are filters: `explain` replays what may win a
run's misses (`wins`), `capacity` what has a short `name`, `sweep --states` and `doctor` what says which states are
`kept`. Legal values, prices and refusals of single settings are the catalogue's (`kvtune/data/knobs.py`). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import msgspec

from kvtune.base.bounded import decode_json
from kvtune.base.commands import core_words
from kvtune.base.legal import Value
from kvtune.base.units import size
from kvtune.data.flags import draft_settings, flag_texts
from kvtune.data.knobs import CORE, DRAFTS, KNOBS, TIER_SIZE, CoreSettings, ModelFacts
from kvtune.data.layout.plan import CPU, GPU, match_units
from kvtune.data.recipe import engine_flags
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.platform import here as this_machine
from kvtune.lab.setup.resolve import ranks
from kvtune.lab.setup.setup import POOL_FLAG, Setup
from kvtune.plugin.vllm.names import speculation_reads
from kvtune.requests.loads.prefix_tree import PrefixTree, joined
from kvtune.requests.types import Span, Workload

GIB = 1 << 30
PREEMPTED = "preempted"
"""The kind of change that helps where the pool is too small for the requests in flight. The others are causes'."""
FEWER_SEQUENCES = 64
"""The `--max-num-seqs` to try if the run did not record its own; otherwise half of the recorded one."""
RARELY = 0.1
"""The share of evicted tokens that fewer requests at once, or shorter steps, may keep: they free little memory."""
LEAST_UNIT = 32
"""The finest unit of hits that is tried: each unit of a prompt is a hash."""
CHUNKS = 8
"""States are kept with at most this many times the engine's steps for a prompt: each step reads all weights."""
SLACKS = (64, 512, 2048)
"""How far before a prompt's last state the core keeps another, where it keeps none yet."""
SIZES = (POOL_FLAG, "kv-cache-memory-bytes")
ON_CPU = "; on a CPU kvtune's plugin must be installed beside vLLM, whose own offloading is for GPUs"
UNIT, CHECKPOINT = "prefix_match_unit", "enable_mamba_shared_prefix_checkpoint"
INTERVAL, INTERVAL_FLAG = "prefix_cache_retention_interval", "prefix-cache-retention-interval"
INERT: tuple[tuple[str, Value], ...] = (("mamba_cache_mode", "none"), ("mamba_block_size", 8))
"""Settings that name states and that vLLM overwrites, with a value that it would not take."""
RETENTION = ("retention", "storing windows")
"""The kinds of cause that windows and states win that are kept more densely."""
DROPPING = ("eagle", "eagle3", "mtp")
SPECULATION = (
    ("disable_lookahead_block_hashes", False, "other hashes than engines that share a store with it"),
    ("disable_eagle_block_drop", True, "perhaps fewer accepted drafts; experimental in vLLM"),
)
"""Settings that keep the last block of a hit under EAGLE and MTP: name, value, cost."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an engine that may move an answer.

    `change`: the difference in words. `cost`: what a person pays. `wins`: the share of a cause's tokens that it may
    turn into hits, by the cause's `helps`. `name`: its row of `capacity`, with a `note` on what a replay leaves open.
    `kept`: which states are kept with it; None: no row of `sweep --states`. `why_not`: why it does nothing here, and
    is not replayed. `settings`: the knobs that it sets, if it is nothing else. `flags`: what serves it, where the
    replayed `setup` does not say it. `times`: how many times as long as another its replay takes.
    In `explain`: the `cause` that it is for, the tokens that it `may_win`, its `place` among all, cheaper ones first.
    """

    change: str
    setup: Setup
    cost: str = ""
    wins: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
    note: str = ""
    kept: str | None = None
    why_not: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    times: float = 1.0
    more_memory: bool = False
    cause: str = ""
    may_win: float = 0.0
    place: int = 0


class Eviction(msgspec.Struct, frozen=True):
    """Tokens lost to evictions of one kind, and the age of those evictions when the tokens were missed."""

    pressure: str
    tokens: int
    median_age_s: float
    max_age_s: float

    def within(self, seconds: float) -> float:
        """Return the share of the tokens that were evicted less than this before, ages spread evenly around them."""
        if not seconds < self.max_age_s:
            return 1.0
        if seconds < self.median_age_s:
            return 0.5 * seconds / self.median_age_s
        return 0.5 + 0.5 * (seconds - self.median_age_s) / (self.max_age_s - self.median_age_s)


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts about an engine that changes depend on. `unit`: hits end at multiples of this many tokens."""

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
    groups: int = 0  # of layers that share blocks
    evictions: Sequence[Eviction] = ()
    stands_in: bool = False  # the set-up's model is another, with the run's KV specs
    turn_s: float = 0.0
    """Seconds in which the run writes as many tokens as the pool holds; 0: not known."""
    sessions: int = 0
    """How many run at once where `capacity` asks; 0: another question."""
    tail: int = 0
    """How far before a prompt's end the load's prompts part from it, in tokens; 0: they do not, or not known."""

    def kept(self, pools: float) -> float:
        """Return the share of the evicted tokens that memory of this many more pools would have kept.

        An LRU cache keeps what comes again before its whole size has been written anew. Ages are known by median and
        maximum, and taken as evenly spread between these; without ages half of the tokens come back within a pool.
        """
        tokens = sum(eviction.tokens for eviction in self.evictions)
        if not tokens or not self.turn_s:
            return pools / (pools + 1)
        within = (eviction.tokens * eviction.within(pools * self.turn_s) for eviction in self.evictions)
        return sum(within) / tokens

    @property
    def flags(self) -> dict[str, str]:
        return flag_texts(self.setup.engine_args)

    @property
    def drafts(self) -> bool:
        return draft_settings(self.setup.engine_args) is not None

    @property
    def state_block(self) -> int:
        return self.block or self.unit

    @property
    def facts(self) -> ModelFacts:
        """What the catalogue asks before it refuses a setting of states."""
        return ModelFacts(state_layers=1, block_tokens=self.state_block, drafts=self.drafts)

    @property
    def fine_unit(self) -> int:
        """The finest unit from LEAST_UNIT on that divides a block; 0: there is none below the block."""
        return next((unit for unit in match_units(self.state_block, 16) if unit >= LEAST_UNIT), 0)

    @property
    def least_chunk(self) -> int:
        """The fewest tokens in a step: a token of every request, and at most CHUNKS times the steps."""
        return max(self.sequences or 0, self.chunk // CHUNKS)

    def interval(self, tokens: int) -> int:
        """Return the smallest interval of whole blocks with these tokens. Of states it is the chunk, too."""
        if self.states:
            return self.whole_blocks(max(tokens, self.least_chunk))
        return -(-tokens // self.unit) * self.unit

    def whole_blocks(self, tokens: int) -> int:
        """Return as many tokens, in whole blocks of a state."""
        return max(1, -(-tokens // self.state_block)) * self.state_block

    @property
    def least_interval(self) -> int:
        """The shortest interval of windows or states that is tried."""
        return self.interval(max(self.window, self.unit))

    @property
    def all_ranks_gib(self) -> float:
        """The size of the pool on all ranks, as `--kv-offloading-size` counts."""
        return self.pool_gib * ranks(self.setup.engine_args)

    @property
    def core(self) -> CoreSettings:
        """The settings of kvtune's core, its defaults for stock."""
        from kvtune.plugin.core.settings import parse

        return parse(self.setup.core_settings if self.setup.core == "kvtune" else {})


def situation(
    setup: Setup,
    engine: EngineInfo,
    *,
    ran_on: str = "",
    evictions: Sequence[Eviction] = (),
    tokens_s: float = 0.0,
    stands_in: bool = False,
    sessions: int = 0,
    load: Workload | None = None,
) -> Situation:
    """Return the facts about a replayed engine that changes depend on.

    `ran_on`: the run's device, or "" without its model. Blocks of other sizes can be simulated only with the model, and
    only for this machine's device. `tokens_s`: tokens that the run wrote to the cache in a second; 0: not known.
    """
    retention = engine.settings.get("retention_interval", 0)
    block = max((int(group.get("block_size", 0)) for group in engine.groups), default=0)
    on_cpu = engine.device == "cpu" and setup.platform is None
    return Situation(
        setup,
        engine.num_blocks,
        engine.hit_unit or 16,
        None if retention is None else int(retention),
        max((int(group.get("sliding_window") or 0) for group in engine.groups), default=0),
        has_states(engine),
        block,
        engine.pool_bytes if has_states(engine) and ran_on == engine.device else 0,
        engine.pool_bytes / GIB,
        engine.settings.get("max_num_seqs"),
        int(engine.settings.get("max_num_batched_tokens") or 0),
        (CPU if on_cpu else GPU).alignment,
        on_cpu,
        engine.state_dtype == "float32" and this_machine().float32_states and engine.device == "cpu",
        len(engine.groups),
        evictions,
        stands_in,
        engine.pool_tokens / tokens_s if tokens_s else 0.0,
        sessions,
        tail_tokens(load, block) if load is not None and has_states(engine) else 0,
    )


def has_states(engine: EngineInfo) -> bool:
    return any("mamba" in str(group.get("kind", "")).lower() for group in engine.groups)


def tail_tokens(load: Workload, block: int) -> int:
    """Return how far before the end of an earlier prompt a prompt parts from it, if they share a block: the median.

    0: all prompts that share a block with an earlier one go on where it ended.
    """
    tree, lengths, tails = PrefixTree(), dict[tuple[Span, ...], int](), list[int]()
    for request in load.requests:
        begin, shared = tuple(joined(request.prompt, block)), tree.match(request.prompt)
        if shared >= block and lengths[begin] > shared:
            tails.append(lengths[begin] - shared)
        tree.insert(request.prompt)
        lengths[begin] = request.prompt_tokens
    return int(median(tails)) if tails else 0


def changed_flags(change: Change, run: Setup) -> dict[str, str | None]:
    """Return the vLLM flags that a change sets, with the value None for a flag that it removes."""
    old, new = (flag_texts(setup.engine_args) for setup in (run, change.setup))
    changed: dict[str, str | None] = {name: value for name, value in new.items() if old.get(name) != value}
    if change.setup.simulated.block_tokens != run.simulated.block_tokens:
        changed["block-size"] = str(change.setup.simulated.block_tokens)
    return {**dict.fromkeys(old.keys() - new.keys()), **changed}


def serving(change: Change, run: Setup) -> list[str]:
    """Return the words that a change adds, of flags and of the core; flags that it removes have `no` before them."""
    if change.flags:
        return list(change.flags)
    flags, old = changed_flags(change, run), run.core_settings
    if DRAFTS in change.settings:  # the pool keeps its bytes
        flags = {name: value for name, value in flags.items() if name not in SIZES}
    words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", value)]
    gone = [f"no --{name}" for name, value in flags.items() if value is None]
    core = {name: value for name, value in change.setup.core_settings.items() if old.get(name) != value}
    return [*filter(None, words), *gone, *core_words(core)]


def orders(here: Situation) -> Iterator[Change]:
    """Yield the eviction policies that are worth a replay. Each of them loses hits on some loads."""
    core, cost, bonus_s = here.core, "hits of loads that repeat otherwise", CORE["reuse_bonus_s"].high
    now = f"core.policy {core.policy}" if here.setup.core == "kvtune" else "--core kvtune, core.policy"
    if not core.reuse_bonus_s:
        setup = here.setup.with_core(policy="two_class", reuse_bonus_s=bonus_s)
        change = f"{now} -> two_class, reuse_bonus_s {bonus_s:g}"
        yield Change(change, setup, cost, {"eviction": here.kept(1.0)})
    if here.window and core.policy != "chat":
        setup = here.setup.with_core(policy="chat", reuse_bonus_s=0.0)
        yield Change(f"{now} -> chat", setup, cost, {"eviction": 0.9 * here.kept(1.0)})


def pools(here: Situation) -> Iterator[Change]:
    yield from (larger_pool(here, factor) for factor in ((1.25,) if here.sessions else (1.5, 2.0)))


def larger_pool(here: Situation, factor: float) -> Change:
    blocks, more = int(here.blocks * factor), (factor - 1) * here.pool_gib * GIB
    return Change(
        f"{factor:g}x the pool ({here.blocks:,} -> {blocks:,} blocks)",
        here.setup.with_flags(num_gpu_blocks_override=blocks),
        f"{size(more) if more else f'{factor - 1:.0%}'} more device memory",
        {"eviction": here.kept(factor - 1), PREEMPTED: 0.8},
        name=f"pool x{factor:g}",
        note="more memory for the cache: another share of the GPU, or smaller weights",
        why_not="" if here.blocks else "the pool's blocks are not known",
        more_memory=True,
    )


def half_the_bytes(here: Situation) -> Iterator[Change]:
    """Yield fp8 KV: half the bytes of a token, so twice the blocks."""
    given, flags, why = here.flags.get("kv-cache-dtype", "auto"), ("--kv-cache-dtype", "fp8"), ""
    if given != "auto":
        why = f"the KV cache is {given} already"
    elif here.states:
        why = "its states keep their size, and how many blocks there are then was not planned"
    setup, note = larger_pool(here, 2.0).setup, "accuracy was not judged"
    yield Change(" ".join(flags), setup, name="fp8 KV", note=note, why_not=why, flags=flags)


def speculation(here: Situation) -> Iterator[Change]:
    """Yield settings with which EAGLE and MTP keep the last block of a hit, if the installed vLLM has them."""
    given = draft_settings(here.setup.engine_args) or {}
    for name, value, cost in SPECULATION if given.get("method") in DROPPING else ():
        if speculation_reads(name) and given.get(name, False) != value:
            setup = here.setup.with_flags(speculative_config=_json({**given, name: value}))
            change = f"--speculative-config with {name} {json.dumps(value)}"
            yield Change(change, setup, cost, {"dropping": 1.0, "retention": 1.0})


def smaller_blocks(here: Situation) -> Iterator[Change]:
    """Yield smaller blocks in the same memory: a hit ends at a whole one, so half a block is lost on average."""
    block = here.setup.simulated.block_tokens or here.unit
    smaller = max(here.least_block, block // 4)
    if here.pool_bytes and here.states and not here.core.packed:
        change = "core.packed: the smallest blocks that hold a state (same memory)"
        setup = _same_bytes(here.setup.with_core(packed=True), here.pool_bytes)
        yield Change(change, setup, "an experimental layout", {"smaller blocks": 0.8})
        change = "--mamba-ssm-cache-dtype bfloat16: states of half the size, smaller blocks (same memory)"
        setup = _same_bytes(here.setup.with_flags(mamba_ssm_cache_dtype="bfloat16"), here.pool_bytes)
        if here.float32_states:
            yield Change(change, setup, "states of fewer digits", {"smaller blocks": 0.5})
    elif block % 32 == 0 and smaller < block and not here.states:
        setup, blocks = here.setup.replayed(block_tokens=smaller), here.blocks * block // smaller
        setup = setup.with_flags(num_gpu_blocks_override=blocks) if here.blocks else setup
        change, more = f"blocks of {block} -> {smaller} tokens (same memory)", block // smaller
        yield Change(change, setup, f"{more}x as many blocks to handle", {"smaller blocks": 1 - 1 / more})


def _same_bytes(setup: Setup, pool_bytes: int) -> Setup:
    """Return a set-up whose blocks have another size, with a pool of as many bytes as now."""
    return setup.replayed(specs={}).with_flags(
        num_gpu_blocks_override=None, block_size=None, kv_cache_memory_bytes=pool_bytes
    )


def finer_states(here: Situation) -> Iterator[Change]:
    """Yield states kept to fewer tokens than a block: at ends, for prompts sent again and next turns; with drafts where
    prompts part, too."""
    block, fine, given = here.state_block, here.fine_unit, here.flags.get("prefix-match-unit")
    taken, unfit = "" if given is None else "the engine has --prefix-match-unit", ""
    if given is None and not fine:
        unfit = f"no multiple of 16 from {LEAST_UNIT} on divides a block of {block} tokens and is smaller"
    kept, unit, price = "at the ends of prompts", {UNIT: fine or here.unit}, KNOBS[UNIT].price
    wins = {"smaller blocks": 1 - fine / block}
    yield _kept_states(here, f"{kept}, to {fine or here.unit} tokens", unit, wins, price, taken or unfit)
    refused, hint = KNOBS[CHECKPOINT].refused(True, here.facts)
    why = f"{refused}; {hint}" if refused else unfit
    settings = {**({} if given or not (here.drafts and fine) else unit), CHECKPOINT: True}
    price = KNOBS[CHECKPOINT].price if given else f"{price}; {KNOBS[CHECKPOINT].price}"
    wins = {"dropping": 1 - fine / block, "retention": 0.5}
    kept += f" and where they part, to {given or fine} tokens"
    yield _kept_states(here, kept, settings, wins, price, why)


def drafting(here: Situation) -> Iterator[Change]:
    """Yield the engine without its drafts, or with MTP's: other blocks, in as much memory."""
    if here.drafts:
        kept, price = "as it is, without drafts", "no drafts: each step makes one token of a request"
        change = _kept_states(here, kept, {DRAFTS: 0}, {"dropping": 1.0, "retention": 0.3}, price)
    else:
        price = "a larger pool for the drafter's layers, larger steps"
        change = _kept_states(here, "as it is, with drafts of MTP", {DRAFTS: 1}, {}, price)
    if here.pool_gib and (here.setup.simulated.specs or POOL_FLAG in here.flags):
        pool_bytes = int(here.pool_gib * GIB)
        setup = change.setup.with_flags(num_gpu_blocks_override=None, kv_cache_memory_bytes=pool_bytes)
        change = replace(change, setup=setup)
    if not here.stands_in:
        yield change


def by_core(here: Situation) -> Iterator[Change]:
    """Yield states at doubling distances before a prompt's end, where the core ends chunks; if it does, as the load
    parts."""
    whole, keeps, price = here.whole_blocks, here.core.keep_states, KNOBS["keep_states"].price
    for slack in [here.tail] if keeps and here.tail else dict.fromkeys(map(whole, SLACKS)):
        settings: dict[str, Value] = {"keep_states": True, "slack": slack}
        why = "stock vLLM has no such rule (--core kvtune)" if here.setup.core != "kvtune" else ""
        if int(CORE["min_drop"].default or 0) * here.state_block > here.chunk:
            settings["min_drop"] = 1
        if keeps and here.tail and whole(slack) != whole(here.core.slack):
            settings, price = {"slack": slack}, "hits of prompts that part elsewhere"
        elif keeps:
            why = "the engine keeps states so"
        if not why and ("prefix-match-unit" in here.flags or here.flags.get(INTERVAL_FLAG, "0") != "0"):
            why = "the core keeps states only at vLLM's default interval, and where hits end at whole blocks"
        kept = f"{whole(slack):,} tokens before the ends of prompts, and at doubling distances"
        yield _kept_states(here, kept, settings, dict.fromkeys(RETENTION, 0.95), price, why)


def more_windows(here: Situation) -> Iterator[Change]:
    """Yield windows that the core keeps further before a prompt's end, and more of them."""
    slack, windows, price = here.core.slack, here.core.windows, KNOBS[INTERVAL].price
    if here.setup.core == "stock":
        return
    for more, share in ((max(2 * slack, here.unit), 0.8), (max(4 * slack, 4 * here.unit), 0.7)):
        if more <= CORE["slack"].high:
            yield _set(here, "slack", slack, more, price, {"retention": share})
    yield _set(here, "windows", windows, windows + 4, price, {"retention": 0.6})


def intervals(here: Situation) -> Iterator[Change]:
    """Yield windows, or states, that are kept at an interval; windows of the core's prompts are kept by its slack."""
    kinds = RETENTION if here.states or here.setup.core == "stock" else RETENTION[1:]
    if here.sessions:
        yield _at_interval(here, here.interval(1024), {})
        return
    for interval, share in ((here.least_interval, 0.9), (4 * here.least_interval, 0.6)):
        new = interval != here.retention
        change = _at_interval(here, interval, dict.fromkeys(kinds, share) if new else {})
        yield change
        finer = list(finer_states(here))[here.drafts] if here.states else change
        if here.states and interval == here.least_interval and not finer.why_not:
            kept, price = f"every {interval:,} tokens, and {finer.kept}", f"{change.cost}; {finer.cost}"
            yield _kept_states(here, kept, {**change.settings, **finer.settings}, {}, price)


def _at_interval(here: Situation, interval: int, wins: Mapping[str, float]) -> Change:
    """Return the change to an interval. Of states it is the chunk, too: one can be kept only where a step ends."""
    price, name = KNOBS[INTERVAL].price, f"windows kept every {interval:,} tokens"
    if here.states:
        settings = {INTERVAL: interval, "max_num_batched_tokens": interval}
        price += f", steps of {interval:,} tokens" + f" (now {here.chunk:,})" * (here.chunk > interval)
        kept = f"every {interval:,} tokens, and at the ends of prompts"
        return replace(_kept_states(here, kept, settings, wins, price), name=name)
    full = here.sessions and here.groups < 2
    why = "all layers are full attention: retention is for windows and states" if full else ""
    now = "dense" if here.retention is None else here.retention
    return _set(here, INTERVAL, now, interval, price, wins, name=name, why_not=why)


def inert(here: Situation) -> Iterator[Change]:
    """Yield what names states and vLLM overwrites, each with why it does nothing."""
    for name, value in INERT:
        why, hint = KNOBS[name].refused(value, here.facts)
        yield _kept_states(here, "", {name: value}, {}, "", f"{why}; {hint}")


def _kept_states(
    here: Situation,
    kept: str,
    settings: Mapping[str, Value],
    wins: Mapping[str, float],
    price: str,
    why: str = "",
) -> Change:
    """Return settings that decide which states are kept, in the words of a command line."""
    core = {name: value for name, value in settings.items() if name in CORE}
    flags = engine_flags({name: value for name, value in settings.items() if name not in CORE})
    words = " ".join([*flags, *core_words(core)]) or "no --speculative-config"
    ends = f" (hits now end at multiples of {here.unit})" if UNIT in settings else ""
    setup, words_of = here.setup.with_knobs(settings), tuple(words.split()) if why else ()
    return Change(words + ends, setup, price, wins, "", "", kept, why, settings, words_of)


def storing(here: Situation) -> Iterator[Change]:
    """Yield what the tier of host memory stores: answers, too, at once, and as long as it may be used again."""
    given = here.flags.get("kv-transfer-config", "")
    transfer: object = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with suppress(ValueError):
        transfer = decode_json(given) if given else transfer
    if not isinstance(transfer, dict):
        return
    extra = transfer.get("kv_connector_extra_config") or {}
    usual = {"store_threshold": 0, "offload_prompt_only": True, "eviction_policy": "lru"}
    for name, value in (("store_threshold", 0), ("offload_prompt_only", False), ("eviction_policy", "lru")):
        if extra.get(name, usual[name]) != value:
            text = _json({**transfer, "kv_connector_extra_config": {**extra, name: value}})
            setup = here.setup.with_flags(kv_transfer_config=text)
            change = f"--kv-transfer-config with {name} {json.dumps(value)}"
            yield Change(change, setup, "more copies to host memory", {"storing": 1.0})


def host_tier(here: Situation) -> Iterator[Change]:
    """Yield host memory, or more of it. vLLM's tier has what the pool has, too: one up to its size brings nothing."""
    now, of_host = float(here.flags.get("kv-offloading-size") or 0), "of host memory" + ON_CPU * here.cpu
    for factor in (2, 4) if now else ():
        gib, share = f"{factor * now:.6g}", factor / (factor + 0.1)
        yield _set(here, TIER_SIZE, f"{now:g}", gib, f"{gib} GiB {of_host}", {"tier": share})
    given, times = here.flags.keys() & {"kv-offloading-size", "kv-transfer-config"}, 2 if here.sessions else 4
    why = "" if here.pool_gib else "the pool's bytes are not known"
    why = f"the engine has --{min(given)}" if given else why
    more = times * here.all_ranks_gib
    if here.sessions and not why:
        name, held = f"host tier up to {size(here.all_ranks_gib * GIB)}", "it holds less than the pool: "
        no_more = f"{held}vLLM copies to it what the pool has, so every token in it is in both"
        yield Change("", here.setup, name=name, why_not=no_more)
    yield Change(
        f"--kv-offloading-size {more:.3g}, host memory of {times}x the pool",
        here.setup.with_flags(kv_offloading_size=f"{more:.6g}"),
        f"{size(more * GIB)} {of_host}",
        {"eviction": here.kept(times)},
        name="host tier" if why else f"host tier of {size(more * GIB)}",
        note="the speed of its copies is assumed",
        why_not=why,
        times=5.0,  # blocks go through it one by one
        more_memory=True,
    )


def fewer_requests(here: Situation) -> Iterator[Change]:
    now = here.sequences or 2 * FEWER_SEQUENCES
    most = max(2, here.sessions // 2) if here.sessions else max(1, now // 2)
    wins = {PREEMPTED: 1.0} | ({"eviction": RARELY} if (here.sequences or 0) > 1 else {})
    cost, name = "requests that wait longer", f"{most} requests at once"
    if not here.sessions or most < now:
        yield _set(here, "max_num_seqs", here.sequences, most, cost, wins, name=name)


def shorter_steps(here: Situation) -> Iterator[Change]:
    """Yield steps of fewer tokens: they take fewer blocks at once, and a state can be kept at the end of each."""
    quarter, half, least = max(here.chunk // 4, here.sequences or 0), here.chunk // 2, here.least_interval
    tried: list[tuple[int, Mapping[str, float]]] = [(quarter, {"eviction": RARELY})]
    if not here.sessions:
        tried = [(least, dict.fromkeys(RETENTION, 0.8))] if here.states and here.retention != 0 else []
        tried += [(half, {"eviction": RARELY})] * (half >= max(here.window, here.unit, here.least_chunk))
    for most, wins in tried:
        cost, name = f"steps of at most {most:,} tokens", f"steps of {most:,} tokens"
        if most < here.chunk:
            yield _set(here, "max_num_batched_tokens", here.chunk, most, cost, wins, name=name)


def free_blocks(here: Situation) -> Iterator[Change]:
    """Yield a pool of which a share stays free when a waiting request is let in."""
    share = 0.05 if here.sessions else 0.1
    cost, name = f"new requests wait until {share:.0%} of the pool is free", f"{100 * share:g} % of the pool"
    if float(here.flags.get("watermark") or 0) < share:
        name, note = f"{name} kept free", f"against preemptions: {cost}"
        yield _set(here, "watermark", None, str(share), cost, {PREEMPTED: 0.9}, name=name, note=note)


def caching(here: Situation) -> Iterator[Change]:
    setup = here.setup.with_flags(no_enable_prefix_caching=None, enable_prefix_caching="")
    yield Change("--enable-prefix-caching", setup, wins={"caching": 1.0})


def other_core(here: Situation) -> Iterator[Change]:
    """Yield the same engine with the other core: stock instead of kvtune, or kvtune instead of stock."""
    if here.setup.core == "stock":
        words = ("--core", "kvtune")
        yield Change(" ".join(words), here.setup.with_core(), name="kvtune's core", flags=words)
    else:
        stock = here.setup.stock()  # its blocks have another size than packed ones
        setup = _same_bytes(stock, int(here.pool_gib * GIB)) if here.core.packed else stock
        yield Change("--core stock", setup)


def _set(
    here: Situation,
    knob: str,
    now: object,
    value: int | str,
    cost: str,
    wins: Mapping[str, float],
    **more: Any,
) -> Change:
    """Return the change of one knob to a value; `now` is what it has, None: not said."""
    name = f"core.{knob}" if knob in CORE else f"--{knob.replace('_', '-')}"
    setup = here.setup.with_core(**{knob: value}) if knob in CORE else here.setup.with_flags(**{knob: value})
    change = f"{name} {value}" if now is None else f"{name} {now} -> {value}"
    return Change(change, setup, cost, wins, **more)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


CHANGES: tuple[Callable[[Situation], Iterator[Change]], ...] = (
    orders,
    pools,
    half_the_bytes,
    speculation,
    smaller_blocks,
    finer_states,
    drafting,
    by_core,
    more_windows,
    intervals,
    inert,
    storing,
    host_tier,
    fewer_requests,
    shorter_steps,
    free_blocks,
    caching,
    other_core,
)
"""The table. Of changes with equal gains, answers list the first one first."""
OF_STATES, OF_OTHERS = {finer_states, drafting, by_core, inert}, {more_windows}
"""The sections of models with recurrent states alone, and of those without."""


def changes(here: Situation) -> list[Change]:
    """Return what may be changed here, and what does nothing with why."""
    skipped = OF_OTHERS if here.states else OF_STATES
    return [change for entry in CHANGES if entry not in skipped for change in entry(here)]
