"""`kvtune schema COMMAND`: the JSON Schema of a command's `--json`. Fields may be added; required ones stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.cli.query import Query, argument
from kvtune.data.show.terminal import print_json

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _with(schema: Schema, *required: str) -> Schema:
    return {"allOf": [schema, {"type": "object", "required": list(required)}]}


def _struct(struct: type[Any], *optional: str, also: Sequence[str] = ()) -> Schema:
    """Return the schema of an answer's struct. Its `--json` has each field but those `optional`, and `also` these."""
    import msgspec

    (schema,), defined = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    fields = (name for name in struct.__struct_encode_fields__ if name not in optional)
    return {**_with(schema, *fields, *also), "$defs": defined}


def _any_of(*structs: type[Any]) -> Schema:
    """Return the schema of a command with more than one answer."""
    made = [_struct(struct) for struct in structs]
    defined = {name: schema for each in made for name, schema in each.pop("$defs").items()}
    return {"anyOf": made, "$defs": defined}


def schemas() -> dict[str, Schema]:
    """Return each command's schema, by the command's name."""
    import msgspec

    from kvtune.answers.capacity.result import Capacity
    from kvtune.answers.check.result import Check
    from kvtune.answers.diff.result import Diff
    from kvtune.answers.doctor.diagnosis import Diagnosis
    from kvtune.answers.explain.explanation import Explanation
    from kvtune.answers.explain.log import TextAnswer
    from kvtune.answers.states.table import States
    from kvtune.answers.tune.recipes.verify import Listing, Verified
    from kvtune.answers.tune.result import StudyResult
    from kvtune.data.recipe import Recipe
    from kvtune.data.run.extras import ServerAccount
    from kvtune.reading.analysis.summary import RunSummary
    from kvtune.reading.bounds.ladder import Bounds
    from kvtune.reading.report.comparison import Compared
    from kvtune.reading.report.runs import Runs
    from kvtune.servers.tap.lines import Line
    from kvtune.servers.watch.audit import Audited
    from kvtune.servers.watch.prometheus import Hour
    from kvtune.servers.watch.servers import FleetSnapshot
    from kvtune.servers.watch.snapshot import Snapshot

    (snapshot, fleet, hour, audited, recipe), defined = msgspec.json.schema_components(
        (Snapshot, FleetSnapshot, Hour, Audited, Recipe), ref_template="#/$defs/{name}"
    )
    states = _struct(States)
    study = _struct(StudyResult, also=("schema", "study", "page"))
    trial = study["$defs"]["Trial"]
    del trial["properties"]["summary"]  # its fields stand beside the trial's
    trial["required"] = sorted(trial["properties"])
    return {
        "watch": {
            "anyOf": [
                _with(snapshot, "url", "periods"),
                _with(fleet, "fleet", "servers"),
                _with(hour, "prometheus", "instances"),
                _with(audited, "url", "findings"),
            ],
            "$defs": defined,
        },
        "tap": _struct(Line, "part"),
        "profile": _struct(RunSummary, also=("run_file", "page")),
        "sweep": {"anyOf": [study, states], "$defs": {**study["$defs"], **states.pop("$defs")}},
        "tune": study,
        "bounds": _struct(Bounds),
        "capacity": _struct(Capacity),
        "explain": _any_of(Explanation, ServerAccount),
        "explain-log": _any_of(Explanation, TextAnswer),
        "doctor": _struct(Diagnosis),
        "compare": _struct(Compared),
        "diff": _struct(Diff),
        "check": _struct(Check),
        "runs": _struct(Runs),
        "recipe list": _struct(Listing),
        "recipe show": {**_with(recipe, "recipe", "engine", "core", "evidence"), "$defs": defined},
        "recipe verify": _struct(Verified),
    }


def schema_of(command: str) -> Schema:
    by_command = schemas()
    if command not in by_command:
        mean = did_you_mean(command, by_command)
        raise UsageError(f"{command} has no --json", f"{mean}commands with --json: {', '.join(by_command)}")
    return {"$schema": DIALECT, "title": f"kvtune {command} --json", **by_command[command]}


@dataclass(frozen=True, kw_only=True)
class SchemaQuery(Query):
    command: list[str] = argument(MISSING, "COMMAND..")("""A command with --json, such as `profile` or `recipe
        list`.""")


def schema(query: SchemaQuery) -> int:
    """Print the JSON Schema of a command's `--json`."""
    print_json(schema_of(" ".join(query.command)), indent=2)
    return 0
