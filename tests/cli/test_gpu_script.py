"""The script for a GPU: short enough to be typed into a lent machine, and every command of it parses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.sh"

PARSE = """
import sys, typer
from kvtune.cli.app import build_app
own = sys.argv[1:]
own = own[: own.index("--")] if "--" in own else own
root = typer.main.get_command(build_app())
context = root.make_context("kvtune", own, resilient_parsing=False)
name, command, rest = root.resolve_command(context, own)
command.make_context(name, rest, parent=context)
print("parsed", *sys.argv[1:])
sys.exit(1 if sys.argv[0].endswith(f"{name}.py") else 0)
"""


def run_script(tmp_path: Path, failing: str = "none") -> subprocess.CompletedProcess[str]:
    """The script with a command that parses as kvtune does and runs nothing; it fails where it is named `failing`."""
    parser = tmp_path / f"{failing}.py"
    parser.write_text(PARSE)
    return subprocess.run(
        [str(SCRIPT), str(tmp_path / "out")],
        env={**os.environ, "KVTUNE": f"{sys.executable} {parser}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_is_short_enough_for_a_lent_machine() -> None:
    assert len(SCRIPT.read_text()) < 2000


def test_every_command_of_it_parses(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = {path.stem: path.read_text() for path in (tmp_path / "out").glob("*.txt")}
    assert set(written) == {"doctor", "profile-tiny", "profile", "profile-stock", "evidence", "sweep", "tune"}
    assert all(text.startswith("parsed ") for text in written.values())


def test_a_step_that_fails_is_counted_and_the_others_run(tmp_path: Path) -> None:
    done = run_script(tmp_path, failing="sweep")
    assert done.returncode == 1 and "1 failed" in done.stdout
    assert (tmp_path / "out" / "tune.txt").exists()


@pytest.mark.parametrize("name", ["opt-125m", "llama-3-8b", "gemma-3-4b", "gemma-3-27b"])
def test_real_shapes_start_with_random_weights_and_no_tokenizer(name: str) -> None:
    from kvtune.engine.resolve import resolve

    args = resolve(name, dummy=False, engine_args=[]).args
    assert args[args.index("--load-format") + 1] == "dummy" and "--skip-tokenizer-init" in args
