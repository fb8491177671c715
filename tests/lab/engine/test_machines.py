"""One engine run where everything is unlike the machine that kvtune was written on; docs/internals.md lists the kinds.

A first run (vLLM has never seen the model), no home folder, a user who is not root, folders with spaces, a temp folder
from which nothing may be executed, the C locale, a dumb terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtune.data.run.file import read_run
from kvtune.data.run.types import Run

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

LOAD = "rounds:prefixes=2,prefix=600,suffix=32,output=4,rounds=2"


def namespaces() -> tuple[list[str], bool]:
    """The command before the command: other user, temp folder without execution; whether they are to be had here."""
    script = (
        'temp=$1 left=$2; shift 2; mount -t tmpfs -o noexec,mode=1777 tmpfs "$temp" || exit 1; '
        'unshare --user --map-user=1000 "$@"; code=$?; ls -A "$temp" >"$left"; exit $code'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or os.getuid() != 0:
        return [], False
    tried = subprocess.run(
        [*command, "/mnt", "/dev/null", "id", "-u"], capture_output=True, text=True, check=False
    )
    return (command, True) if tried.stdout.strip() == "1000" else ([], False)


@dataclass(frozen=True)
class Ran:
    facts: dict[str, Any]
    run: Run
    console: str
    left: list[str]  # in the temp folder, listed where it was mounted
    output: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    home = tmp_path_factory.mktemp("a folder with spaces")
    temp, output = home / "temp folder", home / "out put"
    temp.mkdir()
    before, other = namespaces()
    kept = {n: v for n, v in os.environ.items() if n not in ("HOME", "TERM") and not n.startswith("LC_")}
    environment = {
        **kept,
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "TMPDIR": str(temp),
        "LANG": "C",
        "TERM": "dumb",
        "COLUMNS": "40",
    }
    command = [
        sys.executable,
        "-m",
        "kvtune",
        "profile",
        "tiny-gemma3",
        "-w",
        LOAD,
        "-o",
        str(output),
        "--tries",
        "0",
        "--json",
    ]
    done = subprocess.run(
        [*before, *([str(temp), str(home / "left")] if other else []), *command],
        capture_output=True,
        text=True,
        cwd=home,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout)
    path = Path(facts["run_file"])
    shown = subprocess.run(
        [sys.executable, "-m", "kvtune", "report", str(path), "--console"],
        capture_output=True,
        text=True,
        check=True,
    )
    left = (home / "left").read_text().splitlines() if other else [p.name for p in temp.iterdir()]
    return Ran(facts, read_run(path), shown.stdout, left, output)


def test_it_measured_what_it_measures_anywhere(ran: Ran) -> None:
    assert ran.facts["state"] == "complete"
    assert ran.facts["requests"] == 4 and ran.facts["prefix_cache"]["hit_tokens"] > 0


def test_a_first_run_shows_the_engines_processes_and_no_other(ran: Ran) -> None:
    """vLLM inspects the class of a model that it has not seen in its own process: no second front end."""
    assert list((ran.output.parent / "cache").rglob("*.json")), "vLLM inspected nothing: this proves nothing"
    roles = [p.role for p in ran.run.header.processes if p.role != "helper"]
    assert roles == ["front_end", "engine_core", "worker"]
    assert set(ran.facts["gc"]) == {"front_end", "engine_core", "worker"}
    assert "front end 1" not in ran.console


def test_a_plain_default_run_has_no_notes(ran: Ran) -> None:
    assert ran.run.header.notes == []
    assert "Note:" not in ran.console


def test_nothing_is_left_behind(ran: Ran) -> None:
    """Neither folders of ours nor sockets of vLLM's, which it leaves behind wherever it makes them."""
    sockets = [name for name in ran.left if re.fullmatch(r"[0-9a-f-]{36}", name)]
    assert sockets == [] and [name for name in ran.left if name.startswith("kvtune-")] == []
    assert {p.suffix for p in ran.output.iterdir()} == {".kvrun", ".html"}


def test_the_run_file_knows_the_cpu(ran: Ran) -> None:
    from kvtune.base.cpu import avx512_bf16

    assert ran.run.header.host.avx512_bf16 is avx512_bf16()
