"""`kvtune explain-log LOG`: causes with the text known, replayed gains, exit code, texts that are kept."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kvtune.answers.explain.explanation import Bench, View, explained
from kvtune.answers.explain.log import TextLog, bounds_of, read, with_gains, write_log
from kvtune.data.run.file import read_run
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Load, Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.requests.loads.requests_file import selected
from kvtune.requests.loads.spec import build
from kvtune.requests.log.rendering import renderer
from kvtune.requests.log.requests_log import read_log
from kvtune.requests.log.token_ids import Prefixes, packed
from kvtune.requests.types import Workload
from tests.choice import first_of
from tests.reading.report.drawn import run_page
from tests.requests.text.logs import (
    Pattern,
    chat,
    clean_questions,
    rules,
    time_in_header,
    tool,
    tools_reordered,
    user_in_front,
    write,
)
from tests.simulator import on
from tests.simulator import run as kvtune
from tests.tokenizers import make_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "600", "--max-model-len", "4096"]


def as_tokens(pattern: Pattern, folder: Path) -> TextLog:
    """The log as token ids, in `folder`/ids.jsonl."""
    known = renderer(str(make_tokenizer(folder / "tokenizer", pattern.template)))
    file = folder / "ids.jsonl"
    write_log(file, selected(write(pattern, folder / "log.jsonl"), known.render))
    return read(selected(file, None), known.text)


def prompt_tokens(log: TextLog) -> int:
    return sum(len(row.prompt) for row in log.rows)


@pytest.mark.vllm
def test_causes_with_text_and_what_mending_brings(simulators: Simulators, tmp_path: Path) -> None:
    """Full attention: a mended prompt hits each whole block that it begins with, as an earlier one does."""
    log = as_tokens(time_in_header(), tmp_path)
    work = build(f"requests:path={tmp_path / 'ids.jsonl'},concurrency=1", seed=0)
    setup = Setup(model="tiny-llama", load=Load.of(work), engine_args=FLAGS).sized()
    ((_, run),) = simulators.run(on(work, [setup]))
    assert isinstance(run, Run)
    bench = Bench(simulators, run, View(), setup.with_load(work), "tiny-llama", log.edges)
    explanation = explained(bench, 0)
    assert sum(explanation.prefix_cache.misses.values()) == explanation.prefix_cache.missed
    after = sum(one.after for one in log.divergences.values())
    assert explanation.prefix_cache.misses["diverged"] == after > 0.7 * explanation.prefix_cache.query_tokens
    account = with_gains(explanation, log, bench, 1)
    known = Prefixes[int]()
    hits = 0
    for row in log.mended(log.groups):
        hits += min(known.longest(packed(row.prompt))[0], len(row.prompt) - 1) // 32 * 32
        known.add(packed(row.prompt), 0)
    assert account.mended_hit_tokens == hits
    assert account.groups[0].hit_tokens == account.mended_hit_tokens > 0.7 * account.mended_query_tokens
    assert account.groups[0].with_before_hit_tokens == account.mended_hit_tokens
    assert account.mended_query_tokens == prompt_tokens(log)


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize(("common", "least"), first_of([(4, 0.03), (0, 0.1)]))
def test_a_gain_is_not_more_than_a_client_that_mends_its_prompts_measures(
    simulators: Simulators, tmp_path: Path, common: int, least: float
) -> None:
    """Five documents, shuffled: `common` of them in every request, the others of eight. A client that sends its
    documents in one order gains what is promised, or a little more: it also sorts what no two requests share."""
    draw = random.Random(5)
    flags = ["--block-size", "32", "--num-gpu-blocks-override", "4000", "--max-model-len", "4096"]
    documents = [[draw.randrange(1000, 30000) for _ in range(320)] for _ in range(common + 8)]
    shuffled, tidy = [], []
    for _ in range(24):
        chosen = [*range(common), *sorted(draw.sample(range(common, common + 8), 5 - common))]
        question = [draw.randrange(31000, 32000) for _ in range(1200)]
        mixed = draw.sample(chosen, len(chosen))
        shuffled.append([1, 2, 3, *(t for n in mixed for t in documents[n]), *question])
        tidy.append([1, 2, 3, *(t for n in chosen for t in documents[n]), *question])
    setup = Setup(model="tiny-llama", engine_args=flags).sized()

    def replayed(prompts: list[list[int]], name: str) -> tuple[TextLog, Workload, Run]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": ids, "max_tokens": 4}) + "\n" for ids in prompts))
        work = build(f"requests:path={file},concurrency=1", seed=0)
        ((_, run),) = simulators.run(on(work, [setup]))
        assert isinstance(run, Run)
        return read(selected(file, None), None), work, run

    log, work, run = replayed(shuffled, "shuffled")
    bench = Bench(simulators, run, View(), setup.with_load(work), "tiny-llama", log.edges)
    explanation = explained(bench, 0)
    account = with_gains(explanation, log, bench, 1)
    _, _, own = replayed(tidy, "tidy")
    measured = int(own.table("requests")["hit_tokens"].sum()) / prompt_tokens(log)
    promised = account.mended_hit_tokens / account.mended_query_tokens
    assert explanation.prefix_cache.hit_tokens / prompt_tokens(log) + 0.05 < promised
    assert measured - least < promised < measured + 0.01
    assert account.mended_query_tokens == prompt_tokens(log)


def explain(*arguments: str) -> int:
    return kvtune(["explain-log", *arguments])


def test_a_condition_decides_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As CI uses it: without a tokenizer, an engine or a model."""
    path = write(time_in_header(), tmp_path / "log.jsonl")
    clean = write(clean_questions(), tmp_path / "clean.jsonl")
    assert explain(str(path), "--text-only", "--fail-on", "diverged > 5 %") == 1
    out, err = capsys.readouterr()
    assert "a time of day or time stamp" in out
    assert "Move the time into the last message" in " ".join(out.split())
    assert "Time: «2026-09-11T08:10:00Z»" in out
    assert "Time: «2026-09-11T08:21:00Z»" in out
    assert "messages[0] line 2, after" in " ".join(out.split()) and "r1 differs from r0" in out
    assert "failed: diverged > 5 %: it is" in err
    assert explain(str(path), "--text-only", "--fail-on", "diverged > 95 %") == 0
    assert explain(str(clean), "--text-only", "--fail-on", "diverged > 0") == 0
    assert "after a difference to it" in capsys.readouterr().out
    assert explain(str(clean), "--text-only", "--fail-on", "divrged > 0") == 2
    assert "there is no 'divrged'" in capsys.readouterr().err
    # A cause that no token has is 0; one that only a replay finds cannot be told.
    assert explain(str(clean), "--text-only", "--fail-on", "diverged > 0") == 0
    assert explain(str(clean), "--text-only", "--fail-on", "evicted > 0") == 3
    assert "without a replay kvtune cannot tell" in capsys.readouterr().err


def support(dirty: bool) -> Pattern:
    """100 requests of four tenants; if `dirty`, the first three lines have a time, a request's id and an address."""
    draw = random.Random(1)
    bodies = []
    for n in range(100):
        time, request = f"2026-09-11T{n // 60 + 8:02}:{n % 60:02}:00Z", f"req_{draw.randrange(10**8):08}f3"
        head = f"Current time: {time}\nRequest id: {request}\nuser: customer{n}@example.com\n"
        lines = head if dirty else ""
        tenant = ("Acme", "Northwind", "Globex", "Initech")[n % 4]
        system = f"{lines}You are {tenant}'s assistant.\n{rules(90 + n % 4)}"
        bodies.append(chat(("system", system), ("user", f"Where is my order number {100_000 + n}?")))
    return Pattern("support", "chatml", bodies, "")


@pytest.mark.parametrize("flags", first_of([["--text-only"], ["--bounds-only"]]))
def test_each_edit_in_one_place_is_named(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As kvlint's demo: three patterns in lines 1 to 3 are three groups, with an example of neighbours in time."""
    words = ["--tokenizer", str(make_tokenizer(tmp_path / "tokenizer", "chatml")), *flags][
        2 * (flags == ["--text-only"]) :
    ]
    path = write(support(dirty=True), tmp_path / "dirty.jsonl")
    assert explain(str(path), *words, "--json", "--with-text") == 0
    groups = json.loads(capsys.readouterr().out)["texts"]["groups"]
    assert [(one["kind"], one["label"], one["requests"]) for one in groups] == [
        ("time", "Current time:", 96),
        ("id", "Request id:", 96),
        ("user", "user:", 96),
    ]
    assert all(int(one["request"][1:]) - int(one["like"][1:]) == 4 for one in groups)
    clean = write(support(dirty=False), tmp_path / "clean.jsonl")
    assert explain(str(clean), *words, "--json") == 0
    assert "groups" not in json.loads(capsys.readouterr().out)["texts"]


def test_prompts_sent_at_once_differ_from_none_of_each_other(tmp_path: Path) -> None:
    """What was cached when a prompt came tells: of ten at once the first ten are new, and ten later differ from one."""
    pattern = support(dirty=True)
    path = write(pattern, tmp_path / "log.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    at_once = [{**row, "t0": 1000.0 + n // 40, "t1": 1000.9 + n // 40} for n, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in at_once))
    known = renderer("bytes")
    log = read(selected(path, known.render), known.text, bytes_=True)
    assert min(log.divergences) == 40
    assert all(one.like < 40 * (number // 40) for number, one in log.divergences.items())


def test_token_ids_are_not_taken_for_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt": [1, 300]}) + "\n")
    assert explain(str(path), "--text-only") == 2
    assert "has token ids, and its text is not known" in capsys.readouterr().err


def test_json_has_no_text_unless_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(user_in_front(), tmp_path / "log.jsonl")
    assert explain(str(path), "--text-only", "--json") == 0
    out = capsys.readouterr().out
    (group,) = json.loads(out)["texts"]["groups"]
    assert (group["kind"], group["requests"]) == ("user", 5)
    assert not any(name in out for name in ("Alice", "Bob", "Rule 0"))
    assert explain(str(path), "--text-only", "--json", "--with-text") == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert texts["with_text"]
    assert (texts["groups"][0]["old"], texts["groups"][0]["new"]) == ("Alice", "Bob")


@pytest.mark.full
def test_the_mended_log_has_little_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_tokens(tools_reordered(), tmp_path)
    path, file = tmp_path / "ids.jsonl", tmp_path / "mended.jsonl"
    words = [str(path), "--bounds-only"]
    assert explain(*words, "--fail-on", "diverged > 50 %", "--mended", str(file)) == 1
    rows = list(read_log(file))
    assert [row.name for row in rows] == [f"r{n}" for n in range(6)]
    assert explain(str(file), "--bounds-only", "--fail-on", "diverged > 8 %") == 0
    assert explain(*words, "--mended", str(file)) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain-log", "rounds", "--bounds-only"], "rounds"),
        (["explain-log", "x.jsonl"], "which model's cache is replayed is not known"),
        (["explain-log", "LOG", "--save"], "No such option: --save"),
        (
            ["explain-log", "x.jsonl", "--bounds-only", "-o", "x.kvrun"],
            "--output is not read with --bounds-only",
        ),
        (
            ["explain-log", "x.jsonl", "--bounds-only", "--", "--block-size", "16"],
            "what follows -- is not read",
        ),
        (["explain-log", "x.jsonl,tokenizer=bytes", "--text-only"], "a LOG that names no tokenizer"),
        (["explain", "run.kvrun", "--fail-on", "diverged > 1"], "No such option: --fail-on"),
        (["explain", "http://localhost:8000"], "a server is recorded first: `kvtune record URL"),
        (["explain", "run.kvrun", "--", "--block-size", "16"], "explain takes nothing after --"),
    ],
)
def test_wrong_calls_say_what_to_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtune(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.full
def test_a_run_file_of_the_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokenizer, replay, run file and page; the file and the page hold no text."""
    log = as_tokens(user_in_front(), tmp_path)
    run = tmp_path / "log.kvrun"
    tokenizer = str(tmp_path / "tokenizer")
    words = [
        str(tmp_path / "log.jsonl"),
        "--model",
        "tiny-llama",
        "--tokenizer",
        tokenizer,
    ]
    assert explain(*words, "-o", str(run), "--tries", "1", "--", *FLAGS) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "«Alice»" in out
    assert "diverged" in out
    stored = read_run(run)
    texts = stored.header.extra.texts
    assert texts is not None
    assert texts.engine
    assert not texts.with_text
    assert texts.groups[0].tokens_after == log.groups[0].after
    assert texts.mended_hit_tokens > texts.hit_tokens
    assert b"Alice" not in run.read_bytes()
    assert kvtune(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "The text that breaks the prefix" in page
    assert "Alice" not in page
    # The run and its log, later: the same account.
    capsys.readouterr()
    assert (
        kvtune(
            [
                "explain",
                str(run),
                "--trace",
                str(tmp_path / "log.jsonl"),
                "--model",
                "tiny-llama",
                "--tokenizer",
                tokenizer,
                "--tries",
                "0",
                "--json",
            ]
        )
        == 0
    )
    again = json.loads(capsys.readouterr().out)
    assert again["prefix_cache"]["misses"]["diverged"] == stored.header.extra.misses["diverged"] > 0
    assert again["texts"]["groups"][0]["tokens_after"] == log.groups[0].after


def test_texts_steer_neither_terminal_nor_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("<script>alert(1)</script>", "\x1b[2J\u202eBob", "[red]Carol")
    bodies = [chat(("system", f"User: {name}\n{rules(8)}"), ("user", "Hello?")) for name in names]
    path = write(Pattern("hostile", "chatml", bodies, "user"), tmp_path / "log.jsonl")
    assert explain(str(path), "--text-only") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out
    assert "<script>" in out or "[red]Carol" in out
    known = renderer("bytes")
    account = bounds_of(read(selected(path, known.render), known.text, bytes_=True))
    run = read_run(GOLDEN / "schema1-bare.kvrun").with_extra(texts=account)
    page = run_page(RunAnalysis(run))
    assert "The text that breaks the prefix" in page
    assert "alert(1)</script>" not in page
    assert "\x1b" not in page and "\u202e" not in page


@pytest.mark.parametrize("tools", first_of([True, False]), ids=["with-tools", "without-tools"])
def test_a_log_of_anthropics_bodies_gets_the_answer_of_the_same_log_of_openais(
    tools: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system prompt, with a time in it, is a field beside the messages there."""
    openai = time_in_header()
    functions = [tool(f"get_{city}", n) for n, city in enumerate(("paris", "rome"))] if tools else []
    named = [{**one["function"], "input_schema": one["function"]["parameters"]} for one in functions]
    theirs: list[dict[str, object]] = []
    for body in openai.bodies:
        (system, *messages) = body["messages"]
        body |= {"tools": functions} if tools else {}
        theirs.append(
            {"max_tokens": 9, "system": [{"type": "text", "text": system["content"]}], "messages": messages}
        )
        for one in named if tools else ():
            theirs[-1].setdefault("tools", []).append(
                {k: one[k] for k in ("name", "description", "input_schema")}
            )  # type: ignore[attr-defined]
    tokenizer = make_tokenizer(tmp_path / "tokenizer", "chatml")
    said = []
    for name, bodies in (("openai", openai.bodies), ("anthropic", theirs)):
        log = write(Pattern(name, "chatml", bodies, "time"), tmp_path / f"{name}.jsonl")
        assert explain(f"{log},tokenizer={tokenizer}", "--bounds-only", "--json", "--with-text") == 0
        said.append(json.loads(capsys.readouterr().out)["texts"])
    assert said[0] == said[1]
    assert said[0]["hit_tokens"] < 0.05 * said[0]["query_tokens"] and [
        g["kind"] for g in said[0]["groups"]
    ] == ["time"]


@pytest.mark.parametrize("content", ["", "\n  \n"])
@pytest.mark.parametrize(
    "reader", [("--model", "tiny-llama"), ("--tokenizer", "/no/folder", "--bounds-only")]
)
def test_an_empty_log_is_told_before_anything_begins_that_reads_text(
    content: str,
    reader: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("a tokenizer is loaded")

    monkeypatch.setattr("kvtune.requests.loads.sources.renderer", begun)
    log = tmp_path / "log.jsonl"
    log.write_text(content)
    assert kvtune(["explain-log", str(log), *reader]) == 2
    assert f"{log} is empty" in capsys.readouterr().err
