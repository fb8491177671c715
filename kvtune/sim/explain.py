"""`kvtune explain`: where every prompt token of a run went, and which setting would have made it a hit.

Parent side: asks a replay process (explain_worker) for verdicts, adds them up, tries remedies by replaying them.
The replay is exact for what it replays; where the run's own hits differ, the explanation says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from kvtune.errors import KvtuneError, UsageError
from kvtune.run.types import Run
from kvtune.sim.explain_causes import CAUSES, split
from kvtune.sim.explain_listener import Verdict
from kvtune.sim.explain_worker import Answer, Question
from kvtune.sim.settings import SimSettings

Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens lost to blocks that one kind of pressure took, and how long before they were missed."""

    pressure: str
    tokens: int
    median_age_s: float
    max_age_s: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A request whose replayed hit is not the run's own."""

    request: str
    run_hit_tokens: int
    replayed_hit_tokens: int


@dataclass(frozen=True, slots=True)
class Remedy:
    """Other settings, replayed: what the whole workload would have hit."""

    cause: str
    change: str
    hit_tokens: int
    gain_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """`misses` by cause; with `hit_tokens` they add up to `query_tokens` exactly, here and in each class.

    `by_class`: request class -> counts of hit, query and causes. `by_group`: KV cache group -> cause -> tokens.
    """

    query_tokens: int
    hit_tokens: int
    misses: Counts
    by_class: dict[str, Counts]
    by_group: dict[str, Counts]
    evictions: tuple[Eviction, ...]
    requests: int
    not_admitted: int
    run_hit_tokens: int | None
    disagreements: tuple[Disagreement, ...]
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0


class Replays:
    """A process that answers questions by replaying. Use as a context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtune-explain-")
        self._asked = 0
        self._process: subprocess.Popen[str] | None = None
        self._done = -1

    def __enter__(self) -> Replays:
        self._done, out = os.pipe()
        quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
        for name in ("KVTUNE_CORE", "KVTUNE_SET", "KVTUNE_RECIPE"):
            quiet.pop(name, None)
        with (Path(self._folder.name) / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtune.sim.explain_worker", self._folder.name, str(out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(out,),
                env=quiet,
                text=True,
            )
        os.close(out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            if error is not None:
                process.terminate()
            process.wait()
        os.close(self._done)
        self._folder.cleanup()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Answers in the order of `questions`; an answer with a `message` is a failure."""
        process = self._process
        assert process is not None and process.stdin is not None
        folder = Path(self._folder.name)
        numbers = list(range(self._asked, self._asked + len(questions)))
        for number, question in zip(numbers, questions, strict=True):
            (folder / f"{number}.question").write_bytes(msgspec.json.encode(question))
        if self._asked == 0:
            self._wait("vLLM could not be loaded")
        self._asked += len(questions)
        process.stdin.write(" ".join(map(str, numbers)) + "\n")
        process.stdin.flush()
        self._wait("the replay ended")
        return [self._answer(folder / f"{number}.answer") for number in numbers]

    def _wait(self, what: str) -> None:
        if os.read(self._done, 1):
            return
        log = (Path(self._folder.name) / "log").read_text(errors="replace").strip().splitlines()
        raise KvtuneError(
            f"{what}: {log[-1].strip() if log else 'no message'}", "`kvtune doctor` checks the machine"
        )

    def _answer(self, path: Path) -> Answer:
        if not path.exists():
            return Answer(message="the replay's process died", hint="free memory and try again")
        return msgspec.json.decode(path.read_bytes(), type=Answer)


def explain(run: Run, *, tries: int = 4, say: Callable[[str], None] = lambda text: None) -> Explanation:
    """Explain a run's misses; try up to `tries` remedies for the largest causes. `say` gets what is being done."""
    from kvtune.sim.explain_remedies import candidates, situation

    settings, workload = settings_of(run), run.header.workload
    question = Question(
        spec=workload.spec, seed=workload.seed, workload_hash=workload.hash, settings=settings, listen=True
    )
    with Replays() as replays:
        say(f"replaying {workload.requests} requests")
        answer = replays.ask([question])[0]
        if answer.message:
            raise KvtuneError(answer.message, answer.hint, answer.exit_code)
        found = add_up(run, answer)
        options = candidates(found.misses, found.query_tokens, situation(settings, answer.engine))[:tries]
        if not options:
            return found
        say(f"trying {len(options)} remedies")
        asked = [msgspec.structs.replace(question, settings=o.settings, listen=False) for o in options]
        remedies: list[Remedy] = []
        for option, reply in zip(options, replays.ask(asked), strict=True):
            hits = sum(max(hit, 0) for hit in reply.hits)
            gain = 0 if reply.message else hits - found.hit_tokens
            remedies.append(Remedy(option.cause, option.change, hits, gain, reply.message))
    remedies.sort(key=lambda remedy: -remedy.gain_tokens)
    return replace(found, remedies=tuple(remedies))


def settings_of(run: Run) -> SimSettings:
    """The simulated engine that a run ran on; UsageError for a run that cannot be replayed."""
    header = run.header
    if not header.workload.spec:
        raise UsageError("the run does not say its workload", "record it again with this kvtune")
    core = "kvtune" if header.core.name == "kvtune" and header.core.active else "stock"
    cost = header.extra.get("step_cost")
    known = {"cost": cost} if cost else {}
    mode = header.extra.get("sim", {}).get("mode", "exact")
    return msgspec.convert(
        {
            "model": header.model,
            "engine_args": header.engine.args,
            "core": core,
            "core_settings": header.core.settings if core == "kvtune" else {},
            "mode": mode,
            "specs": header.engine.kv_specs,
            "async_scheduling": header.engine.async_scheduling,
            **known,
        },
        SimSettings,
    )


def add_up(run: Run, answer: Answer) -> Explanation:
    """The explanation of one replay: every admitted request's tokens under hit or exactly one cause."""
    table = run.table("requests")
    misses: Counts = dict.fromkeys(CAUSES, 0)
    by_class: dict[str, Counts] = {}
    by_group: dict[str, Counts] = defaultdict(
        lambda: dict.fromkeys(("not_retained", "evicted", "lagging_group"), 0)
    )
    lost: dict[str, list[tuple[int, float]]] = defaultdict(list)
    query = hit = missing = 0
    for index, verdict in enumerate(answer.verdicts):
        if verdict is None:
            missing += 1
            continue
        counts = split(verdict.boundaries)
        got = verdict.boundaries.prompt - sum(counts.values())
        query += verdict.boundaries.prompt
        hit += got
        label = class_of(str(table["kind"][index]), int(table["round"][index]))
        of_class = by_class.setdefault(label, {"query": 0, "hit": 0, **dict.fromkeys(CAUSES, 0)})
        of_class["query"] += verdict.boundaries.prompt
        of_class["hit"] += got
        for cause, tokens in counts.items():
            misses[cause] += tokens
            of_class[cause] += tokens
        _blame(verdict, counts, by_group)
        if counts["evicted"]:
            lost[_pressure(verdict, table)].append((counts["evicted"], _age(verdict)))
    return Explanation(
        query_tokens=query,
        hit_tokens=hit,
        misses=misses,
        by_class=by_class,
        by_group=dict(by_group),
        evictions=_evictions(lost),
        requests=len(answer.verdicts) - missing,
        not_admitted=missing,
        run_hit_tokens=_run_hits(table),
        disagreements=_disagreements(table, answer.hits),
        notes=_notes(run, answer),
    )


def class_of(kind: str, round_: int) -> str:
    """A request's class in words: its kind, and its round (counted from 1) where the workload has rounds."""
    words = ([kind] if kind else []) + ([f"visit {round_ + 1}"] if round_ >= 0 else [])
    return ", ".join(words) or "all"


def _blame(verdict: Verdict, counts: Counts, by_group: dict[str, Counts]) -> None:
    if counts["not_retained"] and verdict.unkept:
        by_group[verdict.unkept]["not_retained"] += counts["not_retained"]
    for cause in ("evicted", "lagging_group"):
        if counts[cause] and verdict.lagging:
            by_group[verdict.lagging][cause] += counts[cause]


def _pressure(verdict: Verdict, table: dict[str, Any]) -> str:
    fate = verdict.evicted
    if fate is None or not fate.by:
        return "unknown"
    if fate.phase == "overwritten":
        return "overwritten by its own request"
    row = int(fate.by)
    return f"{fate.phase} of {class_of(str(table['kind'][row]), int(table['round'][row]))}"


def _age(verdict: Verdict) -> float:
    return verdict.at_s - verdict.evicted.at_s if verdict.evicted is not None else float("nan")


def _evictions(lost: dict[str, list[tuple[int, float]]]) -> tuple[Eviction, ...]:
    found = []
    for pressure, entries in lost.items():
        ages = np.array([age for _, age in entries if age == age])
        median, longest = (float(np.median(ages)), float(ages.max())) if len(ages) else (float("nan"),) * 2
        found.append(Eviction(pressure, sum(tokens for tokens, _ in entries), median, longest))
    return tuple(sorted(found, key=lambda eviction: -eviction.tokens))


def _run_hits(table: dict[str, Any]) -> int | None:
    known = table["hit_tokens"][table["hit_tokens"] >= 0]
    return int(known.sum()) if len(known) else None


def _disagreements(table: dict[str, Any], hits: Sequence[int]) -> tuple[Disagreement, ...]:
    found = []
    for index, replayed in enumerate(hits):
        own = int(table["hit_tokens"][index])
        if own >= 0 and replayed >= 0 and own != replayed:
            found.append(Disagreement(str(table["id"][index]), own, replayed))
    return tuple(found)


def _notes(run: Run, answer: Answer) -> tuple[str, ...]:
    notes = []
    if run.header.state != "complete":
        notes.append(f"the run is {run.header.state}: {run.header.why}")
    if answer.state != "complete":
        notes.append(f"the replay is {answer.state}: {answer.why}")
    return tuple(notes)


def with_misses(run: Run, found: Explanation) -> Run:
    """The run with its causes in `header.extra["misses"]`; KvtuneError when they do not explain its own hits."""
    if found.disagreements or found.not_admitted or found.run_hit_tokens != found.hit_tokens:
        raise KvtuneError(
            f"the causes are not stored: the replay differs from the run in {len(found.disagreements)} requests",
            "they explain the replay, not the run; read them from --json",
        )
    extra = {**run.header.extra, "misses": found.misses}
    return Run(msgspec.structs.replace(run.header, extra=extra), run.tables)
