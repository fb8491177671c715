"""The catalogue of knobs: each setting of the core and of vLLM that kvtune reads, tries or writes, declared once. Pure.

A knob owns its name, help, unit, legal values, default, the values worth a trial, and where it acts. Flags, recipes,
run files, searches, replays and pages ask it. The core's are the fields of `CoreSettings`; vLLM's stand in `ENGINE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.base.legal import Legal, Value

Bundle = tuple[tuple[str, Value], ...]
"""Settings that are set together: one value of a searched knob (a block layout) stands for several settings."""
Acts = Literal["core", "layout", "scheduler", "tier", "front end", "collector"]
"""Where a knob acts. A replay has no front end and no garbage collector; a tier knob acts only with host memory."""
ConfigPart = Literal["", "cache", "scheduler"]

MOST = 1 << 31
"""An upper limit that no count of tokens, blocks or requests reaches."""
MOST_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model on an engine that decide which values are legal. `window` 0: no sliding windows.

    `unknown`: why the model's properties are unknown; "" if its config.json was read.
    """

    window: int = 0
    state_layers: int = 0
    alignment: int = 16
    block_tokens: int = 16
    """The default block size, or what `--block-size` asks for."""
    blocks: tuple[int, ...] = (16, 32, 64, 128)
    """Block sizes worth a trial."""
    max_model_len: int = 0
    layouts: tuple[Bundle, ...] = ()
    """Layouts for recurrent states: stock's at some block sizes, and packed ones."""
    packing_refusal: str = ""
    """Why blocks cannot be packed."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Why this vLLM ignores a knob, by its name."""
    batched_tokens: int = 2048
    """Default of max_num_batched_tokens."""
    sequences: int = 128
    """Default of max_num_seqs."""
    caching: bool = True
    drafts: bool = False
    """Whether flags name a drafter."""
    unknown: str = ""

    @property
    def state_mode(self) -> str:
        """What vLLM makes of --mamba-cache-mode, whatever is given: prefix caching decides."""
        return "align" if self.state_layers and self.caching else "none"


Worth = Callable[[ModelFacts], tuple[Value, ...]]


@dataclass(frozen=True, slots=True)
class Multiples:
    """A knob's legal values for one model: multiples of `step` from `least` up."""

    least: int
    step: int
    words: str

    def hold(self, value: Value) -> bool:
        """Whether the value is among them; a word, such as `none`, always is."""
        return isinstance(value, str) or (value >= self.least and value % self.step == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob(Legal):
    """One setting of the core or of vLLM.

    worth: the values worth a trial for a model. Searches try only knobs that have them.
    tuned: whether `kvtune tune` searches it for a model (None: never).
    of_model: legal values for one model, if they are fewer than those that a file may hold.
    """

    name: str
    help: str
    price: str = ""
    """What a change of it costs beside hits, in words."""
    acts: Acts = "core"
    default: Value | None = None
    """None: vLLM's own."""
    worth: Worth | None = None
    tuned: Callable[[ModelFacts], bool] | None = None
    of_model: Callable[[ModelFacts], Multiples] | None = None
    refusal: Callable[[Value, ModelFacts], tuple[str, str]] | None = None
    """Return why this model cannot have the value, and what is legal; ("", "") if it can."""
    group: str = ""
    """The flag of `kvtune sweep` that tries this knob and the others of its group."""
    short: str = ""
    """A shorter name that `--set` takes, too."""
    changes_specs: bool = False
    """Whether it changes the model's KV specs, so that a replay of a run must compute them anew."""
    tuned_in_stock: bool = False
    """Whether `kvtune tune --core stock` searches it, though `tune` with kvtune's core does not."""
    times_only: bool = False
    """Whether it changes times, and no hits."""
    config: ConfigPart = ""
    """The part of vLLM's configuration that has a field of this name."""
    words: str = ""
    """The legal values in words, where `legal` would not say enough."""

    @property
    def head(self) -> str:
        """The name with its unit, for the head of a column."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def searched(self) -> bool:
        return self.worth is not None

    @property
    def replayed(self) -> bool:
        """Whether a replay can show what it changes."""
        return self.acts not in ("collector", "front end")

    def checked(self, value: object) -> Value:
        """Return a core setting's value as this knob's type; UsageError if it is not legal."""
        legal = Legal.read(self, value)
        if legal is None:
            raise UsageError(f"core.{self.name}={value!r} is not legal", f"{self.name} takes {self.legal}")
        return legal

    def read_for(self, text: object, facts: ModelFacts) -> Value:
        """Return the value in the knob's type. UsageError says which values are legal for this model."""
        if self.name in CORE:
            value = self.checked(text)
        else:
            value = self._engine_value(text, facts)
        why, hint = self.refused(value, facts)
        if why:
            raise UsageError(why, hint)
        return value

    def refused(self, value: Value, facts: ModelFacts) -> tuple[str, str]:
        """Return why this model cannot have the value, and what is legal; ("", "") if it can."""
        return self.refusal(value, facts) if self.refusal else ("", "")

    def _engine_value(self, text: object, facts: ModelFacts) -> Value:
        if self.name in facts.ignored and str(text).strip() != str(self.default):
            raise UsageError(
                f"{self.name}={text} has no effect here: {facts.ignored[self.name]}", f"leave {self.name} out"
            )
        value = Legal.read(self, text)
        limits = self.of_model(facts) if self.of_model else None
        if value is None or (limits is not None and not limits.hold(value)):
            words = limits.words if limits else self.words or self.legal
            raise UsageError(f"{self.name}={text} is not legal", f"{self.name} takes {words}")
        return value

    def candidates(self, facts: ModelFacts) -> tuple[Value, ...]:
        """Return the values worth a trial for this model."""
        if self.name in facts.ignored and self.default is not None:
            return (self.default,)
        if self.worth is not None:
            values = self.worth(facts)
            # For an unknown model, add the core's default to the values for plain models.
            if facts.unknown and self.name in CORE and self.default is not None:
                return _with(values, self.default)
            return values
        if self.kind == "switch":
            return (True, False)
        return self.choices or (() if self.default is None else (self.default,))


def _with(values: tuple[Value, ...], served: Value) -> tuple[Value, ...]:
    """Return the values with the default `served` among them."""
    return values if served in values else (*values, served)


def _declared(default: Value, help: str, kind: Any, more: dict[str, Any]) -> Any:
    """Return a field of CoreSettings that declares its knob."""
    return field(default=default, metadata={"knob": {"help": help, "kind": kind, **more}})


def _switch(default: bool, help: str, **more: Any) -> Any:
    return _declared(default, help, "switch", more)


def _integer(default: int, help: str, low: int, high: int, **more: Any) -> Any:
    return _declared(default, help, "integer", {"low": low, "high": high, **more})


def _number(default: float, help: str, low: float, high: float, **more: Any) -> Any:
    return _declared(default, help, "number", {"low": low, "high": high, **more})


def _choice(default: str, help: str, choices: tuple[str, ...], **more: Any) -> Any:
    return _declared(default, help, "choice", {"choices": choices, **more})


def _has_window(facts: ModelFacts) -> bool:
    return facts.window > 0


def _reused(facts: ModelFacts) -> bool:
    return facts.window > 0 or not facts.state_layers


def _states_named(facts: ModelFacts) -> tuple[Value, ...]:
    named = [value for layout in facts.layouts for name, value in layout if name == "states_per_block"]
    return tuple(named) or (1,)


def _refuse_packing(value: Value, facts: ModelFacts) -> tuple[str, str]:
    if value and facts.packing_refusal:
        return f"packed=true is not legal: {facts.packing_refusal}", "leave packed out"
    return "", ""


def _refuse_states(value: Value, facts: ModelFacts) -> tuple[str, str]:
    most = facts.state_layers
    if 0 < most < int(value):
        return (
            f"states_per_block={value} is not legal",
            f"states_per_block takes 1 to {most}: the model has {most} state layers",
        )
    return "", ""


POLICIES = ("first", "two_class", "chat", "pin", "lru")
AUTO = "auto"
"""Means `two_class` if its bonus is tuned, else `first` for models with sliding windows, else stock's queue."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The core's switches and knobs. A switch turns one optimization on or off (off = vLLM's own code)."""

    pool: bool = _switch(
        True, "keep free blocks in several queues; off = stock's block pool, without pinning"
    )
    pinning: bool = _switch(
        True, "keep sliding windows where a later prompt can resume; off = stock's retention"
    )
    keep_states: bool = _switch(
        False,
        "models with recurrent states: keep states where a later prompt can resume; each is one more step of a prompt",
        price="one more step of a prompt for each state",
        worth=lambda facts: (False, True) if facts.state_layers else (False,),
        tuned=lambda facts: facts.state_layers > 0,
    )
    output_states: bool = _switch(
        False,
        "keep_states: keep the last state of an answer, too (decoding made it, and may round it otherwise)",
    )
    rows: bool = _switch(True, "send sampled tokens from worker to scheduler as one array")
    steady: bool = _switch(True, "take a short path through steps that only decode")
    empty_blocks: bool = _switch(
        True, "use one immutable empty block list instead of a new one per request and step"
    )
    freeze: bool = _switch(
        True,
        "freeze the heap of the processes that vLLM leaves unfrozen",
        acts="collector",
        worth=lambda facts: (True, False),
        group="gc",
        short="gc_freeze",
    )
    front_end: bool = _switch(
        True, "send plain outputs from EngineCore to AsyncLLM as columns, and wake only callers that wait"
    )
    pin_window: int = _integer(
        0,
        "tokens kept before a point where a hit can end (0 = the layer's window)",
        0,
        1 << 20,
        unit="tokens",
        worth=lambda facts: (0, 2 * facts.window, 4 * facts.window) if facts.window else (0,),
        tuned=_has_window,
        group="pin",
    )
    slack: int = _integer(
        512,
        "let a prompt resume up to this far before an earlier prompt's end (states: this far before it)",
        0,
        1 << 20,
        unit="tokens",
        worth=lambda facts: (0, 128, 512, 2048) if facts.window or facts.state_layers else (0,),
        tuned=_has_window,
        group="pin",
    )
    windows: int = _integer(
        4,
        "extra windows that end at the last multiples of slack, 2x slack, 4x slack .. before the slack",
        0,
        32,
        unit="windows",
        worth=lambda facts: (0, 2, 4, 8),
        tuned=_has_window,
    )
    policy: str = _choice(
        AUTO,
        "which free block is evicted next",
        (AUTO, *POLICIES),
        worth=lambda facts: ("first", "two_class", "chat") if facts.window else ("lru", "two_class"),
        tuned=_has_window,
        group="pin",
    )
    reuse_bonus_s: float = _number(
        0.0,
        "two_class: a reused block goes before a block used once only if it is older by more than this",
        0.0,
        1e9,
        unit="s",
        worth=lambda facts: (30.0, 100.0, 300.0, 1e9),
        tuned=_reused,
    )
    ghost_factor: float = _number(
        4.0,
        "two_class: evicted hashes that are remembered (1 = as many as the pool has blocks)",
        0.0,
        64.0,
        unit="pool sizes",
        worth=lambda facts: (1.0, 4.0, 8.0),
        tuned=_reused,
    )
    min_drop: int = _integer(
        16,
        "keep the windows before the slack only if a step computes at least this many blocks",
        0,
        1 << 20,
        unit="blocks",
        worth=lambda facts: (1, 16, 64) if facts.window else (16,),
        tuned=_has_window,
        group="min_drop",
    )
    output_window: bool = _switch(
        True, "keep the last window of the output too (the next turn resumes there)"
    )
    gc_threshold0: int = _integer(
        0,
        "gc.set_threshold's first value in EngineCore (0 = leave)",
        0,
        MOST,
        unit="objects",
        acts="collector",
        worth=lambda facts: (0, 20_000, 100_000),
        group="gc",
    )
    gc_threshold1: int = _integer(
        0,
        "gc.set_threshold's second value (0 = leave)",
        0,
        MOST,
        unit="collections",
        acts="collector",
    )
    gc_threshold2: int = _integer(
        0,
        "gc.set_threshold's third value (0 = leave)",
        0,
        MOST,
        unit="collections",
        acts="collector",
    )
    collect_at_wait: bool = _switch(
        False,
        "collect garbage while EngineCore waits for requests or for the model",
        acts="collector",
        group="gc",
    )
    whole_states: bool = _switch(
        False, "hybrids on the CPU: end prefill chunks where a state is kept (`packed` implies it)"
    )
    packed: bool = _switch(
        False,
        "hybrid models: small blocks; the attention pages of all layers together hold the states",
        acts="layout",
        worth=lambda facts: (True, False) if facts.layouts else (False,),
        refusal=_refuse_packing,
        changes_specs=True,
    )
    states_per_block: int = _integer(
        1,
        "states that a packed block has room for",
        1,
        1024,
        unit="states",
        acts="layout",
        worth=_states_named,
        refusal=_refuse_states,
        changes_specs=True,
    )
    strict: bool = _switch(
        False, "load every part that is asked for, or none; off = all except parts whose vLLM code changed"
    )

    def to_dict(self) -> dict[str, Value]:
        return asdict(self)

    def changed(self) -> dict[str, Value]:
        """Return only the settings that differ from the defaults."""
        default = CoreSettings().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}

    def switches(self) -> tuple[str, ...]:
        """Return the switches in effect: `pinning` needs `pool`, and `packed` turns on `whole_states`."""
        own = {
            "pinning": self.pool and self.pinning,
            "keep_states": self.keep_states,
            "whole_states": self.whole_states or self.packed,
        }
        names = ("pool", "rows", "steady", "empty_blocks", "freeze", "collect_at_wait", "front_end", "packed")
        return tuple(name for name in names if getattr(self, name)) + tuple(
            name for name, is_on in own.items() if is_on
        )


CORE: dict[str, Knob] = {
    f.name: Knob(name=f.name, default=getattr(CoreSettings(), f.name), **f.metadata["knob"])
    for f in fields(CoreSettings)
}
"""The core's knobs, by name."""


def changed_settings(mapping: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings whose values are not the defaults; a name that this version does not have is kept."""
    return {name: value for name, value in mapping.items() if name not in CORE or value != CORE[name].default}


def _engine(name: str, help: str, kind: Any, acts: Acts, **more: Any) -> Knob:
    return Knob(name=name, help=help, kind=kind, acts=acts, **more)


def _count(name: str, help: str, acts: Acts, low: int = 1, high: int = MOST, **more: Any) -> Knob:
    return _engine(name, help, "integer", acts, low=low, high=high, **more)


def _retentions(facts: ModelFacts) -> tuple[Value, ...]:
    if facts.window:
        return 0, "none", 512, 1024, 2048
    return (0, "none") if facts.state_layers else (0,)


def _match_units(facts: ModelFacts) -> tuple[Value, ...]:
    """Return a unit that divides every layout's block (the alignment), if the model has recurrent states."""
    if facts.state_layers:
        return "none", facts.alignment
    return tuple(facts.alignment << i for i in range(3))


def _block_sizes(facts: ModelFacts) -> Multiples:
    a, sizes = facts.alignment, ", ".join(map(str, facts.blocks))
    return Multiples(
        a, a, f"multiples of {a} tokens (this machine's attention kernels); worth a trial here: {sizes}"
    )


def _match_unit_limits(facts: ModelFacts) -> Multiples:
    block, a = facts.block_tokens, facts.alignment
    return Multiples(1, 1, f"none, or a divisor of the block size ({block} tokens), e.g. {a}")


def _idle(setting: str, facts: ModelFacts, why: str, hint: str) -> tuple[str, str]:
    """Refuse a setting of recurrent states: it does nothing to a model without them, nor, for `why`, to this one."""
    if not facts.state_layers:
        why, hint = "the model has no recurrent states", "leave it out"
    return f"{setting} has no effect here: {why}", hint


def _refuse_state_mode(value: Value, facts: ModelFacts) -> tuple[str, str]:
    mode = facts.state_mode
    if facts.unknown or value == mode:
        return "", ""
    why = f"with prefix caching {'on' if facts.caching else 'off'} vLLM makes it {mode}"
    hint = f"enable_prefix_caching={'false' if facts.caching else 'true'} changes it"
    return _idle(f"mamba_cache_mode={value}", facts, why, hint)


def _refuse_state_block(value: Value, facts: ModelFacts) -> tuple[str, str]:
    if facts.unknown or value == facts.block_tokens:
        return "", ""
    why = f"a state's block is the attention block, {facts.block_tokens} tokens"
    return _idle(f"mamba_block_size={value}", facts, why, "block_size sets both")


def _refuse_checkpoint(value: Value, facts: ModelFacts) -> tuple[str, str]:
    if not value or facts.unknown or (facts.state_layers and facts.drafts):
        return "", ""
    why, hint = "it acts with a drafter (EAGLE, MTP) only", "give --speculative-config after `--`"
    return _idle("enable_mamba_shared_prefix_checkpoint=true", facts, why, hint)


def _fixed(least: int, words: str) -> Callable[[ModelFacts], Multiples]:
    return lambda facts: Multiples(least, 1, words)


_FROM_ONE = _fixed(1, "a whole number from 1 up")
TIER_SIZE = "kv_offloading_size"
"""The knob that switches the tier of host memory on."""
DRAFTS = "num_speculative_tokens"
"""The knob of drafts, which vLLM takes in --speculative-config."""

ENGINE: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        _count(
            "block_size",
            "tokens per block",
            "layout",
            unit="tokens",
            worth=lambda facts: facts.blocks,
            tuned=lambda facts: True,
            of_model=_block_sizes,
            group="block_size",
            changes_specs=True,
        ),
        _count(
            "prefix_cache_retention_interval",
            "tokens between the windows and states that are kept; none: keep all",
            "scheduler",
            price="more blocks a prompt",
            low=0,
            unit="tokens",
            choices=("none",),
            worth=_retentions,
            tuned=lambda facts: bool(facts.window or facts.state_layers),
            of_model=_fixed(0, "none, 0, or a multiple of the block size in tokens"),
            group="retention",
            short="retention",
            config="cache",
        ),
        _engine(
            "enable_mamba_shared_prefix_checkpoint",
            "with drafts and a prefix_match_unit below the block, keep a state where prompts part, too",
            "switch",
            "scheduler",
            price="a step and a state more where prompts part",
            default=False,
            worth=lambda facts: (False, True) if facts.state_layers and facts.drafts else (False,),
            refusal=_refuse_checkpoint,
            config="cache",
        ),
        _engine(
            "mamba_cache_mode",
            "which states are kept; prefix caching decides, whatever is given",
            "choice",
            "scheduler",
            choices=("align", "none"),
            worth=lambda facts: (facts.state_mode,),
            refusal=_refuse_state_mode,
            changes_specs=True,
            config="cache",
        ),
        _count(
            "mamba_block_size",
            "tokens of a state's block; with prefix caching it is the attention block",
            "layout",
            unit="tokens",
            worth=lambda facts: (facts.block_tokens,),
            refusal=_refuse_state_block,
            changes_specs=True,
            config="cache",
        ),
        _count(
            DRAFTS,
            "tokens that a drafter proposes in a step: --speculative-config's, else MTP's; 0: no drafts",
            "scheduler",
            low=0,
            high=1024,
            unit="tokens",
            worth=lambda facts: (0, 1),
            changes_specs=True,
        ),
        _count(
            "prefix_match_unit",
            "hits are multiples of this many tokens; a divisor of the block size",
            "scheduler",
            price="more hashes; a step and a copied state more where a prompt ends inside a block",
            unit="tokens",
            choices=("none",),
            worth=_match_units,
            tuned=lambda facts: facts.state_layers > 0 and not facts.window,
            of_model=_match_unit_limits,
            config="cache",
        ),
        _count(
            "max_num_batched_tokens",
            "most tokens in a step; longer prompts are cut into chunks of it",
            "scheduler",
            unit="tokens",
            worth=lambda facts: _with((1024, 2048, 4096, 8192), facts.batched_tokens),
            tuned_in_stock=True,
            of_model=_fixed(16, "a whole number of tokens from 16 up"),
            group="chunk",
            short="chunk",
            config="scheduler",
        ),
        _count(
            "max_num_seqs",
            "most requests in a step",
            "scheduler",
            unit="requests",
            worth=lambda facts: _with((32, 128, 256), facts.sequences),
            tuned_in_stock=True,
            of_model=_FROM_ONE,
            config="scheduler",
        ),
        _engine(
            "watermark",
            "share of the pool that stays free when a waiting request is let in; against preemptions",
            "number",
            "scheduler",
            low=0,
            high=0.9,
            unit="share of the pool",
            default=0.0,
            worth=lambda facts: (0.0, 0.02, 0.05, 0.1),
            words="a share from 0 to 0.9",
            config="scheduler",
        ),
        _count(
            "prefill_schedule_interval",
            "start new prefills only every N steps while others decode (1: every step)",
            "scheduler",
            low=0,
            unit="steps",
            default=1,
            worth=lambda facts: (1, 2, 4, 8),
            tuned=lambda facts: True,
            of_model=_FROM_ONE,
            times_only=True,
            config="scheduler",
        ),
        _engine(
            TIER_SIZE,
            "host memory (GiB) for KV blocks that the pool evicts; 0: off",
            "number",
            "tier",
            low=0,
            high=1 << 20,
            unit="GiB",
            worth=lambda facts: (0.0, 1.0, 2.0, 4.0, 8.0),
            words="a number of GiB, e.g. 0.5; 0 is no host memory",
        ),
        _engine(
            "eviction_policy",
            "which KV blocks host memory evicts first: lru or arc",
            "choice",
            "tier",
            choices=("lru", "arc"),
            default="lru",
            worth=lambda facts: ("lru", "arc"),
        ),
        _count(
            "blocks_per_chunk",
            "blocks that host memory stores, evicts and loads together",
            "tier",
            unit="blocks",
            default=1,
            worth=lambda facts: (1, 2, 4),
            of_model=_FROM_ONE,
        ),
        _count(
            "store_threshold",
            "how often a prompt must offer a chunk before it is stored; below 2: at once",
            "tier",
            low=0,
            unit="times",
            default=0,
            worth=lambda facts: (0, 2),
            of_model=_fixed(0, "a whole number from 0 up"),
        ),
        _engine(
            "offload_prompt_only", "whether host memory stores prompts only, no answers", "switch", "tier"
        ),
        _count("max_tracker_size", "chunks whose offers host memory counts", "tier", unit="chunks"),
        _count(
            "stream_interval",
            "tokens per streamed chunk after the first token; does not affect hits",
            "front end",
            unit="tokens",
            worth=lambda facts: (1, 4, 16),
            of_model=_FROM_ONE,
            config="scheduler",
        ),
        _count(
            "api_server_count",
            "HTTP servers of `vllm serve` in front of the engine; does not affect hits",
            "front end",
            high=1024,
            unit="servers",
            of_model=_FROM_ONE,
        ),
        _engine(
            "enable_prefix_caching",
            "whether prompts are cached for later requests",
            "switch",
            "scheduler",
            worth=lambda facts: (True, False),
            changes_specs=True,
            config="cache",
        ),
        _count(
            "num_gpu_blocks_override",
            "blocks in the pool",
            "scheduler",
            unit="blocks",
            changes_specs=True,
        ),
        _count(
            "kv_cache_memory_bytes",
            "memory of the pool",
            "scheduler",
            high=MOST_BYTES,
            unit="bytes",
            changes_specs=True,
        ),
        _count(
            "max_model_len",
            "most tokens of a prompt and its answer",
            "scheduler",
            unit="tokens",
            choices=("auto",),
            changes_specs=True,
        ),
        _engine(
            "gpu_memory_utilization",
            "share of the device's memory that vLLM may use",
            "number",
            "scheduler",
            low=0,
            high=1,
            changes_specs=True,
        ),
    )
}
"""vLLM's settings that a recipe or a run file may set, by vLLM's name. Those with values worth a trial are searched."""

KNOBS: dict[str, Knob] = {**CORE, **ENGINE}
SEARCHED: dict[str, Knob] = {name: knob for name, knob in KNOBS.items() if name in CORE or knob.searched}
"""Knobs that `--set` of a search takes."""
TIER: dict[str, Knob] = {
    name: knob for name, knob in ENGINE.items() if knob.acts == "tier" and name != TIER_SIZE
}
"""Settings of the tier, which vLLM takes in --kv-transfer-config."""
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(knob.name for knob in KNOBS.values() if knob.group == group)
    for group in ("pin", "min_drop", "block_size", "retention", "chunk", "gc")
}
"""The flags of `kvtune sweep` (--pin, --block-size, ..), each with its knobs."""
LAYOUT = "layout"
"""The knob of a model with recurrent states whose values are block layouts: stock's at some size, or packed."""


def named(text: str) -> str:
    """Return the knob's name from a text with `core.`, dashes or a short name. UsageError lists the knobs."""
    name = text.strip().removeprefix("core.").removeprefix("engine.").replace("-", "_")
    name = next((knob.name for knob in KNOBS.values() if knob.short == name), name)
    if name in SEARCHED:
        return name
    mean = did_you_mean(name, SEARCHED)
    raise UsageError(f"--set {text}: there is no knob {name!r}", f"{mean}knobs: {', '.join(SEARCHED)}")


def keeps_specs(name: str) -> bool:
    """Whether a replay keeps a run's KV specs when this setting changes. False for settings that nobody knows."""
    return name in KNOBS and not KNOBS[name].changes_specs


def config_fields(part: ConfigPart, *, replayed: bool = False) -> tuple[str, ...]:
    """Return the knobs that are fields of a part of vLLM's configuration. `replayed`: those that a replay obeys."""
    return tuple(k.name for k in ENGINE.values() if k.config == part and (k.replayed or not replayed))


def knob_of(name: str) -> Knob:
    """Return the knob; for one that the catalogue does not have, a knob that says which flag of vLLM it is."""
    if name in KNOBS:
        return KNOBS[name]
    return Knob(name=name, kind="choice", help=f"vLLM's --{name.replace('_', '-')}")
