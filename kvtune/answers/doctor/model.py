"""A model's effective settings: KV cache groups, block size and its reason, bytes, waste, and what can hit.

`examine_model` asks vLLM (`ask_vllm.py`), or plans from config.json (`planned.py`), in a second, without vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm

import msgspec

from kvtune.answers.doctor.facts import Facts, Group, ModelFacts, Visits
from kvtune.answers.doctor.finding import Finding
from kvtune.answers.doctor.packing import Layouts, layouts_of, load_of
from kvtune.answers.doctor.planned import (
    SOME_GPU,
    agreed,
    assumed_platform,
    read_config,
    requested_block,
    with_gpu_block,
    with_next_block,
    with_origins,
    with_state_rule,
)
from kvtune.answers.doctor.spent import Freed, freed, judged
from kvtune.answers.doctor.tier import Tier
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.units import count, size
from kvtune.data.layout.config import family_of
from kvtune.data.layout.models import engine_defaults
from kvtune.data.layout.plan import match_units
from kvtune.data.platforms import LARGE_GPU, Platform
from kvtune.lab.engine import ask
from kvtune.lab.setup.platform import engines
from kvtune.lab.setup.resolve import ENGINES, resolve
from kvtune.lab.setup.setup import Pool, Setup
from kvtune.requests.types import Workload

NOMINAL_POOL_BYTES = 16 << 30
"""The pool's size in the table of layouts, if the real one is known only after an engine started."""

KNOWN = ("gemma3", "gpt_oss", "llama", "opt", "qwen2", "qwen3", "qwen3_moe", "qwen3_next")
"""Families for which the planner's arithmetic equals vLLM's own answers (tests/answers/doctor/test_doctor_vllm.py)."""

UNSAID = Pool()

UNBUILDABLE = "cannot be built without weights"
"""Part of the error message of a model that needs kernels which this machine's vLLM lacks."""


class Floor(msgspec.Struct, frozen=True):
    """The shortest prefix of a prompt that can hit, and why no shorter one can."""

    tokens: int
    why: str
    first_visit: int  # the first replayed visit with a new suffix that hit, from 1; 0: none hit
    last_first_visit: int  # the same, for the replayed prefix that hit latest


class ModelReport(ModelFacts, frozen=True, kw_only=True):
    """The facts about a model, and what follows from them.

    `token_bytes`: keys and values of one token in all full-attention layers. `state_bytes`: all states of one sequence.
    `tail_bytes`: lost on average in a sequence's last, partly filled attention blocks. `layouts`: only for models with
    states that the planner supports. `freed`: what flags would free of one request of max_model_len.
    """

    block_bytes: int
    token_bytes: int
    state_bytes: int
    tail_bytes: int
    match_units: list[int]
    floor: Floor | None
    freed: list[Freed] = []
    layouts: Layouts | None
    tier: Tier | None = None

    @classmethod
    def of(cls, facts: Facts, layouts: Layouts | None = None) -> ModelReport:
        groups = facts.groups
        return cls(
            **{name: getattr(facts, name) for name in ModelFacts.__struct_fields__},
            block_bytes=facts.bytes_of_block,
            token_bytes=sum(group.token_bytes for group in groups),
            state_bytes=sum(g.layers * g.used_bytes for g in groups if g.kind == "state"),
            tail_bytes=sum(g.layers * g.page_bytes // 2 for g in groups if g.kind != "state"),
            match_units=match_units(facts.block_tokens, 16) if facts.hybrid else [],
            floor=floor_of(facts),
            freed=list(freed(facts)),
            layouts=layouts,
        )

    def pad_share(self, group: Group) -> float:
        """Return the unused share of a group's blocks: padding inside pages, and padding layers of a smaller group."""
        return 1.0 - group.layers * group.used_bytes / self.block_bytes if self.block_bytes else 0.0


def examine_model(
    model: str,
    engine_args: Sequence[str],
    workload: Workload | None = None,
    like: Platform | None = None,
    *,
    ask: bool = True,
    pool: Pool = UNSAID,
) -> tuple[ModelReport, tuple[Finding, ...]]:
    """Return the report on a model under vLLM's flags, and the findings about its settings.

    `workload`: compare block layouts for its requests. `like`: the device of --like-device; None: this machine's.
    `pool`: what the flags do not say of it. `ask`: always ask vLLM. Otherwise arithmetic answers for `KNOWN` families
    without flags and without a `workload`.
    """
    from kvtune.answers.doctor.environment import installed
    from kvtune.answers.doctor.rules import settings_findings

    notes: tuple[Finding, ...] = ()
    platform = engines(like)
    if not any(installed(name) for name in ENGINES):
        platform = platform if like is not None else assumed_platform()
        facts = read_config(model, engine_args, platform)
    else:
        try:
            sized = like is not None and bool(
                like.memory_bytes
            )  # only vLLM knows what the weights take of it
            asked = ask or sized or bool(engine_args) or workload is not None
            facts = (None if asked else _planned(model, platform)) or ask_vllm(
                Setup(model=model, engine_args=list(engine_args), platform=like, pool=pool)
            )
        except KvtuneError as error:
            # The model needs kernels that this machine's vLLM lacks: ask as on a GPU.
            if UNBUILDABLE not in error.message or platform.kind == "cuda":
                raise
            platform = LARGE_GPU
            facts = ask_vllm(Setup(model=model, engine_args=list(engine_args), platform=platform))
            hint = f"the report below is vLLM's for {platform.title}"
            notes = (Finding("note", "model", error.message, hint),)
    facts = with_origins(facts, platform, engine_args)
    facts = with_next_block(with_state_rule(with_gpu_block(facts)), platform)
    facts = facts if facts.source == "vllm" else judged(facts)
    layouts = layouts_for(facts, workload)
    if layouts is not None and layouts.recommended:
        row = layouts.rows[layouts.recommended]
        setting = f"--set core.packed=true --set core.states_per_block={row.states_per_block}"
        chosen = f"{setting} (experimental; replay it with --on sim first)"
        notes = (*notes, Finding("note", "layout", layouts.why, chosen))
    return ModelReport.of(facts, layouts), (*notes, *settings_findings(facts))


def _planned(model: str, platform: Platform) -> Facts | None:
    """Return a model's facts by arithmetic, without flags and for this vLLM's platform; None if only vLLM knows them.

    Only vLLM knows them for families not in `KNOWN`, for quantized models, and for windows that a switch turns on.
    """
    if platform == SOME_GPU:
        return None
    resolve(model, dummy=True, engine_args=[])  # a wrong name fails in the same way as when vLLM is asked
    try:
        facts = read_config(model, [], platform)
    except UsageError:
        return None
    without = {"quantization_config"} if "hf-overrides" in engine_defaults(model, platform.runs_on) else set()
    switched = {"quantization_config", "use_sliding_window"} & {
        k for k, v in facts.config.items() if v
    } - without
    if family_of(facts.config) not in KNOWN or switched:
        return None
    return msgspec.structs.replace(facts, source="arithmetic", device=platform.kind, kv_cache_dtype="auto")


def layouts_for(facts: Facts, workload: Workload | None) -> Layouts | None:
    """Return stock's layout and the packed ones; None without states, or if the planner's block size is not vLLM's."""
    by_arithmetic = agreed(facts)
    # Only vLLM knows what can be packed.
    if by_arithmetic is None or facts.source == "arithmetic":
        return None
    shape, backend = by_arithmetic
    return layouts_of(
        shape,
        backend,
        facts.pool_bytes or NOMINAL_POOL_BYTES,
        load=load_of(workload) if workload is not None else None,
        requested_block=requested_block(facts),
        refusal=facts.packing_refusal,
    )


def block_why(facts: ModelFacts) -> str:
    """Return the reason for the block size, in words."""
    requested = requested_block(facts)
    state = next((g for g in facts.groups if g.kind == "state"), None)
    attention = next((g for g in facts.groups if g.kind == "full attention"), None) or next(
        (g for g in facts.groups if g.kind != "state"), None
    )
    if state is None or attention is None:
        if requested == facts.block_tokens:
            return "as given by --block-size"
        if facts.block_tokens != facts.default_block_tokens and attention is not None and attention.backend:
            return f"vLLM's choice for {attention.backend}"
        return facts.origins.get("block_size") or f"the {facts.device} attention backend's default"
    token = attention.used_bytes // attention.block_tokens
    tokens = ceil(state.used_bytes / token)
    step = lcm(facts.default_block_tokens or 1 if requested is None else requested, facts.state_step)
    return (
        f"one attention layer's share of a block ({size(token)} per token) must hold one state of "
        f"{size(state.used_bytes)} ({count(state.used_bytes)} B): {tokens} tokens or more, in steps of {step}"
    )


def floor_of(facts: Facts) -> Floor | None:
    """Return the shortest shared prefix that can hit; None if no prefix can."""
    if not facts.caching or not facts.groups or 0 < facts.max_model_len <= facts.block_tokens:
        return None
    tokens = max((group.block_tokens for group in facts.groups if group.cached), default=facts.hit_tokens)
    tokens = max(tokens, facts.hit_tokens if facts.source == "vllm" and not facts.match_unit else 0)
    why = f"hits are whole blocks, and a block is {tokens} tokens: {block_why(facts)}"
    replayed = {visit.prefix_tokens: any(visit.hit_tokens) for visit in facts.shared_prefix}
    drafts = any(name.startswith("speculative") for name in facts.given)
    by_rule = facts.source != "vllm" and facts.draft_tokens > 0
    if by_rule or (drafts and replayed.get(tokens) is False and replayed.get(2 * tokens)):
        basis = "by its rule" if by_rule else "replayed"
        why = f"{why}; vLLM drops the last block of a hit and computes it again, for the drafter ({basis})"
        tokens *= 2
    firsts = first_hits(facts.shared_prefix, tokens)
    return Floor(tokens, why, min(firsts, default=0), max(firsts, default=0))


def first_hits(visits: Sequence[Visits], floor: int) -> list[int]:
    """Return the first visit that hit, counted from 1, for each replayed prefix of at least `floor` tokens that hit."""
    firsts = []
    for visit in visits:
        hit = next((number for number, tokens in enumerate(visit.hit_tokens, start=1) if tokens), 0)
        if visit.prefix_tokens >= floor and hit:
            firsts.append(hit)
    return firsts


def ask_vllm(setup: Setup) -> Facts:
    """Return facts from vLLM's own configuration and KV specs. KvtuneError, with its reason, if it refuses flags."""
    return msgspec.convert(ask.facts(setup), Facts)
