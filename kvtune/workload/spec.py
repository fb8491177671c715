"""From `name:key=value,..` to a Workload: the registry of workloads and presets, the checks of values.

Importing this is cheap (no numpy), so that the CLI can list `WORKLOADS` in its help.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtune.errors import UsageError
from kvtune.workload import synthetic, trace_file
from kvtune.workload.plan import Plan
from kvtune.workload.types import Workload

Value = str | int | float

DEFAULT_SPEC = "rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3"
"""What `kvtune profile` sends without -w: shows hits, or none, at the second and third visit of a prefix."""

_SUFFIX = {"k": 1_000, "m": 1_000_000}
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)([km]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a workload. Its type is the default's; with an empty text as default it must be given."""

    name: str
    default: Value
    help: str
    least: float = 1
    most: float = 100_000_000
    choices: tuple[str, ...] = ()
    argument: str = ""  # the builder's name for it, where `name` is a Python keyword


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    name: str
    help: str
    keys: tuple[Key, ...]
    builder: Callable[..., Plan]

    def preset(self, name: str, help: str, **defaults: Value) -> WorkloadKind:
        """The same workload with other defaults; every key can still be given."""
        keys = tuple(replace(key, default=defaults.get(key.name, key.default)) for key in self.keys)
        return WorkloadKind(name, help, keys, self.builder)

    @property
    def signature(self) -> str:
        """`name:key=default,..` for help pages."""
        return f"{self.name}:" + ",".join(f"{key.name}={_show(key)}" for key in self.keys)


def _show(key: Key) -> str:
    return "FILE" if key.default == "" else str(key.default)


def _count(name: str, default: int, help: str, least: float = 1) -> Key:
    return Key(name, default, help, least)


def _concurrency(default: int) -> Key:
    return Key("concurrency", default, "requests in flight at most; 0: all that have arrived", 0, 1_000_000)


_RATE = Key("rate", 0.0, "Poisson arrivals a second, seeded; 0: none, send as concurrency allows", 0, 1e6)
_SEED = Key("seed", 0, "seeds tokens, arrivals and draws", 0, 2**63 - 1)
_OUTPUT = _count("output", 16, "generated tokens of each request")
_ONE_KIND = (
    _count("requests", 64, "requests"),
    _count("prompt", 48, "tokens of each prompt"),
    _count("output", 200, "generated tokens of each request"),
    _concurrency(0),
    _RATE,
    _SEED,
)

_DECODE = WorkloadKind("decode", "short prompts, long outputs, all at once", _ONE_KIND, synthetic.decode)
_PREFILL = WorkloadKind("prefill", "", _ONE_KIND, synthetic.prefill).preset(
    "prefill", "long prompts, short outputs, all at once", requests=32, prompt=2000, output=8
)
_ROUNDS = WorkloadKind(
    "rounds",
    "the same prefixes re-sent in turn, in each round with a new suffix",
    (
        _count("prefixes", 12, "different prefixes"),
        _count("prefix", 1500, "tokens of each prefix"),
        _count("suffix", 64, "new tokens behind the prefix in every request", 0),
        _OUTPUT,
        _count("rounds", 3, "how often each prefix is sent; a round waits for the one before"),
        _concurrency(1),
        _SEED,
    ),
    synthetic.rounds,
)
_ZIPF = WorkloadKind(
    "zipf",
    "prefixes drawn by popularity (1 / rank^s), each with a new suffix",
    (
        _count("prefixes", 40, "different prefixes"),
        _count("prefix", 1500, "tokens of each prefix"),
        _count("suffix", 64, "new tokens behind the prefix in every request", 0),
        _OUTPUT,
        _count("requests", 120, "requests"),
        Key("s", 1.0, "exponent of the popularity; 0: all alike", 0, 20),
        _concurrency(1),
        _RATE,
        _SEED,
    ),
    synthetic.zipf,
)
_CHAT = WorkloadKind(
    "chat",
    "sessions that grow turn by turn, interleaved, behind one system prompt",
    (
        _count("sessions", 12, "conversations"),
        _count("turns", 4, "turns of each conversation"),
        _count("system", 256, "tokens of the system prompt that all share", 0),
        _count("first", 256, "tokens of a conversation's first message"),
        _count("user", 64, "tokens of every later message"),
        _count("output", 64, "generated tokens of each turn"),
        Key("think", 0.0, "seconds between an answer and the next turn", 0, 86_400),
        Key(
            "answers",
            "engine",
            "what the next turn repeats: the engine's own answer, or fixed text that is the same everywhere",
            choices=("engine", "fixed"),
        ),
        _concurrency(0),
        replace(_RATE, help="Poisson starts of conversations a second, seeded; 0: all at once"),
        _SEED,
    ),
    synthetic.chat,
)
_MIX = WorkloadKind(
    "mix",
    "cold one-off prompts among hot prefixes",
    (
        _count("prefixes", 8, "hot prefixes"),
        _count("prefix", 1500, "tokens of each hot prefix"),
        _count("suffix", 64, "new tokens behind the prefix in every hot request", 0),
        _OUTPUT,
        _count("requests", 120, "requests, hot and cold"),
        _count("cold", 1564, "tokens of each cold prompt"),
        Key("share", 0.5, "share of cold requests", 0, 1),
        _concurrency(1),
        _RATE,
        _SEED,
    ),
    synthetic.mix,
)
_TRACE = WorkloadKind(
    "trace",
    "a recorded trace: Mooncake JSONL, BurstGPT or Azure CSV",
    (
        Key("path", "", "the trace file"),
        _count("limit", 0, "the first N requests only; 0: all", 0),
        Key("speed", 1.0, "how many times as fast as recorded", 1e-6, 1e9),
        Key(
            "from",
            0.0,
            "leave out what came before, seconds after the first request",
            0,
            1e12,
            argument="from_s",
        ),
        Key(
            "to", 0.0, "leave out what came from then on, in seconds; 0: to the end", 0, 1e12, argument="to_s"
        ),
        Key("format", "auto", "the file's format", choices=trace_file.FORMATS),
        Key("sort", 0, "1: accept timestamps out of order", 0, 1),
        replace(
            _concurrency(0), help="N: forget the arrivals, keep N requests in flight; 0: as they arrived"
        ),
        _SEED,
    ),
    trace_file.trace,
)

WORKLOADS: dict[str, WorkloadKind] = {
    kind.name: kind
    for kind in (
        _DECODE,
        _PREFILL,
        _ROUNDS,
        _ZIPF,
        _CHAT,
        _MIX,
        _TRACE,
        _DECODE.preset("seed-decode", "48 tokens in, 2000 out", requests=256, prompt=48, output=2000),
        _DECODE.preset("seed-decode-short", "48 tokens in, 500 out", requests=256, prompt=48, output=500),
        _PREFILL.preset("seed-prefill", "2000 tokens in, 48 out", requests=64, prompt=2000, output=48),
        _ROUNDS.preset("seed-prefixes", "28k-token prefixes in rounds", prefixes=8, prefix=28_000),
    )
}


def build(spec: str, *, seed: int = 0) -> Workload:
    """The workload of a spec. A `seed=` in the spec wins over `seed`."""
    from kvtune.workload.identity import work_hash  # here, because it needs numpy

    name, _, rest = spec.partition(":")
    kind = WORKLOADS.get(name.strip())
    if kind is None:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        mean = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"unknown workload {name!r}", f"{mean}known: {', '.join(WORKLOADS)}")
    values = _values(kind, rest, seed)
    arguments = {key.argument or key.name: values[key.name] for key in kind.keys}
    plan = kind.builder(**arguments)
    used_seed = int(values.pop("seed"))
    return Workload(
        name=kind.name,
        spec=spec,
        params=values,
        seed=used_seed,
        requests=plan.requests,
        hash=work_hash(plan, used_seed),
        concurrency=plan.concurrency,
        barrier=plan.barrier,
    )


def _values(kind: WorkloadKind, text: str, seed: int) -> dict[str, Value]:
    keys = {key.name: key for key in kind.keys}
    given: dict[str, Value] = {}
    for name, raw in _pairs(kind, text):
        if name not in keys:
            raise UsageError(f"workload {kind.name} has no key {name!r}", f"its keys: {', '.join(keys)}")
        if name in given:
            raise UsageError(f"workload {kind.name}: {name}= is given twice", "give it once")
        given[name] = _value(kind, keys[name], raw)
    values: dict[str, Value] = {key.name: given.get(key.name, key.default) for key in kind.keys}
    if "seed" not in given:
        values["seed"] = seed
    if given.get("rate") and "concurrency" not in given:
        values["concurrency"] = 0  # arrivals decide, unless both were asked for
    for key in kind.keys:
        if values[key.name] == "":
            raise UsageError(f"workload {kind.name} needs {key.name}=", f"e.g. {kind.name}:{key.name}=FILE")
    return values


def _pairs(kind: WorkloadKind, text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for part in text.split(",") if text.strip() else ():
        name, equals, raw = part.partition("=")
        if equals:
            pairs.append((name.strip(), raw.strip()))
        elif pairs and pairs[-1][0] == "path":
            pairs[-1] = ("path", f"{pairs[-1][1]},{part}")  # a comma in a file's name
        else:
            raise UsageError(
                f"workload {kind.name}: {part!r} is not key=value", f"write it like {kind.signature}"
            )
    return pairs


def _value(kind: WorkloadKind, key: Key, raw: str) -> Value:
    what = f"workload {kind.name}: {key.name}={raw}"
    if isinstance(key.default, str):
        if key.choices and raw not in key.choices:
            raise UsageError(f"{what} is not known", f"one of {', '.join(key.choices)}")
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
