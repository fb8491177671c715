"""Builds a Workload from `name:key=value,..`, and checks every name, key and value.

Imports neither numpy nor msgspec, so that the CLI can show `WORKLOADS` in its help quickly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.requests.loads.registry import DEFAULT_SPEC, WORKLOADS, Key, Value, WorkloadKind
from kvtune.requests.types import AUTO, BYTES, Draft, Workload

if TYPE_CHECKING:
    from kvtune.requests.loads.sessions import Load
    from kvtune.requests.loads.sources import Sources

__all__ = ["DEFAULT_SPEC", "WORKLOADS", "build", "session_load", "shortest", "traced", "with_keys"]

_SUFFIX = {"k": 1_000, "m": 1_000_000}
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)([km]?)", re.IGNORECASE)


def build(spec: str, *, seed: int = 0, tokenizer: str = "", sources: Sources | None = None) -> Workload:
    """Build the workload of a spec. A `seed=` in the spec overrides `seed`.

    `tokenizer`: that of the command's model. It renders a log of text, unless the spec names another tokenizer.
    `sources`: of who builds more of the same files.
    """
    spec = with_tokenizer(spec, tokenizer)
    kind, values = parsed(spec, seed)
    return made(kind, spec, values, kind.builder(**_with_sources(values, sources)))


def _with_sources(values: Mapping[str, Value], sources: Sources | None) -> Mapping[str, object]:
    """Return the values for a builder, with what reads the file if there is one."""
    if "path" not in values:
        return values
    from kvtune.requests.loads.sources import Sources  # here, because it needs msgspec

    return {**values, "sources": sources or Sources()}


def session_load(spec: str, *, seed: int = 0, tokenizer: str = "", sources: Sources | None = None) -> Load:
    """Return the sessions of a workload, to be played by any number of slots. UsageError if it has none."""
    kind, values = parsed(with_tokenizer(spec, tokenizer), seed)
    if kind.loader is None:
        with_sessions = ", ".join(name for name, kind in WORKLOADS.items() if kind.loader is not None)
        raise UsageError(
            f"the workload {kind.name!r} has no sessions", f"workloads with sessions: {with_sessions}"
        )
    return kind.loader(**_with_sources(values, sources))


def has_slots(spec: str) -> bool:
    """Whether a spec says how many sessions are played at once."""
    kind, values = parsed(spec, 0)
    return bool(values.get("sessions")) and kind.loader is not None


def has_key(spec: str, key: str) -> bool:
    """Whether the spec sets this key, whatever its value."""
    return any(set_key == key for set_key, _ in _pairs(spec))


def with_keys(spec: str, **changed: Value) -> str:
    """Return the spec with these keys set."""
    kept = [(key, value) for key, value in _pairs(spec) if key not in changed]
    return _spec(_kind(spec).name, [*kept, *((key, f"{value}") for key, value in changed.items())])


def parsed(spec: str, seed: int) -> tuple[WorkloadKind, dict[str, Value]]:
    """Return the kind of workload that a spec names, and the value of each of its keys."""
    kind = _kind(spec)
    return kind, _values(kind, _pairs(spec), seed)


def _kind(spec: str) -> WorkloadKind:
    """Return the workload that a spec names. UsageError if there is none."""
    name = spec.partition(":")[0]
    if name.strip() in WORKLOADS:
        return WORKLOADS[name.strip()]
    mean = did_you_mean(name, WORKLOADS)
    raise UsageError(f"unknown workload {name!r}", f"{mean}workloads: {', '.join(WORKLOADS)}")


def _takes(spec: str, key: str) -> bool:
    """Whether the spec names a workload that has this key."""
    kind = WORKLOADS.get(spec.partition(":")[0].strip())
    return kind is not None and any(each.name == key for each in kind.keys)


def made(kind: WorkloadKind, spec: str, values: Mapping[str, Value], plan: Draft) -> Workload:
    """Make a Workload from the requests that its builder returned (`plan`)."""
    from kvtune.requests.loads.identity import work_hash  # here, because it needs numpy

    used_seed = int(values["seed"])
    values = {name: value for name, value in values.items() if name != "seed"}
    return Workload(
        name=kind.name,
        spec=spec,
        params=values,
        seed=used_seed,
        requests=plan.requests,
        hash=work_hash(plan, used_seed),
        concurrency=plan.concurrency,
        barrier=plan.barrier,
        note=plan.note,
    )


def traced(spec: str, trace: Path | None, tokenizer: str = "") -> str:
    """Return a spec that a file names, with the user's `trace` and `tokenizer` in place of the spec's own paths.

    UsageError if the workload reads a file and `trace` is None, or if it reads no file and `trace` is given.
    """
    name = spec.partition(":")[0]
    if not _takes(spec, "path"):
        if trace is not None:
            raise UsageError(f"--trace {trace}: the workload {name!r} reads no trace", "leave --trace out")
        return spec
    if trace is None:
        raise UsageError(
            "the workload is a trace, and no path that a file names is opened", "name it with --trace FILE"
        )
    named = f"path={trace}"
    others = [
        (key, value)
        for key, value in _pairs(spec)
        if key != "path" and (key != "tokenizer" or (value == BYTES and ",tokenizer=" not in named))
    ]
    return with_tokenizer(_spec(name, [("path", str(trace)), *others]), tokenizer)


def as_sent(spec: str) -> str:
    """Return the spec of a log without the keys that change when its requests are sent."""
    return _spec(spec.partition(":")[0], [pair for pair in _pairs(spec) if pair[0] not in WHEN])


WHEN = ("speed", "concurrency")


def with_tokenizer(spec: str, tokenizer: str) -> str:
    """Add `tokenizer=` to the spec of a log, unless the spec names a tokenizer."""
    if not tokenizer or not _takes(spec, "tokenizer"):
        return spec
    pairs = _pairs(spec)
    if any(key == "tokenizer" and value != AUTO for key, value in pairs):
        return spec
    others = [pair for pair in pairs if pair[0] != "tokenizer"]
    return _spec(spec.partition(":")[0], [*others, ("tokenizer", tokenizer)])


def shortest(spec: str, seed: int = 0) -> str:
    """Return the spec without the keys whose values are the defaults, or what `--seed` says.

    A spec that this version does not read is returned as it is.
    """
    try:
        kind, values = parsed(spec, seed)
    except UsageError:
        return spec
    kept = _pairs(spec)
    for pair in list(kept):
        fewer = _spec(kind.name, [key_value for key_value in kept if key_value != pair])
        with suppress(UsageError):  # a key that the workload needs
            if parsed(fewer, seed)[1] == values:
                kept.remove(pair)
    return _spec(kind.name, kept)


def _spec(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    return name + (":" if pairs else "") + ",".join(f"{key}={value}" for key, value in pairs)


def _values(kind: WorkloadKind, pairs: Sequence[tuple[str, str]], seed: int) -> dict[str, Value]:
    keys = {key.name: key for key in kind.keys}
    given: dict[str, Value] = {}
    for name, raw in pairs:
        if name not in keys:
            hint = f"{did_you_mean(name, keys)}its keys are {', '.join(keys)}"
            raise UsageError(f"workload {kind.name} has no key {name!r}", hint)
        if name in given:
            raise UsageError(f"workload {kind.name}: {name}= is given twice", "give it once")
        given[name] = _value(kind, keys[name], raw)
    values: dict[str, Value] = {key.name: given.get(key.name, key.default) for key in kind.keys}
    if "seed" not in given:
        values["seed"] = seed
    if given.get("rate") and "concurrency" not in given:
        values["concurrency"] = 0  # only arrivals decide, unless concurrency is given too
    for key in kind.keys:
        if values[key.name] == "":
            raise UsageError(f"workload {kind.name} needs {key.name}=", f"e.g. {kind.name}:{key.name}=FILE")
    return values


def _pairs(spec: str) -> list[tuple[str, str]]:
    """Return the keys that a spec sets, each with its value as text."""
    kind, text = _kind(spec), spec.partition(":")[2]
    pairs: list[tuple[str, str]] = []
    for part in text.split(",") if text.strip() else ():
        name, equals, raw = part.partition("=")
        if equals:
            pairs.append((name.strip(), raw.strip()))
        elif pairs and pairs[-1][0] in ("path", "tokenizer"):
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]},{part}")  # a comma in a file's name
        else:
            raise UsageError(
                f"workload {kind.name}: {part!r} is not key=value", f"write it like {kind.signature}"
            )
    return pairs


def _value(kind: WorkloadKind, key: Key, raw: str) -> Value:
    what = f"workload {kind.name}: {key.name}={raw}"
    if isinstance(key.default, str):
        if key.choices and raw not in key.choices:
            raise UsageError(f"{what} is not a valid value", f"{key.name} takes {', '.join(key.choices)}")
        return raw
    match = _NUMBER.fullmatch(raw)
    whole = isinstance(key.default, int)
    if match is None:
        raise UsageError(
            f"{what} is not a number", f"{key.help}; e.g. {key.name}={key.default} or {key.name}=4k"
        )
    # Whole numbers are not sent through float, which would round large ones (seeds).
    digits, factor = match[1], _SUFFIX.get(match[2].lower(), 1)
    number = int(digits) * factor if digits.lstrip("+-").isdigit() else float(digits) * factor
    if whole and number != int(number):
        raise UsageError(f"{what} is not a whole number", key.help)
    if not key.least <= number <= key.most:
        side = f"below {key.least:g}" if number < key.least else f"above {key.most:g}"
        raise UsageError(f"{what} is {side}", key.help)
    return int(number) if whole else float(number)
