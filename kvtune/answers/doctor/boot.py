"""Reads what a server's log says of its start, and holds it against doctor's prediction from the same flags.

A log tells a pool's memory to 0.01 GiB, so its tokens are held against a range.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtune.answers.doctor.facts import ModelFacts, Refusal, gib
from kvtune.answers.doctor.finding import Finding
from kvtune.answers.doctor.line import LaunchLine, line_of_flags, serve_flags
from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_regular
from kvtune.base.units import count
from kvtune.data.installed import installed_version
from kvtune.data.platforms import GIB

MOST_BYTES, MOST_ARGUMENTS = 64 << 20, 1 << 16
ROUNDING = 0.005
"""GiB that a figure with two decimals may be off."""
WHOLE, GIBS = r"(\d[\d,]{0,14})", r"(\d{1,9}(?:\.\d{1,9})?)"
FIGURES = {
    "block": rf"Setting attention block size to {WHOLE} tokens",
    "memory_gib": rf"Available KV cache memory: {GIBS} GiB",
    "tokens": rf"GPU KV cache size: {WHOLE} tokens",
    "length": rf"Maximum concurrency for {WHOLE} tokens per request",
    "needed_gib": rf"\(?{GIBS} GiB KV cache is needed",
    "held_gib": rf"larger than the available KV cache memory \({GIBS} GiB",
    "longest": rf"estimated maximum model length is {WHOLE}",
}
VERSION = re.compile(r"(?:LLM engine \(v|API server version |\bversion )(\d+\.\d+[\w.+]*)")


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says. `line`: its flags, with the pool that it names. `figures`: those of FIGURES that it has."""

    line: LaunchLine
    version: str
    figures: dict[str, float]


def figures_in(text: str) -> dict[str, float]:
    """Return the figures that vLLM's messages give, by their names in FIGURES; the first of each."""
    matches = {name: re.search(pattern, text) for name, pattern in FIGURES.items()}
    return {name: float(match[1].replace(",", "")) for name, match in matches.items() if match}


def refusal_in(message: str) -> Refusal:
    """Return what vLLM's message says of a pool that holds no request of max_model_len."""
    figures = figures_in(message)
    needed, held = (round(figures.get(name, 0.0) * GIB) for name in ("needed_gib", "held_gib"))
    return Refusal(needed_bytes=needed, pool_bytes=held, longest=int(figures.get("longest", 0)))


def read_log(path: Path) -> Boot:
    """Return what a server's log says of its start. UsageError if its flags are not in it."""
    try:
        text = read_regular(path, MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", "give a server's log") from error
    figures, arguments = figures_in(text), _arguments(text)
    if not arguments:
        why = f"{path}: vLLM's lines about its start are not in it, or not the one of 'non-default args'"
        raise UsageError(why, "give the log from its first line on")
    memory = figures.get("memory_gib", figures.get("held_gib", 0.0))
    if memory and "num_gpu_blocks_override" not in arguments:
        arguments["kv_cache_memory_bytes"] = round(memory * GIB)
    if "length" in figures:
        arguments["max_model_len"] = int(figures["length"])
    version = VERSION.search(text)
    line = line_of_flags(arguments, "log")
    return Boot(line=line, version=version[1] if version else "", figures=figures)


def _arguments(text: str) -> dict[str, object]:
    """Return the server's arguments, as far as its line about them writes them as plain values."""
    takes, _ = serve_flags()
    match = re.search(r"non-default args: (\{.*\})", text)
    listed = match[1][:MOST_ARGUMENTS].replace("'model_tag'", "'model'") if match else ""
    pairs = re.findall(r"'(\w+)': ('[^']*'|True|False|[\d.]+|\{[^{}]*\})(?=[,}])", listed)
    return {name: _value(value) for name, value in pairs if name.replace("_", "-") in takes}


def _value(text: str) -> object:
    """Return what Python's writing of a text, a switch or a flat table says; a number stays a text."""
    if text.startswith("{"):
        return {name: _value(value) for name, value in re.findall(r"'(\w+)': ('[^']*'|True|False|\d+)", text)}
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"\d{1,18}", text) else text.strip("'")


def compared(boot: Boot, facts: ModelFacts) -> Iterator[Finding]:
    """Yield what agrees with the prediction and what does not."""
    figures, refusal = boot.figures, facts.refusal
    if "block" in figures:
        block, theirs = f"{count(facts.block_tokens)} tokens", f"{count(int(figures['block']))} tokens"
        next_block = f", 0.33 {count(facts.next_block)}" if facts.next_block else ""
        gives = f"{installed_version() or '0.33'} gives {block}{next_block}"
        other = f"; {theirs} is {boot.version or 'another version'}'s, {gives}"
        yield _held("block", theirs, block, figures["block"] == facts.block_tokens, other)
    if "needed_gib" in figures and refusal is not None:
        needed, theirs = gib(refusal.needed_bytes), f"{figures['needed_gib']}"
        yield _held("needed", f"{theirs} GiB", f"{needed} GiB", theirs == needed)
    if "tokens" in figures and facts.pool_blocks:
        page, fits = facts.pool_bytes // facts.pool_blocks, facts.tokens_fit / facts.pool_blocks
        off = ROUNDING * GIB if "memory_gib" in figures else 0.0
        low, high = ((facts.pool_bytes + sign * off) // page * fits for sign in (-1, 1))
        exact = figures["tokens"] == facts.tokens_fit
        within = not exact and bool(off) and low - fits <= figures["tokens"] <= high + fits
        why = ", within what the rounding of GiB leaves open" if within else ""
        theirs, fit = (f"{count(int(tokens))} tokens" for tokens in (figures["tokens"], facts.tokens_fit))
        yield _held("pool", theirs, fit + why, exact or within)


def _held(topic: str, figure: str, predicted: str, same: bool, other: str = "") -> Finding:
    verb = "agree with" if same else "differ from"
    text = f"the log's {figure} {verb} the prediction: {predicted}{'' if same else other}"
    return Finding("ok" if same else "warning", topic, text)
