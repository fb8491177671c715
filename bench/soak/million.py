"""A million requests of trouble on vLLM's EngineCore in the simulator: no HTTP, virtual time, audited.

    python -m bench.soak.million [--requests 1000000] [--seed 0] [--model NAME ..] [--round N] [--json FILE]

Each model gets its share of the requests, in its own process. Round n is played with one of four kinds of
scheduling (sync or async, by priority or as they come). After each round nothing may be left of its requests
(`million_left`), and every request has ended once, with all its tokens, or was aborted (`million_round`). Every
20th round of each is also played, in lockstep, by engines that must schedule the same batches into the same blocks:
stock, the core where it decides alike, and both by the simulator's quick paths; and the core as it is, step by step and
quick. A failure prints seed, model and round.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32

from bench.soak.million_engine import MODELS, SCHEDULINGS, Kind, Model, Scheduling, built
from bench.soak.million_left import problems
from bench.soak.million_round import Broken, Played, Rounds
from bench.soak.trouble import Round, trouble
from kvtune.base.errors import KvtuneError

LOCKSTEP = 20
"""One round in this many is played in lockstep."""
GROUPS: tuple[tuple[Kind, ...], ...] = (("stock", "alike", "fast stock", "fast alike"), ("core", "fast core"))
"""Engines that must decide alike, where the core's defaults decide otherwise than stock."""
COLUMNS = ("digests", "hits", "tokens", "finished_s", "requests", "aborted", "preemptions", "resets", "steps")


@dataclasses.dataclass
class Portion:
    """What one model's share came to."""

    model: str
    seed: int
    seconds: float = 0.0
    virtual_s: float = 0.0
    rounds: int = 0
    requests: int = 0
    aborted: int = 0
    preemptions: int = 0
    resets: int = 0
    steps: int = 0
    audits: int = 0
    checksum: int = 0
    """Of every batch, of the engines that play all rounds."""
    in_lockstep: int = 0
    """Requests of the rounds in lockstep, once for each engine."""
    failure: str = ""
    failed_round: int | None = None


class Failed(Exception):
    """A round is not as it must be."""

    def __init__(self, why: str, round_: Round | None = None) -> None:
        super().__init__(why)
        self.round = round_


def play(rounds: Rounds, round_: Round) -> Played:
    """One round, and what must hold after it; Broken where it does not."""
    try:
        played = rounds.play(round_)
    except (Broken, KvtuneError):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise Broken(f"{type(error).__name__}: {error} ({last.name}, line {last.lineno})") from error
    left = problems(rounds.engine, played.ids)
    off = getattr(rounds.engine.scheduler, "steady_off", "")
    if left or off:
        raise Broken("; ".join([*left[:5], *([f"steady path: {off}"] if off else [])]))
    return played


class Engines:
    """Of one kind of scheduling: the one that plays all rounds, and those for rounds in lockstep."""

    def __init__(self, model: Model, scheduling: Scheduling, seed: int, twins: bool = True) -> None:
        kinds = [
            kind for group in GROUPS for kind in group if model.differs or kind not in ("alike", "fast alike")
        ]
        self._twins = {kind: Rounds(built(model, scheduling, kind), seed) for kind in kinds if twins}
        groups = GROUPS if model.differs else (("stock", "core", "fast stock", "fast core"),)
        self._groups: Sequence[tuple[Kind, ...]] = groups
        self.main = Rounds(built(model, scheduling, "core"), seed)

    def play(self, round_: Round) -> Played:
        try:
            return play(self.main, round_)
        except (Broken, KvtuneError) as error:
            raise Failed(str(error), round_) from error

    def lockstep(self, round_: Round) -> int:
        """Requests played in all; Failed where two engines that must decide alike do not."""
        requests = 0
        for group in self._groups:
            first: Played | None = None
            for kind in group:
                try:
                    played = play(self._twins[kind], round_)
                except (Broken, KvtuneError) as error:
                    raise Failed(f"{kind}: {error}", round_) from error
                requests += played.requests
                first = first or played
                for column in COLUMNS:
                    if getattr(played, column) != getattr(first, column):
                        at = _first_difference(getattr(first, column), getattr(played, column))
                        raise Failed(f"{kind} differs from {group[0]} in {column}{at}", round_)
        return requests


def run(
    model: Model,
    seed: int,
    requests: int,
    only: int | None = None,
    schedulings: Sequence[Scheduling] = SCHEDULINGS,
    lockstep: int = LOCKSTEP,
) -> Portion:
    """Rounds from 0 on (or just one, or those of some schedulings), until that number of requests was played.

    One in `lockstep` rounds is played in lockstep; 0: none.
    """
    from kvtune.plugin.core import state

    portion, began = Portion(model.name, seed), time.monotonic()
    engines: dict[Scheduling, Engines] = {}
    if only is not None:
        schedulings = (SCHEDULINGS[only % len(SCHEDULINGS)],)
    try:
        for scheduling in schedulings:
            engines[scheduling] = Engines(model, scheduling, seed, twins=lockstep > 0)
        gc.freeze()
        notes = list(state.state()["notes"])
        parts = dict(state.state()["parts"])
        for number in itertools.count() if only is None else (only,):
            if portion.requests >= requests:
                break
            if (scheduling := SCHEDULINGS[number % len(SCHEDULINGS)]) not in engines:
                continue
            round_, here = trouble(seed, number), engines[scheduling]
            played = here.play(round_)
            portion.checksum = crc32(played.digests.tobytes(), portion.checksum)
            portion.rounds += 1
            for name in ("requests", "aborted", "preemptions", "resets", "steps"):
                setattr(portion, name, getattr(portion, name) + getattr(played, name))
            if lockstep and (only is not None or number // len(SCHEDULINGS) % lockstep == 0):
                portion.in_lockstep += here.lockstep(round_)
            now = state.state()
            if now["notes"] != notes or now["parts"] != parts:
                raise Failed(
                    f"parts of the core are off: {now['notes'][len(notes) :]} {now['parts']}", round_
                )
    except Failed as error:
        portion.failure = str(error)
        portion.failed_round = None if error.round is None else error.round.number
    portion.audits = state.counters().get("audits", 0)
    portion.virtual_s = sum(each.main.clock.now_s for each in engines.values())
    portion.seconds = time.monotonic() - began
    return portion


def _first_difference(one: Any, other: Any) -> str:
    if isinstance(one, int):
        return f": {other}, not {one}"
    pairs = enumerate(zip(one, other, strict=False))
    at = next((f", first at {i}: {b}, not {a}" for i, (a, b) in pairs if a != b), "")
    return at or f": {len(other)} rows, not {len(one)}"


@contextmanager
def imported() -> Iterator[None]:
    """vLLM, imported once for all forks."""
    from kvtune.lab.sim.worker import prepare

    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    prepare("")
    gc.collect()
    gc.freeze()
    yield


def in_fork(work: Callable[[], Portion]) -> Portion:
    """`work` in its own process: the core changes vLLM's classes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        portion: Portion = ours.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"the process of a portion ended with code {process.exitcode}") from None
    process.join()
    return portion


def _answer(work: Callable[[], Portion], pipe: Connection) -> None:
    try:
        pipe.send(work())
    except BaseException:
        traceback.print_exc()
    finally:
        pipe.close()
        os._exit(0)  # torch and triton have nothing to put away, and say so at length


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak.million")
    parser.add_argument("--requests", type=int, default=1_000_000, help="of all models together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", action="append", choices=sorted(MODELS), help="repeat for several")
    parser.add_argument("--round", type=int, help="only this one, in lockstep, too")
    parser.add_argument("--json", type=Path, help="write the portions here")
    given = parser.parse_args(arguments)
    models = [MODELS[name] for name in given.model or MODELS]
    portions = []
    with imported():
        for model in models:
            share = -(-given.requests // len(models))
            portions.append(in_fork(partial(run, model, given.seed, share, given.round)))
            report(portions[-1])
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(portion) for portion in portions]))
    if len(portions) > 1:
        report_sum(portions)
    return int(any(portion.failure for portion in portions))


def report(portion: Portion) -> None:
    rate = portion.requests / portion.seconds
    print(
        f"{portion.model}: {portion.requests:,} requests in {portion.rounds:,} rounds, {portion.aborted:,} aborted, "
        f"{portion.preemptions:,} preemptions, {portion.resets:,} resets, {portion.steps:,} steps, "
        f"{portion.audits:,} audits; {portion.in_lockstep:,} requests in lockstep; {portion.seconds:.0f} s "
        f"({rate:.0f} a second), {portion.virtual_s:,.0f} s of virtual time",
        flush=True,
    )
    if portion.failure:
        print(f"  FAILED: seed {portion.seed}, {portion.model}, {portion.failure}")
        print(
            f"  again: python -m bench.soak.million --seed {portion.seed} --model {portion.model} "
            f"--round {portion.failed_round}"
        )
    sys.stdout.flush()


def report_sum(portions: Sequence[Portion]) -> None:
    names = ("requests", "aborted", "preemptions", "resets", "steps", "seconds")
    whole = Counter[str]()
    for portion in portions:
        whole.update({name: round(getattr(portion, name)) for name in names})
    print("in all: " + ", ".join(f"{whole[name]:,} {name}" for name in names))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as in `_answer`
