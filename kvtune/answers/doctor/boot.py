"""Reads what a server's log says of its start, and holds it against doctor's prediction from the same flags.

A log tells a pool's memory to 0.01 GiB, so its tokens are held against a range.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtune.answers.doctor.facts import ModelFacts
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
FIGURES = {
    "block": r"Setting attention block size to ([\d,]+) tokens",
    "memory_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "length": r"Maximum concurrency for ([\d,]+) tokens per request",
    "needed_gib": r"\(?([\d.]+) GiB KV cache is needed",
    "held_gib": r"larger than the available KV cache memory \(([\d.]+) GiB",
    "longest": r"estimated maximum model length is ([\d,]+)",
}
VERSION = re.compile(r"(?:LLM engine \(v|API server version |\bversion )(\d+\.\d+[\w.+]*)")
CONFIG = {
    "model": r"with config: .*?\bmodel='([^']+)'",
    "max_model_len": r"\bmax_seq_len=(\d+)",
    "dtype": r"\bdtype=torch\.(\w+)",
    "tensor_parallel_size": r"\btensor_parallel_size=(\d+)",
    "kv_cache_dtype": r"\bkv_cache_dtype='?(\w+)",
    "enable_prefix_caching": r"\benable_prefix_caching=(\w+)",
}
"""What the line about the engine's configuration says, as its version resolved it."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says. `line`: its flags, with the pool that it names. `figures`: those of FIGURES that it has."""

    line: LaunchLine
    version: str
    figures: dict[str, float]


def read_log(path: Path) -> Boot:
    """Return what a server's log says of its start. UsageError if it says nothing of it."""
    try:
        text = read_regular(path, MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", "give a server's log") from error
    figures = {
        name: float(numbers[0].replace(",", ""))
        for name, pattern in FIGURES.items()
        if (numbers := re.findall(pattern, text))
    }
    arguments = _arguments(text)
    if not figures and not arguments:
        raise UsageError(
            f"{path}: vLLM's lines about its start are not in it", "give the log from its first line on"
        )
    memory = figures.get("memory_gib", figures.get("held_gib", 0.0))
    pool = (
        {"kv_cache_memory_bytes": round(memory * GIB)}
        if memory and "num_gpu_blocks_override" not in arguments
        else {}
    )
    length = {"max_model_len": int(figures["length"])} if "length" in figures else {}
    version = VERSION.search(text)
    line = line_of_flags({**arguments, **length, **pool}, "log")
    return Boot(line=line, version=version[1] if version else "", figures=figures)


def _arguments(text: str) -> dict[str, object]:
    """Return the server's arguments: what the line about the engine's configuration says, under its line about them."""
    takes, _ = serve_flags()
    given = {name: match[1] for name, pattern in CONFIG.items() if (match := re.search(pattern, text))}
    match = re.search(r"non-default args: (\{.*\})", text)
    listed = match[1][:MOST_ARGUMENTS] if match else ""
    for name, value in re.findall(r"'(\w+)': ('[^']*'|True|False|[\d.]+|\{[^{}]*\})(?=[,}])", listed):
        flag = "model" if name == "model_tag" else name
        given |= {flag: value} if flag.replace("_", "-") in takes else {}
    return {name: _value(value) for name, value in given.items()}


def _value(text: str) -> object:
    """Return what Python's writing of a text, a switch or a flat table says; a number stays a text."""
    if text.startswith("{"):
        return {name: _value(value) for name, value in re.findall(r"'(\w+)': ('[^']*'|True|False|\d+)", text)}
    number = int(text) if text.isdigit() else text.strip("'")
    return text == "True" if text in ("True", "False") else number


def compared(boot: Boot, facts: ModelFacts) -> Iterator[Finding]:
    """Yield what agrees with the prediction and what does not."""
    figures, refusal = boot.figures, facts.refusal
    here = installed_version() or "0.33"
    if "block" in figures:
        block, theirs = f"{count(facts.block_tokens)} tokens", f"{count(int(figures['block']))} tokens"
        gives = f"{here} gives {block}{f', 0.33 {count(facts.next_block)}' if facts.next_block else ''}"
        other = f"; {theirs} is {boot.version or 'another version'}'s, {gives}"
        yield _held("block", theirs, block, figures["block"] == facts.block_tokens, other)
    if "needed_gib" in figures and refusal is not None:
        needed = round(refusal.needed_bytes / GIB, 2)
        yield _held(
            "needed", f"{figures['needed_gib']} GiB", f"{needed} GiB", figures["needed_gib"] == needed
        )
    if "tokens" in figures and facts.pool_blocks:
        page, fits = facts.pool_bytes // facts.pool_blocks, facts.tokens_fit / facts.pool_blocks
        off = ROUNDING * GIB if "memory_gib" in figures else 0.0
        low, high = ((facts.pool_bytes + sign * off) // page * fits for sign in (-1, 1))
        exact = figures["tokens"] == facts.tokens_fit
        within = bool(off) and low - fits <= figures["tokens"] <= high + fits
        why = ", within what the rounding of GiB leaves open" if within and not exact else ""
        yield _held(
            "pool",
            f"{count(int(figures['tokens']))} tokens",
            f"{count(facts.tokens_fit)} tokens{why}",
            exact or within,
        )


def _held(topic: str, figure: str, predicted: str, same: bool, other: str = "") -> Finding:
    verb = "agree with" if same else "differ from"
    text = f"the log's {figure} {verb} the prediction: {predicted}{'' if same else other}"
    return Finding("ok" if same else "warning", topic, text)
