"""`kvtune schema COMMAND`: the JSON Schema of a command's `--json`. Fields may be added; required ones stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtune.cli.query import Query
from kvtune.errors import UsageError, did_you_mean
from kvtune.terminal import print_json

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"

TEXT: Schema = {"type": "string"}
YES: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer"}
NUMBER: Schema = {"type": ["number", "null"]}
ANY: Schema = {}
TEXTS: Schema = {"type": "array", "items": TEXT}


def _object(required: Schema, **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _map(of: Schema) -> Schema:
    return {"type": "object", "additionalProperties": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _with(schema: Schema, *required: str) -> Schema:
    return {"allOf": [schema, {"type": "object", "required": list(required)}]}


def _struct(struct: type[Any], *optional: str) -> Schema:
    """Return the schema of an answer's struct. Its `--json` has each field that is not `optional`, defaults too."""
    import msgspec

    (schema,), defined = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    return {
        **_with(schema, *(name for name in struct.__struct_encode_fields__ if name not in optional)),
        "$defs": defined,
    }


def _any_of(*structs: type[Any]) -> Schema:
    """Return the schema of a command with more than one answer."""
    made = [_struct(struct) for struct in structs]
    defined = {name: schema for each in made for name, schema in each.pop("$defs").items()}
    return {"anyOf": made, "$defs": defined}


SPREAD = _object({"mean": NUMBER, "p50": NUMBER, "p99": NUMBER, "max": NUMBER, "count": COUNT})
TOKENS = _map(COUNT)
CACHE = _object({"query_tokens": COUNT, "hit_tokens": COUNT, "hit_rate": NUMBER, "misses": TOKENS})
SETTINGS = _map({"type": ["string", "number", "boolean", "null", "object", "array"]})
SUMMARY = _object(
    {
        "schema": COUNT,
        "source": {"enum": ["engine", "host", "sim", "server"]},
        "state": TEXT,
        "model": TEXT,
        "workload": _object(
            {"name": TEXT, "spec": TEXT, "params": SETTINGS, "hash": TEXT, "requests": COUNT}
        ),
        "core": _object({"name": TEXT, "settings": SETTINGS, "active": YES, "parts": ANY}),
        "seed": COUNT,
        "engine": _object(
            {
                "vllm": TEXT,
                "device": TEXT,
                "block_size": COUNT,
                "num_blocks": COUNT,
                "settings": SETTINGS,
                "args": TEXTS,
            }
        ),
        "python": TEXT,
        "host": _object({"cpu": TEXT, "cores": COUNT}),
        "requests": COUNT,
        "finished": COUNT,
        "prompt_tokens": COUNT,
        "output_tokens": COUNT,
        "wall_s": NUMBER,
        "throughput_tok_s": NUMBER,
        "ttft_ms": SPREAD,
        "itl_ms": SPREAD,
        "e2e_ms": SPREAD,
        "preemptions": COUNT,
        "rounds": _list(
            _object({"round": COUNT, "hit_tokens": COUNT, "query_tokens": COUNT, "ttft_ms_mean": NUMBER})
        ),
        "prefix_cache": CACHE,
        "gc": _map(ANY),
        "host_us": _object({"schedule": ANY, "update": ANY, "per_request_step": ANY}),
        "memory": _map(NUMBER),
        "valid": _object({"timings": YES, "why": TEXT}),
        "notes": TEXTS,
        "verdict": ANY,
    }
)
"""One run."""
FILES = {"run_file": TEXT, "page": TEXT}
VERIFIED = _object(
    {"recipe": TEXT, "holds": YES, "text": TEXT},
    sessions=_object({"holds": YES, "text": TEXT, "up_to": COUNT, "keep": NUMBER, "replays": _map(ANY)}),
)


def schemas() -> dict[str, Schema]:
    """Return each command's schema, by the command's name."""
    import msgspec

    from kvtune.analysis.study import StudyResult
    from kvtune.bounds.ladder import Bounds
    from kvtune.bounds.loads import LoadFacts
    from kvtune.capacity.result import Capacity
    from kvtune.diff.result import Diff
    from kvtune.doctor.diagnosis import Diagnosis
    from kvtune.explain.explanation import Explanation
    from kvtune.explain.log import TextAnswer
    from kvtune.recipe import Recipe
    from kvtune.report.comparison import Compared
    from kvtune.report.runs import Runs
    from kvtune.run.extras import ServerAccount
    from kvtune.tap.lines import Line
    from kvtune.tune.recipes.verify import Listing
    from kvtune.watch.prometheus import Hour
    from kvtune.watch.watching import Snapshot

    (snapshot, hour, recipe), defined = msgspec.json.schema_components(
        (Snapshot, Hour, Recipe), ref_template="#/$defs/{name}"
    )
    study = _struct(StudyResult)
    study["allOf"].append({"type": "object", "required": ["schema", "study", "page"]})
    trial = study["$defs"]["Trial"]
    del trial["properties"]["summary"]  # its fields stand beside the trial's
    trial["required"] = sorted(trial["properties"])
    return {
        "watch": {
            "anyOf": [_with(snapshot, "url", "at"), _with(hour, "prometheus", "instances")],
            "$defs": defined,
        },
        "tap": _struct(Line, "part"),
        "profile": _object({**SUMMARY["properties"], **FILES}),
        "sweep": study,
        "tune": study,
        "bounds": _struct(Bounds),
        "trace": _struct(LoadFacts),
        "capacity": _struct(Capacity),
        "explain": _any_of(Explanation, ServerAccount),
        "explain-log": _any_of(Explanation, TextAnswer),
        "doctor": _struct(Diagnosis),
        "compare": _struct(Compared),
        "diff": _struct(Diff),
        "runs": _struct(Runs),
        "recipe list": _struct(Listing),
        "recipe show": {**_with(recipe, "recipe", "engine", "core", "evidence"), "$defs": defined},
        "recipe verify": VERIFIED,
    }


def schema_of(command: str) -> Schema:
    known = schemas()
    if command not in known:
        mean = did_you_mean(command, known)
        raise UsageError(f"{command} has no --json", f"{mean}commands with --json: {', '.join(known)}")
    return {"$schema": DIALECT, "title": f"kvtune {command} --json", **known[command]}


@dataclass(frozen=True, kw_only=True)
class SchemaQuery(Query):
    command: Annotated[
        list[str],
        typer.Argument(
            help="A command with --json, such as `profile` or `recipe list`.", metavar="COMMAND.."
        ),
    ]


def schema(query: SchemaQuery) -> int:
    """Print the JSON Schema of a command's `--json`."""
    print_json(schema_of(" ".join(query.command)), indent=2)
    return 0
