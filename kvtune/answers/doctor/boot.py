"""Reads what a server's log says of its start, and holds it against doctor's prediction from the same flags.

A log tells a pool's memory to 0.01 GiB, so its tokens are held against a range.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtune.answers.doctor.facts import ModelFacts
from kvtune.answers.doctor.finding import Finding
from kvtune.answers.doctor.line import LaunchLine, line_of_flags
from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_regular
from kvtune.base.units import count
from kvtune.data.installed import installed_version
from kvtune.data.platforms import GIB

MOST_BYTES = 64 << 20
ROUNDING = 0.005
"""GiB that a figure with two decimals may be off."""
PATTERNS = {
    "version": r"(?:LLM engine \(v|API server version |\bversion )(\d+\.\d+[\w.+]*)",
    "block": r"Setting attention block size to ([\d,]+) tokens",
    "memory_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "length": r"Maximum concurrency for ([\d,]+) tokens per request",
    "concurrency": r"tokens per request: ([\d.]+)x",
    "needed_gib": r"\(?([\d.]+) GiB KV cache is needed",
    "longest": r"estimated maximum model length is ([\d,]+)",
}
CONFIG = {
    "model": r"with config: .*?\bmodel='([^']+)'",
    "max-model-len": r"\bmax_seq_len=(\d+)",
    "dtype": r"\bdtype=torch\.(\w+)",
    "tensor-parallel-size": r"\btensor_parallel_size=(\d+)",
    "kv-cache-dtype": r"\bkv_cache_dtype='?([\w]+)",
}
"""What the line about the engine's configuration says, where a log has no line about its arguments."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says. `figures`: numbers by the names of PATTERNS; those that it does not have are missing."""

    line: LaunchLine
    version: str
    figures: dict[str, float]

    @property
    def flags(self) -> list[str]:
        """The line's flags, with the memory that the log names."""
        memory = self.figures.get("memory_gib")
        given = [] if memory is None else ["--kv-cache-memory-bytes", str(round(memory * GIB))]
        length = (
            []
            if "--max-model-len" in self.line.flags
            else ["--max-model-len", f"{self.figures.get('length', 0):.0f}"]
        )
        return [*self.line.flags, *given, *(length if "length" in self.figures else [])]


def read_log(path: Path) -> Boot:
    """Return what a server's log says of its start. UsageError if it names neither a model nor a figure."""
    try:
        text = read_regular(path, MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", "give a server's log") from error
    found = {name: match[1] for name, pattern in PATTERNS.items() if (match := re.search(pattern, text))}
    version = found.pop("version", "")
    arguments = _arguments(text)
    if not found and not arguments:
        raise UsageError(
            f"{path}: vLLM's lines about its start are not in it", "give the log from the first line on"
        )
    figures = {name: float(number.replace(",", "")) for name, number in found.items()}
    return Boot(line=line_of_flags(arguments, "log"), version=version, figures=figures)


def _arguments(text: str) -> dict[str, object]:
    """Return the server's arguments: by its own line about them, else by that about the engine's configuration."""
    said = re.search(r"non-default args: (\{.*\})", text)
    if said and len(said[1]) < 1 << 16:
        try:
            parsed = ast.literal_eval(re.sub(r"<[^<>]*>", "None", said[1]))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            tag = parsed.pop("model_tag", None)
            return {"model": parsed.pop("model", None) or tag, **parsed}
    return {name: match[1] for name, pattern in CONFIG.items() if (match := re.search(pattern, text))}


def compared(boot: Boot, facts: ModelFacts) -> Iterator[Finding]:
    """Yield what agrees with the prediction and what does not."""
    figures = boot.figures
    if "block" in figures:
        yield _block(int(figures["block"]), boot.version, facts.block_tokens)
    if "needed_gib" in figures:
        needed = facts.refusal.needed_bytes / GIB if facts.refusal else 0.0
        yield _figure(
            "needed",
            f"{figures['needed_gib']} GiB",
            f"{needed:.2f} GiB",
            abs(needed - figures["needed_gib"]) < 0.01,
        )
    if "tokens" in figures and facts.tokens_fit and facts.pool_blocks:
        page, fits = facts.pool_bytes // facts.pool_blocks, facts.tokens_fit / facts.pool_blocks
        off = int(ROUNDING * GIB) if "memory_gib" in figures else 0
        low, high = ((facts.pool_bytes + sign * off) // page * fits for sign in (-1, 1))
        measured = figures["tokens"]
        same = low - fits <= measured <= high + fits if off else measured == facts.tokens_fit
        within = " (within the rounding of GiB)" if same and measured != facts.tokens_fit else ""
        yield _figure("pool", f"{count(int(measured))} tokens", f"{count(facts.tokens_fit)}{within}", same)


def _figure(topic: str, said: str, predicted: str, same: bool) -> Finding:
    agrees = "agrees with" if same else "differs from"
    return Finding(
        "ok" if same else "warning", topic, f"the log's {said} {agrees} the prediction: {predicted}"
    )


def _block(said: int, version: str, predicted: int) -> Finding:
    here = installed_version() or "vLLM 0.33"
    if said == predicted:
        return _figure("block", f"{count(said)} tokens", count(predicted), True)
    other = (
        f"; {count(said)} is {version}'s, and {here} gives {count(predicted)}"
        if version and version != here
        else ""
    )
    return _figure("block", f"{count(said)} tokens", f"{count(predicted)}{other}", False)
