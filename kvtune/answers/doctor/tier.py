"""What a tier of host memory would hold and load, before it is bought: arithmetic on a model's KV cache groups.

Mirrors the native connector of vLLM 0.32, whose names stand beside its rules. tests/answers/doctor/test_tier_engine.py
holds it against what a real engine maps, stores and loads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count as numbers
from math import ceil, lcm
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvtune.answers.doctor.facts import Group, ModelFacts
from kvtune.answers.doctor.finding import Finding
from kvtune.base.errors import UsageError
from kvtune.base.units import count
from kvtune.data.flags import flag_number
from kvtune.lab.device.cost import NOMINAL, CopyTime, StepCost

PAGE, PARALLEL = 4096, ("tensor", "pipeline")
ANSWER, SUFFIX = 256, 64
"""Tokens of an answer, and of what is new in the turn after it."""
LENGTHS = (4_096, 32_768, 131_072)
MIRRORED = {"full attention groups", "sliding window groups", "state groups"}


class Prompt(msgspec.Struct, frozen=True):
    """A prompt that was sent once and left the pool. `blocks`: stored of each cached group; `fit`: prompts that fit.

    Tokens that load (None: unknown): `again`, it is sent again; `turn`, its next turn; `shared`, another prompt begins
    with it, and so did the first. `load_bytes`: of a rank. Seconds: to load `again`, and to compute as many.
    """

    tokens: int
    blocks: list[int]
    fit: int
    again: int
    turn: int
    shared: int | None
    load_bytes: int
    load_s: float
    compute_s: float


class Tier(msgspec.Struct, frozen=True):
    """One engine's tier of `size_bytes` with vLLM's native connector: `blocks` of the pool's, of any group.

    `mapped_bytes`: by its ranks; `rounded_bytes`: where torch pins each tensor as a power of two (vLLM 0.26; ROCm);
    `simple_bytes`: by SimpleCPU. `break_even`: tokens from which loading is quicker; 0: never.
    """

    size_bytes: int
    ranks: int
    blocks: int
    mapped_bytes: int
    rounded_bytes: int
    simple_bytes: int
    prompts: list[Prompt]
    break_even: int
    cost: StepCost


class Rules(NamedTuple):
    """`groups`: those that are cached, full attention first; a state is a window of one token. `drafts`: tokens are.

    `align`: hits end at its multiples; 0: at no common one. `unit`: a multiple of each group's block.
    """

    groups: list[Group]
    align: int
    unit: int
    retention: int
    drafts: bool

    @classmethod
    def of(cls, report: ModelFacts) -> Rules:
        """UsageError for what vLLM refuses, and for what is not mirrored."""
        cached = [group for group in report.groups if group.cached]
        odd = {f"{group.kind} groups" for group in cached} - MIRRORED
        odd |= report.given.keys() & {"decode-context-parallel-size", "prefill-context-parallel-size"}
        odd |= {"no cached group"} - {"no cached group" for _ in cached}
        odd |= {f"states of mode {report.state_mode}"} - {"states of mode ", "states of mode align"}
        if odd or report.match_unit or report.retention is None:
            what = ", ".join(sorted(odd)) or "--prefix-match-unit or dense retention"
            raise UsageError(f"--tier: what it stores is not known with {what}", "leave it out")
        # annotate_eagle_groups: the connector knows a drafter's group only by MTP's or DSpark's last layer.
        drafts, named = any(g.draft_layers for g in cached), report.given.get("speculative-config", "")
        annotated = "mtp" in named or "dspark" in named
        states: dict[str, int] = {g.kind: 1 for g in cached if g.kind == "state"}
        windows = [(g, states.get(g.kind, g.window), g.draft_layers * annotated) for g in cached]
        cached = [replace(g, window=window, draft_layers=layers) for g, window, layers in windows]
        blocks = {group.block_tokens for group in cached}
        full = {group.block_tokens for group in cached if not group.window} or {max(blocks)}
        align = full.pop() if len(full) == 1 else 0
        if wrong := [g.block_tokens for g in cached if g.window and report.retention % g.block_tokens]:
            text = f"--tier: vLLM refuses --prefix-cache-retention-interval {report.retention} beside it"
            raise UsageError(text, f"a multiple of {wrong[0]}")
        return cls(sorted(cached, key=lambda g: g.window > 0), align, lcm(*blocks), report.retention, drafts)

    def stored(self, group: Group, tokens: int) -> Collection[int]:
        """Return the blocks that a prompt leaves which is sent once (_build_store_jobs, reachable_block_mask)."""
        block, draft = group.block_tokens, group.draft_layers > 0
        if group.kind == "state":
            ends = [(tokens - 1) // self.unit * self.unit]
            if self.drafts:  # replay_boundaries: a block less
                ends = [end - self.unit for end in (*ends, tokens // self.unit * self.unit)]
            return {end // block - 1 for end in ends if end > 0}
        need, step = ceil((group.window - 1) / block) + draft, self.retention or tokens
        dense = not self.align or self.align % block or 0 < self.retention <= need * block
        if not group.window or dense:
            return range(tokens // block)
        ends = [*range(step, tokens + self.retention, step), (tokens - 1) // self.align * self.align]
        tails = (range(max(0, end // block + draft - need), end // block + draft) for end in ends)
        return {number for tail in tails for number in tail if number < tokens // block}

    def loaded(self, begun: int, common: int, prompt: int) -> int:
        """Return the tokens loaded of a prompt that has `common` tokens in common with a stored one of `begun` tokens.

        _lookup_complete_chunks: full attention's hit, then a window or state of each other group that ends there.
        """
        kept = [self.stored(group, begun) for group in self.groups]
        most, before = prompt - bool(self.groups[-1].window), -1
        most -= most % max((g.block_tokens for g in self.groups if g.kind == "state"), default=1)
        while most != before:
            before = most
            for group, stored in zip(self.groups, kept, strict=True):
                block, draft = group.block_tokens, group.draft_layers > 0
                asked = min(ceil(most / block) + draft, prompt // block)
                end = min(asked, common // block)
                if group.window:  # _sliding_window_lookup, from the right
                    have = {number for number in stored if number < end}
                    need, right = ceil(group.window / block), -min(most, (asked - draft) * block) % block
                    first = max(need, ceil((group.window - 1 + right) / block)) if group.window > 1 else 1
                    sizes = {asked: first + draft}  # of the run at the right edge
                    ends = range(asked, 0, -1)
                    runs = (n for n in ends if have.issuperset(range(n - sizes.get(n, need + draft), n)))
                    end = next(runs, next(n for n in numbers() if n not in have))
                most = min(most, (end - draft) * block)
                if most < block:
                    return 0
        return most

    def load_bytes(self, tokens: int) -> int:
        """Return the bytes that a rank copies to load a hit of this length."""
        reach = [min(tokens, max(group.window - 1, 1)) if group.window else tokens for group in self.groups]
        blocks = [ceil(need / group.block_tokens) for need, group in zip(reach, self.groups, strict=True)]
        return sum(n * g.layers * g.used_bytes for n, g in zip(blocks, self.groups, strict=True))


def tier_of(report: ModelFacts, block: int, size_bytes: int, cost: StepCost = NOMINAL) -> Tier:
    """Return what a tier comes to, at assumed times of copies. `block`: the bytes of one on a rank."""
    rules, copy = Rules.of(report), CopyTime()
    tensor, stages = (flag_number(report.given, f"{kind}-parallel-size", 1) for kind in PARALLEL)
    ranks, layers, on_cpu = tensor * stages, max(report.group_layers, 1), report.device.startswith("cpu")
    # CPUOffloadingSpec: a block of any group takes one of the pool's of each rank; MLA's is one for all ranks.
    latent = all("MLA" in spec for group in rules.groups for spec in group.specs or ["-"])
    row = ceil(block * (1 if latent and stages == 1 and not on_cpu else ranks) / PAGE) * PAGE
    blocks = size_bytes // row
    pinned = layers * (1 << max(blocks * block // layers - 1, 0).bit_length()) if blocks else 0

    def seconds(tokens: int) -> tuple[float, float]:
        computing = (cost.prefill_token_us + cost.prefill_kv_us * tokens / 2) * tokens / 1e6
        return copy.seconds(rules.load_bytes(tokens), copy.load_gib_s), computing

    prompts = []
    for tokens in [n for n in LENGTHS if n <= report.max_model_len] or [report.max_model_len]:
        kept = [len(rules.stored(group, tokens)) for group in rules.groups]
        again, turn = (rules.loaded(tokens, tokens, tokens + more) for more in (0, ANSWER + SUFFIX))
        shared, longer = None, tokens + rules.unit + SUFFIX
        if not (rules.retention and report.hybrid):  # such states are kept where a step happens to end
            shared = rules.loaded(longer, tokens, longer)
        fit, copied = blocks // max(sum(kept), 1), rules.load_bytes(again)
        prompts.append(Prompt(tokens, kept, fit, again, turn, shared, copied, *seconds(again)))
    lengths = range(rules.unit, report.max_model_len + 1, rules.unit)
    quicker = next((n for n in lengths if seconds(n)[0] < seconds(n)[1]), 0)
    simple = max(1, size_bytes // ranks // block) * block * ranks  # SimpleCPUOffloadWorker
    held = blocks, blocks * (block * ranks if on_cpu else row), pinned * ranks, simple
    return Tier(size_bytes, ranks, *held, prompts, quicker, cost)


def tier_findings(tier: Tier, pool_blocks: int) -> Iterator[Finding]:
    """Return what makes the tier useless."""
    longest, held = tier.prompts[-1], f"it holds {count(tier.blocks)} blocks"
    if tier.blocks <= pool_blocks:
        text = f"{held}, no more than the pool: what is in the tier is in the pool, too"
        yield Finding("warning", "tier", text, "a larger one, or none")
    if not longest.again or not tier.blocks:
        yield Finding("warning", "tier", f"{held}; of {count(longest.tokens)} tokens none loads", "none")
    elif longest.shared == 0:
        text = "prefixes that prompts share never load: windows and states are stored where a prompt ends"
        yield Finding("note", "tier", text, "--prefix-cache-retention-interval")
