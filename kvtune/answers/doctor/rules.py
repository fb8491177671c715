"""Findings about settings that have no effect or hurt: pure functions of `Facts`, one per rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtune.answers.doctor.facts import Facts
from kvtune.answers.doctor.finding import Finding
from kvtune.answers.doctor.planned import planners_backend, requested_block
from kvtune.base.commands import command
from kvtune.base.units import count
from kvtune.data.installed import installed_version, release
from kvtune.data.layout.models import engine_defaults
from kvtune.data.layout.plan import match_units


def settings_findings(facts: Facts) -> tuple[Finding, ...]:
    """Return every rule's findings, in the order of RULES."""
    return tuple(finding for rule in RULES for finding in rule(facts))


def caching_off(facts: Facts) -> Iterator[Finding]:
    if facts.caching:
        return
    if facts.given.keys() & {"no-enable-prefix-caching"}:
        why, hint = "by --no-enable-prefix-caching", "leave the flag out"
    else:
        why, hint = "by vLLM", "--enable-prefix-caching"
        if facts.device.startswith("cpu") and "no-enable-prefix-caching" in engine_defaults(facts.model):
            why = "because stock vLLM's Mamba-2 crashes on the CPU with it"
            hint = "--enable-prefix-caching with --set core.whole_states=true or core.packed=true"
    yield Finding(
        "warning", "prefix caching", f"turned off {why}: every prompt is computed from its first token", hint
    )


def block_beyond_length(facts: Facts) -> Iterator[Finding]:
    if facts.caching and 0 < facts.max_model_len <= facts.hit_tokens:
        yield Finding(
            "warning",
            "block size",
            f"hits end at multiples of {facts.hit_tokens} tokens, and no request is longer than "
            f"{facts.max_model_len}: prefix caching can never hit",
            "raise --max-model-len, or make blocks smaller (float16 states, more KV heads per rank)",
        )


def blocks_disagree(facts: Facts) -> Iterator[Finding]:
    sizes = sorted({group.block_tokens for group in facts.groups} - {0})
    if facts.caching and not facts.hybrid and len(sizes) > 1 and facts.hit_tokens > sizes[-1]:
        listed = " and ".join(map(str, sizes))
        yield Finding(
            "warning",
            "block size",
            f"the KV groups have blocks of {listed} tokens, none a multiple of the other: hits end at multiples of "
            f"{facts.hit_tokens} only, and shorter prefixes never hit",
            "give a --block-size that the backend uses unchanged: a multiple of 32",
        )


def block_raised(facts: Facts) -> Iterator[Finding]:
    requested = requested_block(facts)
    if requested is None or requested == facts.block_tokens:
        return
    why = "one attention page must hold one state" if facts.hybrid else f"the {facts.device} backend's size"
    yield Finding(
        "warning",
        "block size",
        f"--block-size {requested} becomes {facts.block_tokens} ({why}): the flag cannot make blocks smaller",
        f"give {facts.block_tokens}"
        if facts.device == "cpu"
        else f"leave it out, or give {facts.block_tokens}",
    )


def block_forgotten(facts: Facts) -> Iterator[Finding]:
    """Report states that vLLM keeps elsewhere than where a hit looks for them, on a CPU without --block-size."""
    if facts.device != "cpu" or facts.block_tokens == 128 or release(installed_version()) >= (0, 33):
        return
    if facts.caching and facts.state_mode == "align" and "block-size" not in facts.given:
        yield Finding(
            "warning",
            "states",
            "hits can answer wrongly: once started, vLLM 0.32 ends chunks of prompts at multiples of 128 tokens, and "
            f"takes the states there for those of blocks of {facts.block_tokens}",
            f"--block-size {facts.block_tokens}",
        )


def block_default(facts: Facts) -> Iterator[Finding]:
    """Report a default block that is larger than necessary: on a CPU 128 tokens, although 32 are possible."""
    least = planners_backend(facts).alignment
    if facts.hybrid or not facts.caching or "block-size" in facts.given or facts.block_tokens <= least:
        return
    if facts.block_tokens != facts.default_block_tokens:
        return
    times = facts.block_tokens // least
    yield Finding(
        "note",
        "block size",
        f"{facts.block_tokens} tokens is only the {facts.device} backend's default: it takes any multiple of {least}. "
        f"With blocks of {least} a shared prefix hits from {least} tokens on, and a prompt computes at most "
        f"{least - 1} cached tokens again in place of {facts.block_tokens - 1}; the scheduler handles {times} times "
        "as many blocks",
        f"--block-size {least}; what it is worth for a load: "
        f"`{command('sweep', facts.model, '-w', 'LOAD', '--block-size')}`",
    )


def states_in_float32(facts: Facts) -> Iterator[Finding]:
    """Report that blocks are larger because vLLM keeps recurrent states in float32 on a CPU with AVX-512 BF16."""
    if not facts.model_state_block_tokens:
        return
    hint = (
        f"{facts.state_dtype_flag} gives blocks of {facts.model_state_block_tokens}"
        if facts.state_dtype_flag
        else "no flag changes it for this model: vLLM ignores --mamba-ssm-cache-dtype on such a CPU"
    )
    yield Finding(
        "warning",
        "state type",
        f"this CPU has AVX-512 BF16, so vLLM keeps recurrent states in float32: a block is {facts.block_tokens} "
        f"tokens; with states of the model's own type it would be {facts.model_state_block_tokens}",
        hint,
    )


def block_refused(facts: Facts) -> Iterator[Finding]:
    if facts.kernel_refusal:
        least = 32 if facts.device == "cpu" else 16
        yield Finding(
            "error",
            "block size",
            f"the engine will not start: {facts.kernel_refusal}",
            f"--block-size {-(-facts.block_tokens // least) * least}",
        )


def state_block_inert(facts: Facts) -> Iterator[Finding]:
    requested = facts.given.get("mamba-block-size")
    if requested is None:
        return
    if not facts.hybrid:
        yield Finding(
            "warning",
            "state block",
            f"--mamba-block-size {requested} has no effect: the model has no state layers",
            "leave it out",
        )
    elif facts.state_mode == "align":
        yield Finding(
            "warning",
            "state block",
            f"--mamba-block-size {requested} is overwritten by {facts.block_tokens} in align mode",
            "leave it out; --block-size sets both",
        )


def state_mode_inert(facts: Facts) -> Iterator[Finding]:
    requested = facts.given.get("mamba-cache-mode")
    if requested is None or (facts.hybrid and requested == facts.state_mode):
        return
    why = (
        f"becomes {facts.state_mode}: prefix caching is {'on' if facts.caching else 'off'}"
        if facts.hybrid
        else "has no effect: the model has no state layers"
    )
    yield Finding("warning", "state mode", f"--mamba-cache-mode {requested} {why}", "leave it out")


def checkpoint_inert(facts: Facts) -> Iterator[Finding]:
    """Report --enable-mamba-shared-prefix-checkpoint where vLLM's scheduler does not act on it."""
    name = "enable-mamba-shared-prefix-checkpoint"
    if name not in facts.given or facts.checkpoints or facts.source != "vllm":
        return
    if not facts.hybrid:
        why, hint = "the model has no state layers", "leave it out"
    elif not facts.caching:
        why, hint = "prefix caching is off", "--enable-prefix-caching"
    elif "speculative-config" not in facts.given:
        why, hint = "it acts with a drafter (EAGLE, MTP) only", "leave it out"
    elif facts.hit_tokens >= facts.block_tokens:
        unit = next((unit for unit in match_units(facts.block_tokens, 16) if unit >= 32), 0)
        why = f"hits end at whole blocks of {count(facts.block_tokens)} tokens, where states are kept anyway"
        hint = f"--prefix-match-unit {unit} beside it" if unit else "leave it out"
    else:
        why, hint = "vLLM's scheduler does not act on it with this drafter", "leave it out"
    yield Finding("warning", "checkpoint", f"--{name} has no effect: {why}", hint)


def match_unit_inert(facts: Facts) -> Iterator[Finding]:
    """Report --prefix-match-unit where replayed hits end at whole blocks all the same."""
    unit = facts.match_unit
    if not (unit and facts.hybrid and facts.caching and facts.source == "vllm") or unit >= facts.block_tokens:
        return
    ends, partings = (
        form is not None and form.unit == facts.block_tokens for form in (facts.again, facts.shared)
    )
    block = f"multiples of {count(facts.block_tokens)} tokens all the same (replayed)"
    drafted = "speculative-config" in facts.given
    beside = (
        "--enable-mamba-shared-prefix-checkpoint beside it"
        if drafted
        else "leave it out if prompts only share"
    )
    if ends and partings:
        text = f"--prefix-match-unit {unit} has no effect: hits end at {block}"
        yield Finding("warning", "match unit", text, "leave it out")
    elif partings:
        text = (
            f"--prefix-match-unit {unit} does nothing for prefixes that prompts share: they hit {block}; it acts on "
            "prompts sent again and on the next turns of chats"
        )
        yield Finding("note", "match unit", text, beside)


def chunk_below_block(facts: Facts) -> Iterator[Finding]:
    if not (facts.caching and facts.hybrid and facts.state_mode == "align"):
        return
    if 0 < facts.batched_tokens < facts.block_tokens:
        yield Finding(
            "warning",
            "chunks",
            f"a chunk of {facts.batched_tokens} tokens is shorter than a block of {facts.block_tokens}: computing a "
            "block takes several steps, and only the last one can keep its state",
            f"--max-num-batched-tokens {facts.block_tokens} or more",
        )


def retention_below_chunk(facts: Facts) -> Iterator[Finding]:
    interval = facts.retention
    if not (facts.caching and facts.hybrid and facts.state_mode == "align") or interval == 0:
        return
    step = facts.batched_tokens // facts.block_tokens * facts.block_tokens if facts.block_tokens else 0
    requested = facts.block_tokens if interval is None else interval
    if step > requested:
        yield Finding(
            "warning",
            "retention",
            f"states can be kept only at the end of a chunk: with chunks of {count(facts.batched_tokens)} tokens, an "
            f"interval of {requested} keeps one about every {count(step)}",
            f"--max-num-batched-tokens {requested}, or the kvtune core",
        )


def retention_default(facts: Facts) -> Iterator[Finding]:
    if facts.caching and facts.retention == 0 and (facts.windowed or facts.hybrid):
        kept = "windows" if facts.windowed else "states"
        yield Finding(
            "note",
            "retention",
            f"by default {kept} are kept at the end of a prompt only: prompts with a shared prefix and new suffixes "
            'may hit from the third one on only, as "hits begin" says',
            "the kvtune core (`kvtune tune`), or --prefix-cache-retention-interval"
            if facts.windowed
            else f"`{command('sweep', facts.model, '-w', 'LOAD', '--states')}` replays what flags keep more",
        )


def match_unit_unset(facts: Facts) -> Iterator[Finding]:
    if not (facts.caching and facts.hybrid and facts.state_mode == "align") or facts.match_unit:
        return
    units = match_units(facts.block_tokens, 16)
    if facts.hit_tokens > 64 and units and not facts.windowed:
        fit = next((unit for unit in units if unit >= 32), units[-1])
        yield Finding(
            "note",
            "match unit",
            f"--prefix-match-unit is not set: if whole prompts are sent again alone, or chats come back one at a time, "
            f"each recomputes up to {facts.hit_tokens - 1} cached tokens; with many chats or shared prefixes in a "
            "tight pool the flag may lose hits",
            f"--prefix-match-unit {fit}, but only where a replay of your load gains by it: "
            f"`{command('sweep', facts.model, '-w', 'LOAD', '--states')}`",
        )


def never_runs(facts: Facts) -> Iterator[Finding]:
    """Report a pool that vLLM refuses, or that starts although a request of max_model_len never gets through it."""
    asked, fits = f"a request of {count(facts.max_model_len)} tokens", facts.longest_run
    if facts.refusal is not None:
        fits, text = facts.refusal.longest, f"vLLM will refuse: {asked} {facts.refusal.said}"
    elif fits:
        held = sum(group.request_blocks for group in facts.groups)
        text = (
            f"vLLM starts, and {asked} never ends: {count(held)} blocks are reserved for it, and to compute it takes "
            f"more than the {count(facts.pool_blocks)} of the pool; alone, a request of up to {count(fits)} tokens "
            "runs (replayed)"
        )
    else:
        return
    longest = f"--max-model-len {fits}, or " if fits else ""
    yield Finding("error", "start", text, f"{longest}more memory for the cache")


def pool_too_small(facts: Facts) -> Iterator[Finding]:
    if facts.pool_blocks and 0 < facts.tokens_fit < facts.max_model_len:
        yield Finding(
            "error",
            "pool",
            f"{count(facts.pool_blocks)} blocks hold {count(facts.tokens_fit)} tokens, less than one request of "
            f"{count(facts.max_model_len)}",
            "give the cache more memory, or a smaller --max-model-len",
        )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    caching_off,
    block_beyond_length,
    blocks_disagree,
    block_raised,
    block_forgotten,
    block_default,
    states_in_float32,
    block_refused,
    state_block_inert,
    state_mode_inert,
    checkpoint_inert,
    match_unit_inert,
    chunk_below_block,
    retention_below_chunk,
    retention_default,
    match_unit_unset,
    never_runs,
    pool_too_small,
)
