"""Settings of vLLM and of the core that decide which recurrent states are kept; their prices, or why not. Pure.

Words, prices and refusals are those of the catalogue of knobs. `explain` tries choices as remedies, `table.py` replays
them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtune.base.commands import core_words
from kvtune.base.legal import Value
from kvtune.data.flags import draft_settings, flag_texts, flag_value
from kvtune.data.knobs import CORE, DRAFTS, KNOBS, ModelFacts
from kvtune.data.layout.plan import match_units
from kvtune.data.recipe import engine_flags
from kvtune.lab.setup.setup import POOL_FLAG, Setup

UNIT, CHECKPOINT = "prefix_match_unit", "enable_mamba_shared_prefix_checkpoint"
INERT: tuple[tuple[str, Value], ...] = (("mamba_cache_mode", "none"), ("mamba_block_size", 8))
"""Settings that name states and that vLLM overwrites, with a value that it would not take."""
LEAST_UNIT = 32
"""The finest unit that is tried: each unit of a prompt is a hash."""
CHUNKS = 8
"""A choice asks for at most this many times the engine's steps for a prompt: each step reads all weights."""


SLACKS = (64, 512, 2048)
"""How far before a prompt's last state the core keeps another: lengths of what follows a shared prefix."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What decides which states an engine keeps, in tokens. `block`: of a state. `unit`: hits end at its multiples."""

    setup: Setup
    block: int
    unit: int
    chunk: int
    sequences: int
    pool_bytes: int = 0  # 0: not known

    @property
    def drafts(self) -> bool:
        return draft_settings(self.setup.engine_args) is not None

    @property
    def facts(self) -> ModelFacts:
        return ModelFacts(state_layers=1, block_tokens=self.block, drafts=self.drafts)

    @property
    def fine_unit(self) -> int:
        """The finest unit from LEAST_UNIT on that divides a block; 0: there is none below the block."""
        return next((unit for unit in match_units(self.block, 16) if unit >= LEAST_UNIT), 0)

    @property
    def least_chunk(self) -> int:
        """The fewest tokens in a step that a choice may ask for: a token of every request, and at most CHUNKS times
        the steps."""
        return max(self.sequences, self.chunk // CHUNKS)

    @property
    def least_interval(self) -> int:
        """The shortest interval of states: whole blocks, and no shorter than `least_chunk`."""
        return self.whole_blocks(self.least_chunk)

    @property
    def slacks(self) -> tuple[int, ...]:
        """How far before a prompt's last state the core can keep another, in whole blocks."""
        return tuple(dict.fromkeys(map(self.whole_blocks, SLACKS)))

    def whole_blocks(self, tokens: int) -> int:
        """Return as many tokens, in whole blocks."""
        return max(1, -(-tokens // self.block)) * self.block


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings, and which states are kept with them. `why_not`: why they do nothing here, then nothing is replayed."""

    kept: str
    settings: dict[str, Value]
    price: str = ""
    why_not: str = ""

    @property
    def words(self) -> str:
        """The settings as a command line has them."""
        core = {name: value for name, value in self.settings.items() if name in CORE}
        flags = engine_flags({name: value for name, value in self.settings.items() if name not in CORE})
        return " ".join([*flags, *core_words(core)]) or "no --speculative-config"

    def of(self, engine: Engine, setup: Setup | None = None) -> Setup:
        """Return the engine's set-up, or another like it, with the choice; with other blocks in as much memory."""
        setup = setup or engine.setup
        changed = setup.with_knobs(self.settings)
        counted = setup.simulated.specs or flag_value(setup.engine_args, POOL_FLAG)
        if DRAFTS in self.settings and engine.pool_bytes and counted:
            return changed.with_flags(num_gpu_blocks_override=None, kv_cache_memory_bytes=engine.pool_bytes)
        return changed


def choices(engine: Engine) -> Iterator[Choice]:
    """Yield what flags can change, then what they cannot."""
    yield from (fine_ends(engine), fine_partings(engine))
    least = engine.least_interval
    yield from (at_interval(engine, least), at_interval(engine, 4 * least))
    yield from (by_core(engine, slack) for slack in engine.slacks)
    yield drafting(engine)
    for name, value in INERT:
        why, hint = KNOBS[name].refused(value, engine.facts)
        yield Choice("", {name: value}, why_not=f"{why}; {hint}")


def fine_ends(engine: Engine) -> Choice:
    """Keep the state where a prompt ends, to fewer tokens than a block: for prompts sent again, and next turns."""
    why = ""
    if "prefix-match-unit" in flag_texts(engine.setup.engine_args):
        why = "the engine has --prefix-match-unit"
    elif not engine.fine_unit:
        why = (
            f"no multiple of 16 from {LEAST_UNIT} on divides a block of {engine.block} tokens and is smaller"
        )
    unit = engine.fine_unit or engine.unit
    return Choice(f"at the ends of prompts, to {unit} tokens", {UNIT: unit}, KNOBS[UNIT].price, why)


def fine_partings(engine: Engine) -> Choice:
    """With drafts, keep the state where prompts part, to fewer tokens than a block."""
    unit = flag_texts(engine.setup.engine_args).get("prefix-match-unit", "")
    alone = unit or not (engine.drafts and engine.fine_unit)
    settings: dict[str, Value] = {CHECKPOINT: True} if alone else {UNIT: engine.fine_unit, CHECKPOINT: True}
    knob = KNOBS[CHECKPOINT]
    why, hint = knob.refused(True, engine.facts)
    if not why and not unit:
        why, hint = fine_ends(engine).why_not, ""
    kept = f"at the ends of prompts and where they part, to {unit or engine.fine_unit} tokens"
    price = "; ".join(filter(None, (KNOBS[UNIT].price if not unit else "", knob.price)))
    return Choice(kept, settings, price, "; ".join(filter(None, (why, hint))))


def at_interval(engine: Engine, interval: int) -> Choice:
    """Keep states at an interval, which has to be the chunk, too: a state can be kept only where a step ends."""
    knob = KNOBS["prefix_cache_retention_interval"]
    settings: dict[str, Value] = {knob.name: interval, "max_num_batched_tokens": interval}
    return Choice(
        f"every {interval:,} tokens, and at the ends of prompts",
        settings,
        f"{knob.price}, steps of {interval:,} tokens"
        + (f" (now {engine.chunk:,})" if engine.chunk > interval else ""),
    )


def by_core(engine: Engine, slack: int) -> Choice:
    """Let kvtune's core end chunks where states are kept: at doubling distances before a prompt's end."""
    settings: dict[str, Value] = {"keep_states": True, "slack": slack}
    if int(CORE["min_drop"].default or 0) * engine.block > engine.chunk:
        settings["min_drop"] = 1
    flags = flag_texts(engine.setup.engine_args)
    why = ""
    if engine.setup.core != "kvtune":
        why = "stock vLLM has no such rule (--core kvtune)"
    elif engine.setup.core_settings.get("keep_states"):
        why = "the engine keeps states so"
    elif "prefix-match-unit" in flags or flags.get("prefix-cache-retention-interval", "0") != "0":
        why = "the core keeps states only at vLLM's default interval, and where hits end at whole blocks"
    kept = f"{slack:,} tokens before the ends of prompts, and at doubling distances"
    return Choice(kept, settings, KNOBS["keep_states"].price, why)


def drafting(engine: Engine) -> Choice:
    """Turn drafts off, or MTP's on."""
    if engine.drafts:
        return Choice(
            "as it is, without drafts", {DRAFTS: 0}, "no drafts: each step makes one token of a request"
        )
    return Choice(
        "as it is, with drafts of MTP", {DRAFTS: 1}, "a larger pool for the drafter's layers, larger steps"
    )
