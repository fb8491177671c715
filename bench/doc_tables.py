"""What documents say that is made from the code: tables of knobs, workloads, columns.

A document holds `<!-- from the code: NAME -->` .. `<!-- end -->`; `make docs` writes what stands between the two, and
tests/test_docs.py holds the committed text to it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import typer

from bench import states
from bench.models import TWINS, held_by
from kvtune.base.legal import Legal
from kvtune.base.units import size
from kvtune.cli.app import build_app
from kvtune.data.file_flags import FLAGS, JSON_FLAGS, Fields
from kvtune.data.knobs import CORE, ENGINE, TIER
from kvtune.data.layout.models import SHAPES
from kvtune.data.run.types import TABLES
from kvtune.plugin.vllm.symbols import PARTS
from kvtune.reading.analysis.stalls.delays import CAUSES
from kvtune.requests.loads.registry import WORKLOADS, Key
from kvtune.requests.text.kinds import KINDS
from kvtune.servers.watch.audit import ROWS
from kvtune.servers.watch.regime import THRESHOLDS
from tests.public import table

ROOT = Path(__file__).parents[1]
REGION = re.compile(r"(<!-- from the code: (\w+) -->\n).*?(<!-- end -->)", re.S)


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command of the app by its full name (`recipe show`), as click has it, without the hidden ones."""
    for name, command in (group or typer.main.get_command(build_app())).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        elif not command.hidden:
            yield " ".join((*path, name)), command


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _folded(text: str) -> str:
    """A paragraph, or an item of a list, in lines of at most 140 characters."""
    indent = "  " if text.startswith("- ") else ""
    return fill(text, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def threshold_table() -> Iterator[str]:
    yield "| threshold | what it decides | why this value | whose figure |\n|---|---|---|---|"
    for each in THRESHOLDS:
        yield f"| {_cell(each.shown)} | {_cell(each.decides)} | {_cell(each.reason)} | {_cell(each.source)} |"


def text_kind_table() -> Iterator[str]:
    kinds = "; ".join(f"`{key}`: {_cell(kind.title)}" for key, kind in KINDS.items())
    yield _folded(f"{kinds}.")


def room_table() -> Iterator[str]:
    """The rooms in the order of imports, with their lines of code in thousands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    yield "| room | lines | what lives there |\n|---|---|---|"
    for name in reversed(project["tool"]["importlinter"]["contracts"][0]["layers"]):
        room = ROOT / name.replace(".", "/")
        about = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
        lines = sum(path.read_bytes().count(b"\n") for path in room.rglob("*.py"))
        yield f"| `kvtune/{room.name}` | {lines / 1000:.0f} k | {_cell(about.splitlines()[0])} |"


def knob_table() -> Iterator[str]:
    for knob in CORE.values():
        default = str(knob.default).lower() if knob.kind == "switch" else knob.default
        unit = f" {knob.unit}" if knob.unit else ""
        yield _folded(f"- `core.{knob.name}` (`{default}`{unit}): {_cell(knob.help)}")


def recorded_table() -> Iterator[str]:
    """Flags by who may give them; kvtune/data/file_flags.py has what each takes."""
    of_recipes = {name.replace("_", "-") for name in ENGINE}
    names: dict[bool, list[str]] = {True: [], False: []}
    for name in sorted(FLAGS):
        names[name in of_recipes].append(f"`--{name}`")
    for name, fields in JSON_FLAGS.items():
        for who, listed in names.items():
            of_flag = [f"`{field}`" for field, in_recipe in _fields_of(fields) if in_recipe == who]
            listed += [f"of `--{name}` {', '.join(of_flag)}"] if of_flag else []
    yield _folded(f"A run file or a recipe: {', '.join(names[True])}.")
    yield "\n" + _folded(f"A run file alone: {', '.join(names[False])}.")


def _fields_of(fields: Fields) -> Iterator[tuple[str, bool]]:
    for name, legal in fields.items():
        if isinstance(legal, Legal):
            yield name, name in TIER
        else:
            yield from _fields_of(legal)


def stall_cause_table() -> Iterator[str]:
    yield from (f"- `{cause}`: {_cell(text)}" for cause, text in CAUSES.items())


def engine_knob_table() -> Iterator[str]:
    for name, knob in ENGINE.items():
        if knob.searched:
            yield _folded(f"- `{name}`: {_cell(knob.help)}")


SHARED = 3
"""A key that as many workloads have stands in one table."""


def workload_table() -> Iterator[str]:
    kinds = list(WORKLOADS.values())
    times = Counter((key.name, key.help) for kind in kinds for key in kind.keys)
    shared = {
        names: None for kind in kinds for key in kind.keys if times[names := (key.name, key.help)] >= SHARED
    }
    yield "Keys that several workloads have:\n"
    choices = {(key.name, key.help): _choices(key) for kind in kinds for key in kind.keys if key.choices}
    yield from (_folded(f"- `{name}`: {_cell(text)}{choices.get((name, text), '')}") for name, text in shared)
    for kind in kinds:
        own = [key for key in kind.keys if (key.name, key.help) not in shared]
        others = [f"`{key.name}={key.default}`" for key in kind.keys if key not in own]
        yield f"\n### {kind.name}\n"
        yield _folded(f"{kind.help[:1].upper()}{kind.help[1:]}. {', '.join(others)}.")
        yield from [""] if own else []
        for key in own:
            yield _folded(f"- `{key.name}={key.default}`: {_cell(key.help)}{_choices(key)}")


def _choices(key: Key) -> str:
    return f" ({', '.join(key.choices)})" if key.choices else ""


def column_table() -> Iterator[str]:
    for name, columns in TABLES.items():
        of_type: dict[str, list[str]] = {}
        for column, kind in columns.items():
            of_type.setdefault(kind, []).append(f"`{column}`")
        listed = "; ".join(f"{kind} {', '.join(names)}" for kind, names in of_type.items())
        yield _folded(f"- `{name}`: {listed}")


def finding_table() -> Iterator[str]:
    yield "| finding | what is seen | an index that is built on it | by vLLM's design |\n|---|---|---|---|"
    for row in ROWS:
        yield f"| `{row.name}` | {_cell(row.title)} | {_cell(row.wrong)} | {_cell(row.design) or 'no'} |"


def version_table() -> Iterator[str]:
    """From what `make versions` wrote down: nothing here is tried out again."""
    yield "| vLLM | parts that load | not loaded | engine, page, compare, export | simulator |\n|---|---|---|---|---|"
    found = json.loads((ROOT / "reports" / "tables" / "versions.json").read_text(encoding="utf-8"))
    for version, works in found.items():
        aside = [name for name in PARTS if name in works["left_out"]]
        loads = [name for name in PARTS if name not in aside and name != "simulator"]
        tried = ("stock", "kvtune", "compare", "export")
        failed = [f"{name}: {works.get(name, 'not tried')}" for name in tried if works.get(name) != "ok"]
        yield (
            f"| {version}{'' if works['known'] else ' (not known)'} | {', '.join(loads) or 'none'} | "
            f"{', '.join(name for name in aside if name != 'simulator') or 'none'} | "
            f"{_cell('; '.join(failed)) or 'yes, stock and core'} | {'no' if 'simulator' in aside else 'yes'} |"
        )


def model_table() -> Iterator[str]:
    """From what `python -m bench.models` wrote down; tests/lab/sim/test_like_device.py replays it."""
    yield "| shape | vLLM | KV specs, layers/block | groups | block in the pool | hit unit | stock | core | held by |"
    yield "|---|---|---|---|---|---|---|---|---|"
    found = json.loads((ROOT / "reports" / "tables" / "models.json").read_text(encoding="utf-8"))
    for name in SHAPES:
        versions: dict[str, list[str]] = {}
        for version, rows in found.items():
            if name in rows:
                versions.setdefault(_model_cells(rows[name]), []).append(version.removesuffix(".0"))
        for cells, same in versions.items():
            yield f"| {name} | {'both' if len(same) == len(found) else ', '.join(same)} | {cells} |"
    twins = (f"{' and '.join(sorted(kinds))}: {twin}" for kinds, twin in TWINS.items())
    yield f"\nThe tiny models of E, by their KV specs: {'; '.join(twins)}."


def _model_cells(row: dict[str, Any]) -> str:
    if "refused" in row:
        return " | ".join([_cell(row["refused"]), *[""] * 6])
    specs = ", ".join(f"{kind} {count}/{block}" for kind, block, count in row["specs"])
    stock, core = ("/".join(map(str, row[side])) for side in ("stock", "core"))
    return (
        f"{specs} | {row['groups']} | {size(row['block_bytes'])} | {row['hit_unit']} | {stock} | "
        f"{core} | {held_by(row)}"
    )


MADE: dict[str, Callable[[], Iterator[str]]] = {
    "rooms": room_table,
    "knobs": knob_table,
    "text_kinds": text_kind_table,
    "recorded": recorded_table,
    "engine_knobs": engine_knob_table,
    "stall_causes": stall_cause_table,
    "thresholds": threshold_table,
    "findings": finding_table,
    "workloads": workload_table,
    "columns": column_table,
    "versions": version_table,
    "models": model_table,
    "public": table.lines,
    "states": states.lines,
}


def rewritten(text: str) -> str:
    """The document with each of its regions made anew."""
    return REGION.sub(lambda m: m[1] + "\n".join(MADE[m[2]]()).strip("\n") + "\n" + m[3], text)


def main() -> None:
    folders = (ROOT / "docs", ROOT / "reports" / "evidence")
    pages = [ROOT / "ARCHITECTURE.md", *(page for folder in folders for page in folder.glob("*.md"))]
    made = {path: rewritten(path.read_text(encoding="utf-8")) for path in pages}
    for path, text in sorted(made.items()):
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"docs: {path.relative_to(ROOT)} follows the code", file=sys.stderr)


if __name__ == "__main__":
    main()
