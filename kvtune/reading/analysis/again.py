"""The commands that repeat a run, use a study or serve a set-up, to be copied. Pure.

`Invocation` writes every command that names a model, a load and settings, without what is a default: reading it shows
what is special, and parsing it gives the same set-up (tests/cli/test_set_up.py).
A file names models, loads and flags, so a command that is made from a file carries flags of the list alone
(kvtune/data/file_flags.py), written anew; `left_out` names the others. A model and a load are data, one word each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtune.base.commands import command, core_words, model_word, vllm_serve
from kvtune.data.file_flags import on_the_list
from kvtune.data.flags import settings_given, with_flag
from kvtune.data.knobs import changed_settings
from kvtune.data.layout.models import builtin
from kvtune.data.run.extras import MOST_REPLICAS, ROUTERS, Remedy
from kvtune.data.run.ranges import Scalar
from kvtune.data.run.types import Run
from kvtune.data.show.terminal import one_line
from kvtune.requests.loads.spec import DEFAULT_SPEC, shortest

KEPT = {
    "--like": r"[^-].*",
    "--like-device": r"\w[\w.]*",
    "--step-us": r"\d[\w.+-]*",
    "--replicas": "1",
}
"""Options of `profile` that say on what a run ran, each with the form of its value.

One replica, as a log may name more; a fleet's header has its replicas and its router.
"""

DEVICE = re.compile(KEPT["--like-device"])

ON = {"profile": "engine", "sweep": "sim", "tune": "both"}
"""Where each command runs without `--on`."""

POOL = "num-gpu-blocks-override"

MODEL = "MODEL"
"""Stands for the model of a server that only told the name it is served by."""

MOST_LEFT_OUT = 6
"""Flags that `left_out` names; it counts the rest."""


def with_flags(words: Sequence[str], flags: Sequence[str]) -> str:
    """Return a command with those of a file's vLLM flags that are on the list. Say `left_out` beside it."""
    return command(*words, flags=on_the_list(flags)[0])


def left_out(flags: Sequence[str]) -> str:
    """Return the sentence that names a file's flags that no command repeats; "" if there are none."""
    names = on_the_list(flags)[1]
    if not names:
        return ""
    shown = [ascii(one_line(name))[1:-1] for name in names[:MOST_LEFT_OUT]]
    more = len(names) - len(shown)
    text = f"{', '.join(shown)}{f' and {more} more' if more else ''}"
    return f"without {text}, which the file asks for: add what you trust"


def left_out_of_run(run: Run) -> str:
    """Return `left_out` for all commands that are made from this run."""
    replayed = run.header.extra.replayed
    changed = [
        word
        for remedy in (replayed.remedies if replayed else ())
        for name, value in remedy.flags.items()
        if value is not None
        for word in with_flag((), name, value)
    ]
    return left_out([*run.header.engine.args, *changed])


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A set-up in the words of `profile`, `sweep` and `tune`. A field's default is that of the option that sets it.

    `where`: `--on` with the options that belong to it. `objective`: only of `sweep` and `tune`. `found_pool`: the flag
    of the pool's size says what a running server had, so that the same server needs no such flag.
    """

    model: str
    spec: str = DEFAULT_SPEC
    seed: int = 0
    core: str = "kvtune"
    core_settings: Mapping[str, Scalar] = field(default_factory=dict)
    flags: Sequence[str] = ()
    where: Sequence[str] = ()
    dummy: bool = False
    slo: Mapping[str, float] = field(default_factory=dict)
    objective: str = "hit-rate"
    found_pool: bool = False

    def line(self, verb: str, *options: str) -> str:
        """Return the command `kvtune VERB` for this set-up. `options`: more words, before vLLM's flags."""
        where = list(self.where)
        if where[:2] == ["--on", ON[verb]]:
            del where[:2]
        words = [verb, model_word(self.model), *where, *load_words(self.spec, self.seed)]
        words += ["--core", self.core] if self.core != "kvtune" else core_words(self.changed)
        without_weights = verb == "profile" and where[:1] == ["--on"]
        words += ["--dummy"] if self.dummy and not without_weights else []
        limits = ",".join(f"{name}={limit:.12g}" for name, limit in self.slo.items())
        words += ["--slo", limits] if limits else []
        words += ["--objective", self.objective] if self.objective != "hit-rate" else []
        return with_flags([*words, *options], self.flags)

    def serve(self, device: str = "") -> str:
        """Return the command that serves the model so: `vllm serve` where that can, else `kvtune serve`."""
        flags = with_flag(self.flags, POOL, None) if self.found_pool else self.flags
        if self.core == "stock" and builtin(self.model) is None and not needs_kvtune(flags, device):
            return vllm_serve(self.model, on_the_list(flags)[0])
        core = ["--core", "stock"] if self.core == "stock" else core_words(self.changed)
        return with_flags(["serve", model_word(self.model), *core, *["--dummy"] * self.dummy], flags)

    @property
    def changed(self) -> dict[str, Scalar]:
        """The core's settings that differ from the defaults."""
        return changed_settings(self.core_settings)


def needs_kvtune(flags: Sequence[str], device: str) -> bool:
    """Whether stock vLLM refuses the flags on this device, and kvtune's plugin makes it serve them."""
    return device == "cpu" and "kv-offloading-size" in settings_given(flags)


def load_words(spec: str, seed: int, *, needed: bool = False) -> list[str]:
    """Return `-w` and `--seed` for a load. `needed`: the command has no load by default."""
    short = shortest(spec, seed)
    default = not needed and short == shortest(DEFAULT_SPEC)
    return [*([] if default else ["-w", short]), *(["--seed", str(seed)] if seed else [])]


def of_run(run: Run) -> Invocation:
    """Return a run's set-up. A server's run is repeated by an engine, with the log of its requests."""
    header = run.header
    return Invocation(
        model=named(run),
        spec=header.workload.spec,
        seed=header.workload.seed,
        core=header.core.name,
        core_settings=header.core.settings if header.core.name == "kvtune" else {},
        flags=header.engine.args,
        where=list(_place(run)),
        dummy="--dummy" in _own_words(run),
        slo={str(name): limit for name, limit in header.extra.slo.items()},
        found_pool=header.source == "server",
    )


def named(run: Run) -> str:
    """Return the run's model for a command: a server's name that is neither built in nor a path is MODEL."""
    name = run.header.model
    named = run.header.source != "server" or "/" in name or builtin(name) is not None
    return model_word(name) if named else MODEL


def profile_line(run: Run, *options: str, core: str = "") -> str:
    """Return the `kvtune profile` command for the run's model and load, and for its core or another."""
    invocation = of_run(run)
    return replace(invocation, core=core or invocation.core).line("profile", *options)


def tune_line(run: Run) -> str:
    """Return the `kvtune tune` command for the run's model, load and core."""
    invocation, like = of_run(run), run.header.engine.like_device
    where = ["--on", "host"] if run.header.source == "host" else []
    where = ["--on", "sim", "--like-device", like] if DEVICE.fullmatch(like) else where
    return replace(invocation, core_settings={}, where=where).line("tune")


def repeating(run: Run) -> str:
    """Return the command that makes the run again; "" for a server's recording, which no load can repeat."""
    return "" if run.header.source == "server" else profile_line(run)


def remedied(invocation: Invocation, remedy: Remedy) -> Invocation:
    """Return the set-up with a remedy's core, its settings, and changed flags (None removes one)."""
    words = list(invocation.flags)
    for name, value in remedy.flags.items():
        words = with_flag(words, name, value)
    pool = invocation.found_pool and POOL not in remedy.flags
    core, settings = remedy.core or invocation.core, remedy.core_settings
    return replace(invocation, core=core, core_settings=settings, flags=words, found_pool=pool)


def with_remedy(run: Run, remedy: Remedy) -> str:
    """Return the command that measures a remedy."""
    return remedied(of_run(run), remedy).line("profile")


def served_with(run: Run, remedy: Remedy) -> str:
    """Return the command that serves the run's model with a remedy, kept from the run's own flags."""
    return remedied(of_run(run), remedy).serve(run.header.engine.device)


def explain_line(run: Run, file: str) -> str:
    """Return the `kvtune explain` command for a run: with its log or trace, and the model that a server serves."""
    words = ["explain", file or "RUN"]
    unknown = "LOG" if run.header.source == "server" else ""
    if path := str(run.header.workload.params.get("path", unknown)):
        words += ["--trace", "LOG" if path.startswith("-") else path]
    words += ["--model", named(run)] if run.header.source == "server" else []
    return command(*words)


def bounds_line(run: Run) -> str:
    """Return the `kvtune bounds` command for the run's load and model."""
    load = run.header.workload
    return command("bounds", *load_words(load.spec, load.seed, needed=True), "--model", named(run))


def _place(run: Run) -> Iterator[str]:
    """Yield `--on`, the replicas and the options in KEPT as the run had them. A server's requests go to an engine.

    Requests that went where their log says (router "given") need no option: the log says it again.
    """
    if run.header.source not in ("engine", "server"):
        yield from ("--on", run.header.source)
    fleet = run.header.extra.fleet if run.header.source == "sim" else None
    if fleet is not None and fleet.router in ROUTERS and 1 < fleet.replicas <= MOST_REPLICAS:
        yield from ("--replicas", str(fleet.replicas), "--router", fleet.router)
    words = _own_words(run)
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in KEPT and re.fullmatch(
            KEPT[name], value if equals else "".join(words[number + 1 : number + 2])
        ):
            yield from (word,) if equals else words[number : number + 2]


def _own_words(run: Run) -> list[str]:
    """Return the words of the run's own `profile` command before vLLM's flags; none if another command made it."""
    words = run.header.command
    if words[1:2] != ["profile"]:
        return []
    return words[: words.index("--")] if "--" in words else words


def profile_again(run: Run, output: str) -> str:
    """Return the `kvtune profile` command that repeats the run into a folder; "" if another command made the run."""
    return profile_line(run, "-o", output) if run.header.command[1:2] == ["profile"] else ""
