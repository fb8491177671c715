"""What the next change costs: lines of a room, words of a page, files that name a knob, a cause, a device, a figure.

The limits are what the code has. They may fall, and are then lowered here; a change that raises one has listed again
what a table has. tests/data/test_knobs.py and tests/data/test_causes.py add a knob and a cause to a copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from kvtune.data.causes import CAUSES
from kvtune.data.knobs import CORE, ENGINE
from kvtune.reading.analysis.figures import FIGURES
from tests.copies import ROOT, after, copied, python

WORDS = {
    "pool",
    "rows",
    "strict",
    "policy",
    "front_end",
    "packed",
    "steady",
    "windows",
    "block_size",
    "max_model_len",
}
"""Knobs whose names are words that the code has for other things, too."""
LIMITS = {"device": 7.0, "knob": 6.2, "cause": 3.8, "figure": 1.5}
"""The mean number of files of kvtune/ that name one."""
POOL = '''"""`kvtune pool`: the blocks of a run's pool."""

from dataclasses import dataclass

import msgspec

from kvtune.cli import options
from kvtune.cli.query import Query


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    blocks: int


@dataclass(frozen=True, kw_only=True)
class PoolQuery(Query):
    run: options.RunFile
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None


def pool(query: PoolQuery) -> int:
    """Say how many blocks a run's pool has."""
    from kvtune.cli.views.answer import print_answer
    from kvtune.data.run.file import read_run
    from kvtune.data.show.parts import Document, Section, grid

    header = read_run(query.run).header
    answer = Pool(model=header.model, blocks=header.engine.num_blocks)
    table = grid(("model", "blocks"), [(answer.model, answer.blocks)])
    shown = Document(
        name="kvtune pool",
        subject=answer.model,
        headline=f"{answer.blocks:,} blocks",
        sections=(Section("pool", "The pool", tables=(table,)),),
        identity=f"pool {answer.model}",
    )
    print_answer(answer, shown, json=query.json, md=query.md, page=query.page)
    return 0
'''
MOST_LINES = 50


BUDGET = {
    "kvtune/answers": 11_531,
    "kvtune/base": 1_761,
    "kvtune/cli": 4_052,
    "kvtune/data": 6_232,
    "kvtune/lab": 11_267,
    "kvtune/plugin": 9_522,
    "kvtune/reading": 9_766,
    "kvtune/requests": 6_993,
    "kvtune/servers": 10_470,
    "tests": 58_593,
    "bench": 6_713,
    "docs/capacity.md": 930,
    "docs/check.md": 0,
    "docs/commands.md": 603,
    "docs/core.md": 1_633,
    "docs/diff.md": 517,
    "docs/doctor.md": 549,
    "docs/internals.md": 1_464,
    "docs/logs.md": 1_489,
    "docs/run-file.md": 820,
    "docs/security.md": 762,
    "docs/simulator.md": 1_231,
    "docs/tap.md": 1_053,
    "docs/times.md": 729,
    "docs/trust.md": 401,
    "docs/tuning.md": 993,
    "docs/tutorial.md": 823,
    "docs/vllm.md": 638,
    "docs/watch.md": 1_983,
    "docs/workloads.md": 1_678,
}
"""The most lines of *.py in a room, in tests/ and bench/, and words of a page. Lowered when one falls by SLACK."""
FEATURES: tuple[tuple[str, str, int], ...] = (
    ("check: whether a hit answers as a recomputation", "kvtune/answers", 468),
    ("check: whether a hit answers as a recomputation", "kvtune/cli", 53),
    ("check: whether a hit answers as a recomputation", "tests", 712),
    ("check: whether a hit answers as a recomputation", "docs/check.md", 450),
    ("check: whether a hit answers as a recomputation", "docs/commands.md", 11),
    ("check: its paths", "kvtune/answers", 105),
    ("check: the prompts of an earlier one", "kvtune/answers", 40),
    ("check: the prompts of an earlier one", "kvtune/cli", 7),
    ("check: the prompts of an earlier one", "tests", 31),
    ("check: the prompts of an earlier one", "docs/check.md", 60),
    ("check: a wrong hit is asked for again, and compared", "kvtune/base", 6),
    ("check: a wrong hit is asked for again, and compared", "tests", 90),
    ("check: a wrong hit is asked for again, and compared", "docs/check.md", 70),
    ("check: proved on each layout, with faults and each part of the core", "tests", 155),
    ("check: proved on each layout, with faults and each part of the core", "bench", 106),
    ("check: proved on each layout, with faults and each part of the core", "docs/core.md", 7),
    ("check: prompts of several chunks, minutes, the flag; published answers", "kvtune/answers", 20),
    ("check: prompts of several chunks, minutes, the flag; published answers", "kvtune/cli", 2),
    ("check: prompts of several chunks, minutes, the flag; published answers", "tests", 26),
    ("check: prompts of several chunks, minutes, the flag; published answers", "bench", 88),
    ("hits of hybrids on a CPU are right, or doctor says why not", "kvtune/plugin", 18),
    ("hits of hybrids on a CPU are right, or doctor says why not", "kvtune/answers", 14),
    ("hits of hybrids on a CPU are right, or doctor says why not", "tests", 64),
    ("tune: a winner is served once, and its hits are checked", "kvtune/answers", 72),
    ("tune: a winner is served once, and its hits are checked", "kvtune/lab", 81),
    ("tune: a winner is served once, and its hits are checked", "tests", 135),
    ("tune: a winner is served once, and its hits are checked", "docs/tuning.md", 8),
    ("the shape of a model at hand, read by two rooms", "kvtune/data", 11),
    ("watch: the share of draft tokens that is accepted", "kvtune/servers", 45),
    ("watch: the share of draft tokens that is accepted", "tests", 95),
    ("watch: the share of draft tokens that is accepted", "docs/watch.md", 37),
    ("a pasted launch line is read", "kvtune/answers", 378),
    ("a pasted launch line is read", "kvtune/base", 152),
    ("keys are searched for in the few texts that may have them", "kvtune/base", 8),
    ("a pasted launch line is read", "kvtune/data", 49),
    ("a pasted launch line is read", "kvtune/cli", 3),
    ("a pasted launch line is read", "tests", 435),
    ("a pasted launch line is read", "docs/doctor.md", 130),
    ("a pasted launch line is read", "docs/vllm.md", 8),
    ("a pasted launch line is read", "docs/core.md", 10),
    ("where a launch line's bytes go, and what never runs", "kvtune/answers", 259),
    ("where a launch line's bytes go, and what never runs", "kvtune/lab", 34),
    ("a boot log beside what was predicted", "kvtune/answers", 124),
    ("a replay that a command made before is read", "kvtune/lab", 150),
    ("a replay that a command made before is read", "kvtune/base", 8),
    ("a replay that a command made before is read", "tests", 221),
    ("a replay that a command made before is read", "bench", 3),
    ("a replay that a command made before is read", "docs/simulator.md", 44),
    ("a replay that a command made before is read", "docs/internals.md", 19),
    ("a replay that a command made before is read", "docs/security.md", 3),
    ("a replay that a command made before is read", "docs/capacity.md", 1),
    ("work from outside has a budget", "kvtune/servers", 201),
    ("work from outside has a budget", "kvtune/base", 62),
    ("work from outside has a budget", "kvtune/answers", 18),
    ("work from outside has a budget", "kvtune/cli", 17),
    ("work from outside has a budget", "tests", 520),
    ("what came of a tier", "kvtune/servers", 150),
    ("what came of a tier", "tests", 345),
    ("what came of a tier", "docs/watch.md", 80),
    ("a sentence has data", "kvtune/servers", 94),
    ("what a tier is worth", "kvtune/answers", 45),
    ("what a tier is worth", "kvtune/lab", 128),
    ("what a tier is worth", "tests", 244),
    ("what a tier is worth", "bench", 66),
    ("what a tier is worth", "docs/tuning.md", 25),
    ("a sentence has data", "kvtune/answers", 47),
    ("a sentence has data", "kvtune/cli", 66),
    ("a sentence has data", "kvtune/reading", 29),
    ("a sentence has data", "kvtune/data", 16),
    ("a sentence has data", "kvtune/base", 5),
    ("a sentence has data", "tests", 392),
    ("a sentence has data", "docs/watch.md", 62),
    ("a sentence has data", "docs/diff.md", 18),
    ("a sentence has data", "docs/tap.md", 15),
    ("a sentence has data", "docs/tuning.md", 16),
    ("a tier of host memory before it is bought", "kvtune/answers", 271),
    ("a tier of host memory before it is bought", "kvtune/cli", 6),
    ("a tier of host memory before it is bought", "tests", 350),
    ("a tier of host memory before it is bought", "docs/doctor.md", 78),
)
"""What came since: the feature's name, its room or page, the lines or words that it adds there; in its own commit."""
FEATURE, OF_TESTS = 600, 800
"""The most lines, in all rooms and in tests/, of one feature."""
SLACK = 200


def counted() -> dict[str, int]:
    """The lines of each room, of tests/ and bench/, and the words of each page of docs/."""
    folders = [path for path in (ROOT / "kvtune").iterdir() if (path / "__init__.py").exists()]
    folders += [ROOT / "tests", ROOT / "bench"]
    lines = {
        folder.relative_to(ROOT).as_posix(): sum(
            file.read_bytes().count(b"\n") for file in folder.rglob("*.py")
        )
        for folder in folders
    }
    return lines | {
        f"docs/{page.name}": len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")
    }


def complaints(
    counts: Mapping[str, int], budget: Mapping[str, int], features: Sequence[tuple[str, str, int]]
) -> list[str]:
    """What of these counts the budget and the features do not allow."""
    said = [f"{room} has no budget" for room in counts.keys() ^ budget.keys()]
    for room in counts.keys() & budget.keys():
        most = budget[room] + sum(lines for _, place, lines in features if place == room)
        if counts[room] > most:
            said.append(f"{room} has {counts[room]:,}, and {most:,} are allowed: delete, or name the feature")
        elif counts[room] < most - SLACK:
            said.append(f"{room} has {counts[room]:,}: lower its budget of {most:,}")
    for name in {name for name, _, _ in features}:
        own = [
            (lines, place == "tests")
            for feature, place, lines in features
            if feature == name and not place.startswith("docs/")
        ]
        if sum(lines for lines, test in own if not test) > FEATURE:
            said.append(f"{name} takes more than {FEATURE} lines")
        if sum(lines for lines, test in own if test) > OF_TESTS:
            said.append(f"{name} takes more than {OF_TESTS} lines of tests")
    return said


@pytest.mark.lint
def test_rooms_tests_and_documents_keep_their_budget() -> None:
    assert complaints(counted(), BUDGET, FEATURES) == []


@pytest.mark.lint
@pytest.mark.parametrize(
    ("lines", "features", "says"),
    [
        (1001, [], "1,000 are allowed"),
        (700, [], "lower its budget"),
        (1601, [("a", "room", 601)], "a takes more than 600 lines"),
        (1400, [("a", "room", 400), ("a", "tests", 801)], "800 lines of tests"),
    ],
)
def test_a_rise_without_a_name_is_found(lines: int, features: list[tuple[str, str, int]], says: str) -> None:
    assert says in " ".join(complaints({"room": lines, "tests": 10}, {"room": 1000, "tests": 10}, features))


@pytest.mark.lint
def test_a_rise_with_a_name_is_allowed() -> None:
    features = [("a", "room", 600), ("a", "docs/a.md", 900)]
    counts = {"room": 1600, "docs/a.md": 1900}
    assert complaints(counts, dict.fromkeys(counts, 1000), features) == []


@cache
def sources() -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8") for path in (ROOT / "kvtune").rglob("*.py"))


def named(patterns: Iterable[str]) -> list[int]:
    """In how many files each pattern stands."""
    return [sum(bool(re.search(pattern, text)) for text in sources()) for pattern in patterns]


PATTERNS = {
    "device": [r"\blike_device\b"],
    "knob": [rf"\b{name}\b" for name in {*CORE, *ENGINE} - WORDS],
    "cause": [rf"[\"']{key}[\"']" for key in CAUSES],
    "figure": [re.escape(f'"{path}"') for path in FIGURES],
}


@pytest.mark.lint
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_change_touches_no_more_files_than_the_last_one(kind: str) -> None:
    files = named(PATTERNS[kind])
    price = sum(files) / len(files)
    assert 0 < price <= LIMITS[kind], sorted(zip(files, PATTERNS[kind], strict=True))[-5:]


@pytest.mark.lint
def test_a_new_command_with_json_page_and_markdown_is_fifty_lines(tmp_path: Path) -> None:
    """In a copy of kvtune: the command, its name, and its struct in the table of schemas."""
    package = copied(tmp_path)
    run = next((ROOT / "tests" / "golden").glob("*.kvrun"))
    (package / "cli" / "pool.py").write_text(POOL, encoding="utf-8")
    lines = POOL.count("\n")
    lines += after(package / "cli" / "app.py", "COMMANDS = (\n", '    "pool",\n')
    schemas = package / "cli" / "schema.py"
    lines += after(
        schemas,
        "    from kvtune.reading.bounds.ladder import Bounds\n",
        "    from kvtune.cli.pool import Pool\n",
    )
    lines += after(schemas, '        "bounds": _struct(Bounds),\n', '        "pool": _struct(Pool),\n')
    assert lines <= MOST_LINES
    answer = json.loads(python(tmp_path, "-m", "kvtune", "pool", str(run), "--json"))
    schema = json.loads(python(tmp_path, "-m", "kvtune", "schema", "pool"))
    Draft202012Validator(schema).validate(answer)
    assert set(schema["allOf"][1]["required"]) == {"model", "blocks"} and answer["blocks"] > 0
    blocks = f"{answer['blocks']:,} blocks"
    assert blocks in python(tmp_path, "-m", "kvtune", "pool", str(run))
    markdown = python(tmp_path, "-m", "kvtune", "pool", str(run), "--md", "--page", "pool.html")
    assert blocks in markdown and "| model | blocks |" in markdown
    page = (tmp_path / "pool.html").read_text(encoding="utf-8")
    assert "The pool</h2>" in page and f"{answer['blocks']:,}" in page


@pytest.mark.full
@pytest.mark.vllm
def test_a_new_figure_of_capacity_is_two_files(tmp_path: Path) -> None:
    """In a copy of kvtune: the field with its computation, and its column; `--json`, schema, page, terminal have it."""
    package = copied(tmp_path)
    capacity = package / "answers" / "capacity"
    replays, document = capacity / "replays.py", capacity / "document.py"
    after(replays, "    pool_most: float | None = None\n", "    slowest_step_s: float | None = None\n")
    after(
        replays,
        "        pool_most=float(held.max(initial=0.0)),\n",
        "        slowest_step_s=float(took_s.max(initial=0.0)),\n",
    )
    after(
        document,
        '    Column("sessions"),\n    Column("hits kept"),\n    Column("hit rate", rank=1),\n',
        '    Column("slowest"),\n',
    )
    after(
        document,
        "        _share([seed.hit_rate for seed in point.seeds]),\n",
        '        f"{max(seed.slowest_step_s or 0.0 for seed in point.seeds):.3f} s",\n',
    )
    words = [
        "capacity",
        "tiny-llama",
        "-w",
        "agents:context=300,tools=30,output=20,turns=6,think=2,different=40,longest=900,max_think=20",
        "--sessions",
        "2",
        "--seeds",
        "1",
        "--no-remedies",
    ]
    flags = ["--", "--max-model-len", "2048", "--num-gpu-blocks-override", "400"]
    printed = python(tmp_path, "-m", "kvtune", *words, "--json", "--page", "page.html", *flags)
    answer = json.loads(printed)
    seeds = [seed for point in answer["curve"] if point["by"] == "replay" for seed in point["seeds"]]
    assert seeds and all(seed["slowest_step_s"] > 0 for seed in seeds)
    schema = json.loads(python(tmp_path, "-m", "kvtune", "schema", "capacity"))
    Draft202012Validator(schema).validate(answer)
    assert "slowest_step_s" in schema["$defs"]["Seed"]["properties"]
    assert "slowest" in (tmp_path / "page.html").read_text(encoding="utf-8")


ANSWERED_IN_FOURS = '''def in_fours(here: Situation) -> Iterator[Change]:
    """Yield tokens that are streamed in fours, beside states that the core keeps."""
    kinds = {"retention": 1.0, "smaller blocks": 1.0, "eviction": 1.0}
    setup = here.setup.with_flags(stream_interval=4)
    yield Change("in fours", setup, "later tokens", kinds, "rows in fours", "of four", "as it is, in fours")


'''


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_new_change_is_one_entry(tmp_path: Path) -> None:
    """In a copy of kvtune: the change and its name in the table. `explain`, `capacity` and `sweep --states` have it."""
    changes = copied(tmp_path) / "answers" / "changes.py"
    lines = after(changes, '    return json.dumps(value, separators=(",", ":"))\n\n\n', ANSWERED_IN_FOURS)
    lines += after(changes, "    caching,\n", "    in_fours,\n")
    assert lines < 10
    model, flags = "tiny-qwen3next", ["--", "--max-model-len", "4096", "--num-gpu-blocks-override", "400"]
    load = ["-w", "rounds:prefixes=2,prefix=2000,suffix=64,output=4,rounds=2"]
    agents = "agents:context=300,tools=30,output=20,turns=4,think=2,different=40,longest=900,max_think=20,hours=0.02"
    python(
        tmp_path,
        "-m",
        "kvtune",
        "profile",
        model,
        "--on",
        "sim",
        *load,
        "--core",
        "stock",
        "-o",
        "runs",
        *flags,
    )
    (run,) = (tmp_path / "runs").glob("*.kvrun")
    asked = {
        "in fours": ["explain", str(run), "--tries", "2"],
        "as it is, in fours": ["sweep", model, "--states", *load, *flags],
        "rows in fours": ["capacity", model, "-w", agents, "--sessions", "12", "--seeds", "1", *flags],
    }
    for shown, words in asked.items():
        page = tmp_path / f"{words[0]}.html"
        answer = json.loads(
            python(tmp_path, "-m", "kvtune", *words[:2], "--json", "--page", page.name, *words[2:])
        )
        rows = answer.get("remedies") or answer["rows"]
        (row,) = (row for row in rows if shown in (row.get("change"), row.get("kept"), row.get("name")))
        assert not row.get("why_not") and not row.get("error")
        assert shown in page.read_text(encoding="utf-8"), words[0]
        assert shown in python(tmp_path, "-m", "kvtune", words[0], words[1], "--md", *words[2:]), words[0]
