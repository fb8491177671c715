"""All workloads: keys, defaults and help, and the presets. Data; imports nothing heavy.

The CLI's help and the README list `WORKLOADS`; `spec.py` checks values against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtune.requests.loads import synthetic
from kvtune.requests.types import Draft

if TYPE_CHECKING:
    from kvtune.requests.loads.sessions import Load

Value = str | int | float

DEFAULT_SPEC = "rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3"
"""The workload of a command without -w. It shows whether the second and third request with a prefix hit the cache."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a workload. Its value has the type of `default`; a `default` of "" means that the key is required."""

    name: str
    default: Value
    help: str
    least: float = 1
    most: float = 100_000_000
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    name: str
    help: str
    keys: tuple[Key, ...]
    builder: Callable[..., Draft]
    loader: Callable[..., Load] | None = None
    """Reads or draws the sessions of a workload that can be played by N slots."""

    def preset(self, name: str, help: str, **defaults: Value) -> WorkloadKind:
        """Return the same workload under another name, with other defaults."""
        keys = tuple(replace(key, default=defaults.get(key.name, key.default)) for key in self.keys)
        return WorkloadKind(name, help, keys, self.builder, self.loader)

    @property
    def signature(self) -> str:
        """`name:key=default,..` for help pages."""
        return f"{self.name}:" + ",".join(f"{key.name}={_show(key)}" for key in self.keys)


def _show(key: Key) -> str:
    return "FILE" if key.default == "" else str(key.default)


def _of_sessions(name: str) -> Callable[..., Any]:
    """Return a function of session_loads.py, imported when it is called: msgspec takes longer than all this."""

    def called(**values: Any) -> Any:
        from kvtune.requests.loads import session_loads

        return getattr(session_loads, name)(values)

    return called


def _concurrency(default: int) -> Key:
    return Key("concurrency", default, "requests in flight at most; 0: all that have arrived", 0, 1_000_000)


_RATE = Key("rate", 0.0, "Poisson arrivals a second, seeded; 0: none, send as concurrency allows", 0, 1e6)
_SEED = Key("seed", 0, "seeds tokens, arrivals and draws", 0, 2**63 - 1)
_SESSIONS = (
    Key("sessions", 0, "sessions at once: each plays to its end, then another begins; 0: no sessions", 0),
    Key("hours", 0.75, "hours that are played", 1e-4, 1000),
    Key("max_think", 600.0, "longer pauses are cut to these seconds", 0, 1e9),
    Key("longest", 0, "a session ends before a request of more tokens, answer included; 0: no limit", 0),
    Key(
        "answers",
        "engine",
        "an answer is in the next prompt as the engine computed it, or as new text",
        choices=("engine", "new"),
    ),
    Key(
        "share",
        "auto",
        "sessions begin with the same tools and system prompt; auto: as the log says, else no",
        choices=("auto", "yes", "no"),
    ),
    Key("subagents", 1, "0: without sub-agents", 0, 1),
)
_OUTPUT = Key("output", 16, "generated tokens of each request")
_OUTPUT_OF_AGENTS = replace(_OUTPUT, default=225, help="median generated tokens of a turn")
_ONE_KIND = (
    Key("requests", 64, "requests"),
    Key("prompt", 48, "tokens of each prompt"),
    Key("output", 200, "generated tokens of each request"),
    _concurrency(0),
    _RATE,
    _SEED,
)

_DECODE = WorkloadKind("decode", "short prompts, long outputs, all at once", _ONE_KIND, synthetic.decode)
_PREFILL = WorkloadKind("prefill", "", _ONE_KIND, partial(synthetic.decode, kind="prefill")).preset(
    "prefill", "long prompts, short outputs, all at once", requests=32, prompt=2000, output=8
)
_ROUNDS = WorkloadKind(
    "rounds",
    "the same prefixes re-sent in turn, in each round with a new suffix",
    (
        Key("prefixes", 12, "different prefixes"),
        Key("prefix", 1500, "tokens of each prefix"),
        Key("suffix", 64, "new tokens after the prefix in every request", 0),
        _OUTPUT,
        Key("rounds", 3, "how often each prefix is sent; a round waits for the one before"),
        _concurrency(1),
        _SEED,
    ),
    synthetic.rounds,
)
_ZIPF = WorkloadKind(
    "zipf",
    "prefixes drawn by popularity (1 / rank^s), each with a new suffix",
    (
        Key("prefixes", 40, "different prefixes"),
        Key("prefix", 1500, "tokens of each prefix"),
        Key("suffix", 64, "new tokens after the prefix in every request", 0),
        _OUTPUT,
        Key("requests", 120, "requests"),
        Key("s", 1.0, "exponent of the popularity; 0: all alike", 0, 20),
        _concurrency(1),
        _RATE,
        _SEED,
    ),
    synthetic.zipf,
)
_CHAT = WorkloadKind(
    "chat",
    "sessions that grow turn by turn, interleaved, after one system prompt",
    (
        Key("sessions", 12, "conversations"),
        Key("turns", 4, "turns of each conversation"),
        Key("system", 256, "tokens of the system prompt that all share", 0),
        Key("first", 256, "tokens of a conversation's first message"),
        Key("user", 64, "tokens of every later message"),
        Key("output", 64, "generated tokens of each turn"),
        Key("think", 0.0, "seconds between an answer and the next turn", 0, 86_400),
        Key(
            "answers",
            "engine",
            "what the next turn repeats: the engine's own answer, or fixed text that is the same everywhere",
            choices=("engine", "fixed"),
        ),
        Key("before", 0, "cold prompts that fill the pool before the conversations begin", 0),
        Key("cold", 3064, "tokens of each of these"),
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
        Key("prefixes", 8, "hot prefixes"),
        Key("prefix", 1500, "tokens of each hot prefix"),
        Key("suffix", 64, "new tokens after the prefix in every hot request", 0),
        _OUTPUT,
        Key("requests", 120, "requests, hot and cold"),
        Key("cold", 1564, "tokens of each cold prompt"),
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
        Key("limit", 0, "the first N requests only; 0: all", 0),
        Key("speed", 1.0, "how many times as fast as recorded", 1e-6, 1e9),
        Key("from", 0.0, "leave out what came before, seconds after the first request", 0, 1e12),
        Key("to", 0.0, "leave out what came from then on, in seconds; 0: to the end", 0, 1e12),
        Key(
            "format",
            "auto",
            "the file's format; weka: a folder of sessions, or one",
            choices=("auto", "mooncake", "burstgpt", "azure", "weka"),
        ),
        Key("sort", 0, "1: accept timestamps out of order", 0, 1),
        replace(
            _concurrency(0), help="N: forget the arrivals, keep N requests in flight; 0: as they arrived"
        ),
        *_SESSIONS,
        _SEED,
    ),
    _of_sessions("trace_draft"),
    _of_sessions("trace_load"),
)

_REQUESTS = WorkloadKind(
    "requests",
    "a log of requests, one JSON object a line: token ids or OpenAI bodies",
    (
        Key("path", "", "the log"),
        Key(
            "tokenizer",
            "auto",
            "renders text: a folder, a model in the local cache, or bytes; auto: that of the command's MODEL",
        ),
        Key("limit", 0, "the first N requests only; 0: all", 0),
        Key("speed", 1.0, "how many times as fast as logged", 1e-6, 1e9),
        Key("since", 0.0, "leave out what was sent before, seconds since 1970", 0, 1e12),
        Key("until", 0.0, "leave out what was answered after; 0: to the end", 0, 1e12),
        Key("routed", 0, "1: leave out lines without a replica", 0, 1),
        replace(_concurrency(0), help="N: forget the times, keep N requests in flight; 0: as they were sent"),
        *_SESSIONS,
        _SEED,
    ),
    _of_sessions("log_draft"),
    _of_sessions("log_load"),
)
_AGENTS = WorkloadKind(
    "agents",
    "sessions of coding agents, drawn from published quantiles",
    (
        replace(_SESSIONS[0], default=8, least=1, help="sessions at once"),
        Key("different", 100, "different sessions that are drawn"),
        Key("turns", 20, "median turns of a session"),
        Key(
            "context",
            20_000,
            "median tokens of a session's first prompt; half a median is tools that all share",
        ),
        Key("tools", 280, "median tokens that a turn adds: tools' results and the user"),
        _OUTPUT_OF_AGENTS,
        Key(
            "think",
            9.0,
            "median seconds between an answer and the next turn; a tenth are over 16 times that",
            0,
            86_400,
        ),
        Key("window", 160_000, "tokens from which a conversation is compacted to a summary"),
        replace(
            _SESSIONS[6],
            default=0.0,
            most=1,
            help="share of turns that start sub-agents; the next turn waits for them",
        ),
        *_SESSIONS[1:6],
        Key("speed", 1.0, "pauses are divided by this", 1e-6, 1e9),
        _concurrency(0),
        _SEED,
    ),
    _of_sessions("agents_draft"),
    _of_sessions("agents_load"),
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
        _REQUESTS,
        _AGENTS,
        _DECODE.preset("seed-decode", "48 tokens in, 2000 out", requests=256, prompt=48, output=2000),
        _DECODE.preset("seed-decode-short", "48 tokens in, 500 out", requests=256, prompt=48, output=500),
        _PREFILL.preset("seed-prefill", "2000 tokens in, 48 out", requests=64, prompt=2000, output=48),
        _ROUNDS.preset("seed-prefixes", "28k-token prefixes in rounds", prefixes=8, prefix=28_000),
    )
}
