"""Parses vLLM's flags as typed, for checks that run before vLLM's own parser. Pure.

`--name value` and `--name=value` mean the same; so do `_` and `-` in a name, and a flag's short form. If a flag is
repeated, the last one counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvtune.base.bounded import decode_json
from kvtune.base.errors import UsageError

SHORT = {
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-dc": "diffusion-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dpe": "data-parallel-external-lb",
    "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel",
    "-n": "nnodes",
    "-pcp": "prefill-context-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-r": "node-rank",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
"""vLLM's short forms. A test compares them with vLLM's parser."""
SPECULATION = "speculative-config"
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class Flag:
    """`name`: without the leading dashes, with `-` for `_`; "" for words before the first flag. `words`: as typed."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def setting(self) -> str:
        """The setting's name: `x` for both `--x` and `--no-x`."""
        return self.name.removeprefix("no-")


def parse_flags(words: Sequence[str]) -> list[Flag]:
    """Return the flags in the order given. The words up to the next flag are a flag's values."""
    flags: list[Flag] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--") or name in SHORT:
            long = SHORT.get(name) or name[2:].replace("_", "-")
            flags.append(Flag(long, (value,) if equals else (), (word,)))
        else:
            last = flags.pop() if flags else Flag("", (), ())
            flags.append(Flag(last.name, (*last.values, word), (*last.words, word)))
    return flags


def flag_value(words: Sequence[str], name: str) -> str | None:
    """Return the value of `--name`, or None if it is not given. UsageError if it has no value."""
    given = [flag for flag in parse_flags(words) if flag.name == name]
    if not given:
        return None
    if not given[-1].values:
        raise UsageError(f"--{name} has no value", "give it one, or leave it out")
    return given[-1].values[0]


def flag_texts(words: Sequence[str]) -> dict[str, str]:
    """Return each flag's values as one text, "" for a switch."""
    return {flag.name: " ".join(flag.values).strip() for flag in parse_flags(words) if flag.name}


def flag_number(flags: Mapping[str, str], name: str, default: Default) -> int | Default:
    """Return the whole number that a flag of `flag_texts` gives, else `default`."""
    text = flags.get(name, "")
    return int(text) if text.isdigit() else default


def settings_given(words: Sequence[str]) -> frozenset[str]:
    """Return the names of the settings that the flags turn on, turn off or set."""
    return frozenset(flag.setting for flag in parse_flags(words) if flag.name)


def with_flag(words: Sequence[str], name: str, value: int | str | None) -> list[str]:
    """Return the command line with `--name value` in place of every `--name`; "" is a switch, None removes the flag."""
    kept = [word for flag in parse_flags(words) if flag.name != name for word in flag.words]
    if value is None:
        return kept
    return [*kept, f"--{name}"] if value == "" else [*kept, f"--{name}", str(value)]


def draft_settings(words: Sequence[str]) -> Mapping[str, object] | None:
    """Return what --speculative-config says; None without it, or if it is not a JSON object."""
    with suppress(ValueError):
        given = decode_json(flag_texts(words).get(SPECULATION, ""))
        return given if isinstance(given, dict) else None
    return None


def with_drafts(words: Sequence[str], tokens: int) -> list[str]:
    """Return the command line with this many draft tokens, of MTP if no drafter is named; 0: without a drafter."""
    if not tokens:
        return with_flag(words, SPECULATION, None)
    drafts = {"method": "mtp", **(draft_settings(words) or {}), "num_speculative_tokens": tokens}
    return with_flag(words, SPECULATION, json.dumps(drafts, separators=(",", ":")))


def without_overridden(words: Sequence[str]) -> list[str]:
    """Return the command line without flags that a later one overrides."""
    last: dict[str, tuple[str, ...]] = {}
    for flag in parse_flags(words):
        last.pop(flag.name, None)
        last[flag.name] = flag.words
    return [word for flag_words in last.values() for word in flag_words]
