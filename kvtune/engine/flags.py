"""vLLM's flags as typed on a command line, for checks that run before vLLM's own parser does. Pure.

`--name value` and `--name=value` are the same, so are `_` and `-` in a name, and vLLM's short forms. Of a repeated flag
the last one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.errors import UsageError

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
"""vLLM's short forms. A test compares them with its parser."""


@dataclass(frozen=True, slots=True)
class Flag:
    """`name` has dashes and no leading two; it is "" for words before the first flag. `words`: the flag as typed."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def setting(self) -> str:
        """What the flag sets: `--no-x` and `--x` set x."""
        return self.name.removeprefix("no-")


def parse_flags(words: Sequence[str]) -> list[Flag]:
    """The flags in the order given. A flag takes every word up to the next flag."""
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
    """The value of `--name`; None where it is not given. UsageError where it has no value."""
    given = [flag for flag in parse_flags(words) if flag.name == name]
    if not given:
        return None
    if not given[-1].values:
        raise UsageError(f"--{name} has no value", "give it one, or leave it out")
    return given[-1].values[0]


def flag_texts(words: Sequence[str]) -> dict[str, str]:
    """All values of each flag as one text, "" for a switch."""
    return {flag.name: " ".join(flag.values).strip() for flag in parse_flags(words) if flag.name}


def settings_given(words: Sequence[str]) -> frozenset[str]:
    """The settings that flags turn on, off or set."""
    return frozenset(flag.setting for flag in parse_flags(words) if flag.name)


def with_flag(words: Sequence[str], name: str, value: int | str | None) -> list[str]:
    """The command line with `--name value` in place of every `--name`; "" is a switch, None removes the flag."""
    kept = [word for flag in parse_flags(words) if flag.name != name for word in flag.words]
    if value is None:
        return kept
    return [*kept, f"--{name}"] if value == "" else [*kept, f"--{name}", str(value)]


def without_overridden(words: Sequence[str]) -> list[str]:
    """The command line without flags that a later one overrides."""
    last: dict[str, tuple[str, ...]] = {}
    for flag in parse_flags(words):
        last.pop(flag.name, None)
        last[flag.name] = flag.words
    return [word for flag_words in last.values() for word in flag_words]
