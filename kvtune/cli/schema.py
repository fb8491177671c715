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


def _about(schema: Schema, text: str) -> Schema:
    return {**schema, "description": text}


def _with(schema: Schema, *required: str) -> Schema:
    return {"allOf": [schema, {"type": "object", "required": list(required)}]}


def _struct(struct: type[Any]) -> Schema:
    """Return the schema of an answer's struct. Its `--json` has each field, also where the struct has a default."""
    import msgspec

    (schema,), defined = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    return {**_with(schema, *struct.__struct_encode_fields__), "$defs": defined}


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
TRIAL = _object(
    {"settings": SETTINGS, "state": TEXT, "on": TEXT, "core": TEXT, "role": TEXT, "number": COUNT}
)
STUDY = _object(
    {
        "schema": COUNT,
        "kind": {"enum": ["sweep", "tune", "verify"]},
        "objective": TEXT,
        "objectives": TEXTS,
        "trials": _list(TRIAL),
        "best": _or_null(TRIAL),
        "baseline": _or_null(TRIAL),
        "finalists": _list(ANY),
        "verdict": ANY,
        "recipe": _or_null(TEXT),
        "notes": TEXTS,
        "study": TEXT,
        "page": TEXT,
    }
)
EXPLAINED = _object(
    {"schema": COUNT},
    prefix_cache=CACHE,
    by_class=_map(TOKENS),
    by_group=_map(TOKENS),
    remedies=_list(_object({"change": TEXT, "needs": TEXT})),
)
FINDING = _object(
    {"level": {"enum": ["ok", "note", "warning", "error"]}, "topic": TEXT, "text": TEXT, "hint": TEXT}
)
DOCTOR = _object(
    {
        "schema": COUNT,
        "errors": COUNT,
        "warnings": COUNT,
        "environment": _list(FINDING),
        "settings": _list(FINDING),
        "model": _or_null(_object({"source": TEXT, "model": TEXT, "block_tokens": COUNT})),
    }
)
COMPARED = _object(
    {
        "schema": COUNT,
        "comparable": YES,
        "runs": _list(_object({"name": TEXT, **SUMMARY["properties"]})),
        "comparisons": _list(_object({"name": TEXT, "mismatches": _list(ANY), "figures": _list(ANY)})),
        "failed": TEXTS,
        "repeat_command": TEXT,
        "servers": _or_null(
            _object({"traffic": _list(ANY), "server": _list(ANY), "classes": _list(ANY), "pairs": _list(ANY)})
        ),
    }
)
EDIT = _object(
    {
        "kind": _about(TEXT, "What was changed, such as a time or the order of tools."),
        "place": _about(TEXT, "Where in the body, such as system[0]."),
        "role": _about(TEXT, "The role of that message."),
        "line": _about(COUNT, "Line of the text there, from 1."),
        "mend": _about(TEXT, "What helps against this kind."),
    },
    label=_about(TEXT, "With --with-text: the beginning of its line."),
    old=_about(TEXT, "With --with-text: the earlier request's text."),
    new=_about(TEXT, "With --with-text: this request's text."),
)
DIFFERS = _object(
    {
        "from": _about(COUNT, "Number of the earlier request that it is compared with."),
        "token": _about(COUNT, "The first token that differs."),
        "tokens_after": _about(_or_null(COUNT), "Tokens after it that both have; null: not counted."),
        "edits": _about(
            _list(EDIT), "Where and how the texts differ; empty: the server renders them differently."
        ),
    }
)
TAPPED = _object(
    {
        "number": _about(COUNT, "Counts the requests of this tap, from 1."),
        "name": _about(TEXT, "Its name in the log."),
        "client": _about(TEXT, "The client's name, of its user agent."),
        "api": _about(TEXT, "The API's path."),
        "session": _about(TEXT, "Requests whose messages grow one from another have the same."),
        "session_id": _about(TEXT, "The session id that the server saw; of a long one its hash."),
        "t0": _about(NUMBER, "When its head came, in seconds since 1970."),
        "t1": _about(NUMBER, "When its answer ended."),
        "first_token": _about(NUMBER, "When a stream's first byte came; null: no stream, or none came."),
        "status": _about(COUNT, "The answer's HTTP status; 0: none came."),
        "ended": _about(
            {"enum": ["whole", "client", "server", "tap", "unread"]},
            "How the answer ended: whole, or who ended it first; unread: it is no readable HTTP/1.1.",
        ),
        "error": _about(TEXT, "The server's words about an error, without secrets."),
        "prompt_tokens": _about(
            _or_null(COUNT), "Tokens of the prompt, as the server counts them; null: not known."
        ),
        "output_tokens": _about(_or_null(COUNT), "Tokens of the answer; null: not reported."),
        "hit_tokens": _about(_or_null(COUNT), "Prompt tokens that were cached; null: not known."),
        "hit_by": _about(
            _or_null({"enum": ["usage", "events"]}), "Who counted the hit: the answer, or KV events."
        ),
        "misses": _about(TOKENS, "Prompt tokens that were computed, by their cause; empty: not known."),
        "differs": _about(_or_null(DIFFERS), "Where it differs from an earlier request; null: from none."),
        "logged": _about(YES, "Whether it is in the log."),
        "not_logged": _about(TEXT, "Why its token ids are not known, or the log does not have it."),
        "not_analysed": _about(TEXT, "Why it was not analysed, or not whole."),
    },
    part=_about(COUNT, "Of a request with several prompts, which one it is, from 1."),
)
"""One line: a request."""
LISTED = _object({"name": TEXT, "file": TEXT, "state": TEXT}, model=TEXT, device=TEXT)
FILES = {"run_file": TEXT, "page": TEXT}
VERIFIED = _object(
    {"recipe": TEXT, "holds": YES, "text": TEXT},
    sessions=_object({"holds": YES, "text": TEXT, "up_to": COUNT, "keep": NUMBER, "replays": _map(ANY)}),
)


def schemas() -> dict[str, Schema]:
    """Return each command's schema, by the command's name."""
    import msgspec

    from kvtune.bounds.ladder import Bounds
    from kvtune.bounds.loads import LoadFacts
    from kvtune.capacity.result import Capacity
    from kvtune.diff.result import Diff
    from kvtune.recipe import Recipe
    from kvtune.report.console.runs import ListedRun
    from kvtune.run.extras import ServerAccount, TextAccount
    from kvtune.watch.watching import Snapshot

    (snapshot, run, recipe, server, texts), defined = msgspec.json.schema_components(
        (Snapshot, ListedRun, Recipe, ServerAccount, TextAccount), ref_template="#/$defs/{name}"
    )
    explained = {**EXPLAINED, "properties": {**EXPLAINED["properties"], "texts": texts}}
    return {
        "watch": {**_with(snapshot, "url", "at"), "$defs": defined},
        "tap": TAPPED,
        "profile": _object({**SUMMARY["properties"], **FILES}),
        "sweep": STUDY,
        "tune": STUDY,
        "bounds": _struct(Bounds),
        "trace": _struct(LoadFacts),
        "capacity": _struct(Capacity),
        "explain": {"anyOf": [explained, _with(server, "query_tokens", "hit_tokens")], "$defs": defined},
        "explain-log": {**explained, "$defs": defined},
        "doctor": DOCTOR,
        "compare": COMPARED,
        "diff": _struct(Diff),
        "runs": {**_object({"schema": COUNT, "runs": _list(run)}), "$defs": defined},
        "recipe list": _object({"recipes": _list(LISTED)}),
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
