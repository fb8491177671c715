"""Public measurements on GPUs, what kvtune predicts of them, and how the two compare.

rows.toml: what the sources state of their set-ups, and the commands. predicted.json: what the commands say, written by
`python -m tests.public.table [ROW ..]`. measured.toml: the sources' figures, of each row added by a later commit than
its prediction, and why a prediction differs. `make docs` writes reports/evidence/public.md from the three.
"""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec

from tests.simulator import LENDER, run

FOLDER = Path(__file__).parent
PREDICTED = FOLDER / "predicted.json"
TITLES = {
    "block": "block",
    "padding_percent": "padding %",
    "page_bytes": "page",
    "groups": "groups",
    "group_blocks": "their blocks",
    "tokens": "tokens",
    "concurrency": "concurrency",
    "blocks": "blocks",
    "needed_gib": "GiB needed",
    "longest": "longest",
    "cached": "cached",
    "hits": "hits",
}
"""A figure's name in reports/evidence/public.md, which says what each is in vLLM's words."""
GIB = 1 << 30
Figure = int | float | list[int]
Figures = dict[str, Figure]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a source states. `missing`: what it does not state; such a row has no command."""

    source: str
    version: str
    model: str
    device: str
    setup: str
    figures: list[str]
    command: str = ""
    lengths: list[int] = []
    stand_in: str = ""
    missing: str = ""

    def commands(self) -> list[list[str]]:
        """Return the words of each command line, without `kvtune`."""
        words = shlex.split(self.command)[1:]
        lengths = self.lengths or [0]
        return [[word.replace("prefix=N", f"prefix={length}") for word in words] for length in lengths]


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a source measured. `why`: why the prediction differs."""

    figures: dict[str, Figure] = {}
    why: str = ""


def rows() -> dict[str, Row]:
    return msgspec.convert(tomllib.loads((FOLDER / "rows.toml").read_text(encoding="utf-8")), dict[str, Row])


def measurements() -> dict[str, Measured]:
    text = (FOLDER / "measured.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Measured])


def predictions() -> dict[str, Figures]:
    return msgspec.json.decode(PREDICTED.read_bytes(), type=dict[str, Figures])


def answer(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return what a command prints with --json, and what it says on standard error."""
    printed, said = StringIO(), StringIO()
    end = words.index("--")
    with redirect_stdout(printed), redirect_stderr(said):
        run([*words[:end], "--json", *words[end:]])
    return json.loads(printed.getvalue() or "{}"), said.getvalue()


def predicted(row: Row) -> Figures:
    """Run the row's commands and return its figures; {} if a command does not say one."""
    answers = [answer(words) for words in row.commands()]
    reply, said = answers[0]
    figures: dict[str, Figure] = {}
    for name in row.figures if all(reply for reply, _ in answers) else ():
        if name == "cached":
            figures[name] = [reply["rounds"][-1]["hit_tokens"] for reply, _ in answers]
        elif "rounds" in reply:
            figures[name] = reply["engine"]["block_size"]
        else:
            figures[name] = of_doctor(name, reply["model"])
    if len(figures) < len(row.figures):
        print(" ".join(said.split())[-600:], file=sys.stderr)
        return {}
    return figures


def of_doctor(name: str, model: dict[str, Any]) -> Figure:
    """Return a figure of doctor's report on a model."""
    groups = model["groups"]
    states = [group for group in groups if group["kind"] == "state"]
    refusal = model["refusal"] or {"needed_bytes": 0, "longest": 0}
    figures: dict[str, Any] = {
        "block": model["block_tokens"],
        "page_bytes": max(group["page_bytes"] for group in groups),
        "groups": len(groups),
        "group_blocks": sorted({group["block_tokens"] for group in groups}),
        "tokens": model["tokens_fit"],
        "concurrency": round(model["tokens_fit"] / model["max_model_len"], 2),
        "needed_gib": round(refusal["needed_bytes"] / GIB, 2),
        "longest": refusal["longest"],
    }
    if states:
        page, used = states[0]["page_bytes"], states[0]["used_bytes"]
        figures["padding_percent"] = round(100 * (page - used) / used, 2)
    value: Figure = figures[name]
    return value


def outcome(row: Row, figures: Figures, measured: Measured) -> str:
    """Return how a prediction compares: in one word, or as what is missing for one."""
    if row.missing:
        return f"cannot be predicted: {row.missing}"
    if not figures:
        return "not predicted yet"
    return "equal" if figures == measured.figures else "differs"


def outcomes() -> dict[str, str]:
    found, measured = predictions(), measurements()
    return {
        name: outcome(row, found.get(name, {}), measured.get(name, Measured()))
        for name, row in rows().items()
    }


def score() -> tuple[int, int]:
    """Return how many of the predicted measurements are equal in each figure, and how many were predicted."""
    ends = list(outcomes().values())
    return ends.count("equal"), ends.count("equal") + ends.count("differs")


def lines() -> Iterator[str]:
    """Return the lines of reports/evidence/public.md that are made from the three files."""
    found, ends = predictions(), outcomes()
    equal, complete = score()
    waiting = list(ends.values()).count("not predicted yet")
    yield f"**{equal} of {complete} public GPU measurements to the token**, each in all its figures."
    yield f"{len(ends) - complete - waiting} more do not state enough, {waiting} have a command that was not run yet.\n"
    yield "| row | source | vLLM | model, device, set-up | measured | outcome |\n|---|---|---|---|---|---|"
    stand_ins = list(dict.fromkeys(row.stand_in for row in rows().values() if row.stand_in))
    missing: dict[str, list[str]] = {}
    for name, row in rows().items():
        if row.missing:
            missing.setdefault(row.missing, []).append(f"{name} ({row.source})")
            continue
        measured, prediction = measurements().get(name, Measured()), found.get(name, {})
        end = f"**{ends[name]}**: {measured.why}" if measured.why else ends[name]
        setup = f"{row.model}; {row.device}; {row.setup}"
        setup += f" [{stand_ins.index(row.stand_in) + 1}]" if row.stand_in else ""
        figures = "; ".join(_compared(figure, row, measured.figures, prediction) for figure in row.figures)
        yield f"| {' | '.join([name, row.source, row.version, setup, figures, end])} |"
    yield "\nWhat stands in a model's place:\n"
    yield from (f"{number}. {stand_in}" for number, stand_in in enumerate(stand_ins, start=1))
    yield "\nWhat is not stated, so that a row cannot be predicted:\n"
    yield from (f"- {why}: {', '.join(names)}" for why, names in missing.items())


def _compared(figure: str, row: Row, measured: Figures, prediction: Figures) -> str:
    """Return the measured figure, and the predicted one where it differs."""
    lengths = f" of {_text(row.lengths)}" if figure == "cached" and row.lengths else ""
    text = f"{TITLES[figure]}{lengths}: {_text(measured.get(figure))}"
    if figure not in prediction or prediction[figure] == measured.get(figure):
        return text
    return f"{text} (predicted {_text(prediction[figure])})"


def _text(figure: Figure | None) -> str:
    if isinstance(figure, list):
        return ", ".join(f"{number:,}" for number in figure)
    return "" if figure is None else f"{figure:,}"


def keep(name: str, figures: Figures) -> None:
    """Write a prediction into predicted.json, in the order of the rows."""
    found = {**(predictions() if PREDICTED.exists() else {}), name: figures}
    lines = [f' "{key}": {json.dumps(found[key])}' for key in rows() if key in found]
    PREDICTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(names: Sequence[str]) -> int:
    """Predict the named rows, or all that have a command. Exit code 1 if a command says no figure."""
    code = 0
    for name in names or [name for name, row in rows().items() if row.command]:
        figures = predicted(rows()[name])
        if figures:
            keep(name, figures)
        else:
            code = 1
        print(name, json.dumps(figures) if figures else "says none of its figures", flush=True)
    LENDER.end()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
