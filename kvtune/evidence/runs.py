"""Runs the cases of `claims.py` with their sides interleaved; resumes an earlier call. In the CLI's process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from kvtune.engine.messages import Event
from kvtune.engine.profile import ProfileJob, profile
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.evidence.claims import Case, CaseSide
from kvtune.evidence.turns import TurnFigures, in_turns
from kvtune.files import creating
from kvtune.run.rows import add_row, read_rows
from kvtune.workload.spec import build

JOURNAL = "evidence.jsonl"
ROW = ("key", "repeat", "path")
TURNS = re.compile(r"turns-[0-9a-f]{12}\.json")


@dataclass(frozen=True, slots=True)
class CaseRun:
    """One run of a side; `why` is the failure if there is no file."""

    case: str
    side: str
    repeat: int
    path: str
    why: str = ""


def command(case: Case, side: CaseSide) -> str:
    """The command that makes this run alone."""
    settings = "".join(f" --set core.{name}={str(value).lower()}" for name, value in side.settings.items())
    core = " --core stock" if side.core == "stock" else ""
    args = " ".join((*case.args, *side.args))
    return f"kvtune profile {case.model} -w {case.workload}{core}{settings}{' -- ' + args if args else ''}"


def order(case: Case) -> Iterator[tuple[int, CaseSide]]:
    """Sides in turn, in reverse order every second time, so that a slowing machine affects all alike."""
    for repeat in range(case.repeats):
        for side in case.sides if repeat % 2 == 0 else case.sides[::-1]:
            yield repeat, side


def key(case: Case, side: CaseSide) -> str:
    return sha256(command(case, side).encode()).hexdigest()[:12]


def run_case(
    case: Case,
    folder: Path,
    on_start: Callable[[Case, CaseSide, int], Callable[[Event], None]],
) -> list[CaseRun]:
    """All runs of a case: taken from the journal if the same command made them, else made now."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {(row["key"], row["repeat"]): row for row in read_rows(folder / JOURNAL, ROW)}
    made = []
    for repeat, side in order(case):
        row = kept.get((key(case, side), repeat))
        if row is not None and (folder / row["path"]).is_file():
            made.append(CaseRun(case.name, side.name, repeat, row["path"]))
            continue
        made.append(_run(case, side, repeat, folder, on_start(case, side, repeat)))
    return made


def discard(folder: Path) -> None:
    """Remove what earlier calls kept to resume from; run files stay."""
    read_rows(folder / JOURNAL, ROW)
    (folder / JOURNAL).unlink(missing_ok=True)
    for path in folder.glob("turns-*.json"):
        if TURNS.fullmatch(path.name) and not path.is_symlink() and _kept_turns(path) is not None:
            path.unlink()


def _kept_turns(path: Path) -> dict[str, list[TurnFigures]] | None:
    """The figures in a file that `run_turns` wrote; None for any other."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[TurnFigures]])
    except (OSError, msgspec.DecodeError):
        return None


def run_turns(case: Case, folder: Path, on_turn: Callable[[int], None]) -> dict[str, list[TurnFigures]]:
    """The figures of every turn, by side: kept from an earlier call with the same commands, else measured."""
    folder.mkdir(parents=True, exist_ok=True)
    same = "".join(key(case, side) for side in case.sides) + str(case.turns)
    path = folder / f"turns-{sha256(same.encode()).hexdigest()[:12]}.json"
    kept = _kept_turns(path)
    if kept is not None:
        return kept
    figures = in_turns(case, on_turn)
    with creating(path) as part:
        part.write(msgspec.json.encode(figures))
    return figures


def _run(case: Case, side: CaseSide, repeat: int, folder: Path, on_event: Callable[[Event], None]) -> CaseRun:
    job = ProfileJob(
        model=case.model,
        workload=build(case.workload, seed=0),
        core=side.core,
        core_settings=dict(side.settings),
        engine_args=(*case.args, *side.args),
        output=folder,
    )
    try:
        done = profile(job, on_event)
    except KvtuneError as error:
        if error.exit_code == EXIT_INTERRUPTED:
            raise
        return CaseRun(case.name, side.name, repeat, "", error.message)
    if done.error is not None:
        if done.error.exit_code == EXIT_INTERRUPTED:
            raise done.error
        return CaseRun(case.name, side.name, repeat, "", done.error.message)
    row = {"key": key(case, side), "repeat": repeat, "path": done.path.name}
    add_row(folder / JOURNAL, row)
    return CaseRun(case.name, side.name, repeat, done.path.name)
