"""No option is ignored: what a user gives is read by its command, or refused before any work, with the reason.

Which calls read an option is declared beside it (`When`). Here `When` is tested, then walked over each option of each
command, and each option is looked up in the code that takes the query. A new option needs no line here.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
import typer

from bench.doc_tables import commands
from kvtune.base.errors import EXIT_USAGE, UsageError
from kvtune.cli.profile import ProfileQuery
from kvtune.cli.query import VLLM, Facts, Flags, Query, When, declared
from tests.simulator import run as kvtune

RUN = Path(__file__).parents[1] / "golden" / "schema1-real.kvrun"
QUERIES: dict[str, type[Query]] = {name: command.callback.query for name, command in commands()}
CONDITIONAL = [
    pytest.param(query, name, id=f"{command} {field.spelled}")
    for command, query in QUERIES.items()
    for name, field in declared(query).items()
    if field.whens
]


@dataclass(frozen=True, kw_only=True)
class Toy(Query):
    FACTS: ClassVar[Facts] = {"kind": {"run": "a run", "log": "a log"}}

    file: Annotated[str, typer.Option("--file", metavar="FILE")] = ""
    on: Annotated[Literal["sim", "host"], typer.Option("--on")] = "sim"
    needs_file: Annotated[int, typer.Option(), When("how often", file=True)] = 0
    not_file: Annotated[int, typer.Option(), When("how often", file=False)] = 0
    on_host: Annotated[int, typer.Option(), When("how long", on="host")] = 0
    either: Annotated[int, typer.Option(), When("a size", file=True), When("a size", on="host")] = 0
    both: Annotated[int, typer.Option(), When("a size", file=True, on="host")] = 0
    of_log: Annotated[int, typer.Option(), When("a text", kind="log")] = 0
    flags: Annotated[Flags, When("for a file", file=True)] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"needs_file": 1}, "--needs-file is read only with --file FILE: it is how often"),
        ({"needs_file": 1, "file": "x"}, ""),
        ({"not_file": 1, "file": "x"}, "--not-file is not read with --file: it is how often"),
        ({"not_file": 1}, ""),
        ({"on_host": 1}, "--on-host is read only with --on host: it is how long"),
        ({"on_host": 1, "on": "host"}, ""),
        ({"either": 1}, "--either is read only with --file FILE or --on host: it is a size"),
        ({"either": 1, "on": "host"}, ""),
        ({"both": 1, "on": "host"}, "--both is read only with --file FILE: it is a size"),
        ({"both": 1, "on": "host", "file": "x"}, ""),
        ({"flags": ("--block-size", "16")}, f"{VLLM} is read only with --file FILE: it is for a file"),
        ({"of_log": 1}, ""),  # what it depends on is not known yet
    ],
)
def test_an_option_is_refused_where_none_of_its_conditions_holds(
    values: dict[str, Any], message: str
) -> None:
    query = Toy(given=frozenset(values), **values)
    if not message:
        query.refuse()
        return
    with pytest.raises(UsageError) as refused:
        query.refuse()
    assert refused.value.message == message and "leave " in refused.value.hint


def test_a_fact_is_asked_when_the_command_knows_it() -> None:
    Toy(of_log=1).refuse(kind="log")
    with pytest.raises(UsageError, match="--of-log is read only with a log: it is a text"):
        Toy(of_log=1).refuse(kind="run")


def values_of(query: type[Query], name: str, need: Any) -> list[Any]:
    """Values of a field, or of a fact, with which a need holds and fails."""
    if name in query.FACTS:
        return [*query.FACTS[name], "none of these"]
    field = declared(query)[name]
    default = None if field.default is MISSING else field.default
    if isinstance(need, bool):
        return [default, True if field.type is bool else "x"]
    words = (need,) if isinstance(need, str) else need
    return [words[0], "none of these" if default in words else default]


@pytest.mark.parametrize(("query", "name"), CONDITIONAL)
def test_each_condition_of_each_command_can_hold_and_can_fail(query: type[Query], name: str) -> None:
    fields = declared(query)
    needs = {need: value for when in fields[name].whens for need, value in when.needs.items()}
    assert set(needs) <= {*fields, *query.FACTS}, "a condition names an option or a fact of its command"
    required = {each: "x" for each, field in fields.items() if field.default is MISSING}
    outcomes = set()
    for values in product(*(values_of(query, need, value) for need, value in needs.items())):
        made = dict(zip(needs, values, strict=True))
        facts = {need: made.pop(need) for need in list(made) if need not in fields}
        try:
            query(given=frozenset({name}), **{**required, **made}).refuse(**facts)
            outcomes.add("read")
        except UsageError as refused:
            assert fields[name].spelled in refused.message and refused.hint
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def attributes(query: type[Query]) -> set[str]:
    """What a query's module, and the modules of kvtune/cli that it imports from, read of anything."""
    classes = (each for each in query.__mro__ if issubclass(each, Query) and each is not Query)
    own = {Path(inspect.getfile(each)) for each in classes}
    imported = {
        match for path in own for match in re.findall(r"from kvtune\.cli\.(\w+) import", path.read_text())
    }
    paths = own | {path.with_name(f"{name}.py") for path in own for name in imported - {"query", "options"}}
    return {name for path in paths if path.exists() for name in attributes_in(path)}


@cache
def attributes_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("command", QUERIES)
def test_each_option_is_read_by_the_code_of_its_command(command: str) -> None:
    assert set(declared(QUERIES[command])) - attributes(QUERIES[command]) == set()


IDLE = {
    "watch http://127.0.0.1:9 --board": "URL",
    "profile m --anyway": "--anyway",
    "sweep m -w rounds --trace x": "--trace",
    "sweep m --on both --like-device h100": "--like-device",
    "tune m --trials 3 --objective ceiling": "--trials",
    "tune m --rounds 3 --study sqlite:///x.db --join": "--rounds",
    "tune m --join --study x.jsonl": "--join",
    "tune m --gc --core stock": "--gc",
    "explain-log x,tokenizer=bytes --text-only": "--text-only",
    "explain-log x --text-only --bounds-only": "--bounds-only",
    "doctor -- --block-size 16": VLLM,
    "compare a b -- --block-size 16": "compare takes nothing after --",
}
"""Calls whose refusal needs more than the options' own conditions, and one of each kind of refusal."""


@pytest.mark.parametrize("line", IDLE)
def test_an_idle_option_is_named_with_the_reason_and_what_to_do(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtune(line.split()) == EXIT_USAGE
    what, what_to_do = capsys.readouterr().err.splitlines()
    assert what.startswith(f"kvtune: {IDLE[line]}") or f"kvtune {IDLE[line]}" in what
    assert " only with " in what or " not read with " in what or " is for " in what or "takes nothing" in what
    assert what_to_do.startswith("  next: ")


def test_a_query_made_by_hand_refuses_the_fields_that_differ_from_their_defaults() -> None:
    ProfileQuery(model="m").refuse()
    ProfileQuery(model="m", on="host", step_us=0.0).refuse()
    with pytest.raises(UsageError, match="--step-us is read only with --on host"):
        ProfileQuery(model="m", step_us=5.0).refuse()
