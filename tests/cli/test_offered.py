"""Commands that kvtune prints or copies from a file carry no flag that it would not take from the file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.data.run.extras import Remedy, Replayed
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from tests.simulator import run as kvtune

GOLDEN = Path(__file__).parents[1] / "golden"
EVIL = ["--trust-remote-code", "--tool-parser-plugin", "./x.py", "--block-size", "32", "--tr"]
ASKED = "without --trust-remote-code, --tool-parser-plugin, --tr, which the file asks for"


def copied(page: str) -> list[str]:
    """The texts that a page's Copy buttons copy."""
    boxes = re.findall(r'<pre id="[^"]*">(.*?)</pre><button type="button" data-copy', page, re.S)
    return [" ".join(unescape(re.sub("<[^>]*>", "", box)).split()) for box in boxes]


def printed(text: str) -> list[str]:
    """The commands in what was printed: lines that begin with one, and what stands after `next:` or a colon."""
    return [
        match[0] for line in text.splitlines() if (match := re.search(r"(?:^ *|: |`)kvtune [a-z].*", line))
    ]


def commands_of(value: Any) -> Iterator[str]:
    """The commands in a `--json` object."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("command", "repeat_command") and isinstance(inner, str):
                yield inner
            else:
                yield from commands_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commands_of(inner)


def harmless(commands: list[str]) -> None:
    assert commands
    for line in commands:
        words = shlex.split(line.strip(" `"))
        for word in (
            "--trust-remote-code",
            "--tool-parser-plugin",
            "./x.py",
            "--tr",
            "--trust",
            "rm",
            "--like",
        ):
            assert word not in words, line


def evil_run(name: str, **changes: Any) -> Run:
    run = read_run(GOLDEN / f"schema1-{name}.kvrun")
    header = msgspec.structs.replace(
        run.header,
        model="./evil",
        command=["rm", "profile", "-rf", "--trust", "--like", "-rf", "--", *EVIL],
        engine=msgspec.structs.replace(run.header.engine, args=EVIL),
    )
    header = msgspec.structs.replace(header, **changes)
    helps = Remedy(
        change="x", core="stock", flags={"trust-remote-code": "", "block-size": "16"}, gain_tokens=90_000
    )
    return Run(header, run.tables).with_extra(
        replayed=Replayed(query_tokens=182_880, hit_tokens=60_000, remedies=[helps])
    )


@pytest.mark.parametrize("name", ["real", "rounds", "evictions", "failed", "sim", "partial"])
def test_a_run_files_page_and_console_offer_no_flag_that_is_not_on_the_list(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "evil.kvrun", tmp_path / "page.html"
    write_run(evil_run(name), path)
    assert kvtune(["report", str(path), "-o", str(page)]) == 0
    text = page.read_text()
    harmless(copied(text))
    assert ASKED in text, "what is left out is said"
    capsys.readouterr()
    assert kvtune(["report", str(path), "--console"]) == 0
    said = capsys.readouterr().out
    harmless(printed(said))
    assert ASKED in said
    told = summary(RunAnalysis(read_run(path)))
    harmless(list(commands_of(told)))
    assert ASKED in told["verdict"]["without"]


def test_a_comparison_repeats_both_sides_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, args in (("a", ["--max-num-seqs", "4"]), ("b", ["--max-num-seqs", "8"])):
        made = evil_run("rounds")
        engine = msgspec.structs.replace(made.header.engine, args=[*EVIL, *args])
        write_run(evil_run("rounds", engine=engine), tmp_path / f"{name}.kvrun")
    files = [str(tmp_path / f"{name}.kvrun") for name in "ab"]
    assert kvtune(["report", *files, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert any(line.startswith("for run in 1 2 3; do kvtune profile ./evil") for line in copied(page))
    harmless(copied(page))
    assert ASKED in page
    capsys.readouterr()
    for extra in ([], ["--md"]):
        assert kvtune(["compare", *files, *extra]) == 0
        said = capsys.readouterr().out
        harmless([line for line in said.splitlines() if "kvtune profile" in line])
        assert ASKED in said
    assert kvtune(["compare", *files, "--fail-on", "ttft_ms.mean > +5 %"]) in (2, 3)
    said = capsys.readouterr().err
    harmless([said])
    assert "kvtune compare --fail-on 'ttft_ms.mean > +5 %' ab/1/*.kvrun" in said


def test_a_models_name_is_never_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.kvrun"
    write_run(evil_run("real", model="--trust"), path)
    assert kvtune(["report", str(path), "--console"]) == 0
    harmless(printed(capsys.readouterr().out))
