"""`.ci/run`, `.ci/full` and `.ci/in-temp` with stand-ins for what they call: what runs, and how it ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripts import ROOT, ran, script

CLOSING = "  tests: ok, 7 passed in 1.00s"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    for name in ("run", "full", "in-temp"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci" / name)
    script(tmp_path / "bin" / "chromium", "exit 0")
    script(tmp_path / ".venv" / "bin" / "python", 'echo "$*"; echo "3 passed in 2.00s"')
    script(tmp_path / ".ci" / "versions", 'echo "versions $*"')
    script(tmp_path / ".ci" / "pythons", "exit 0")
    return tmp_path


def outcome(said: list[str]) -> dict[str, str]:
    """What the last lines say of each part."""
    lines = said[said.index("full: what came of it") + 1 :]
    return dict(line.strip().split(": ", 1) for line in lines)


def test_every_test_that_make_test_leaves_out_is_in_a_part(tree: Path) -> None:
    """By construction: one part is what no other part names."""
    code, said = ran(tree, ".ci/full")
    assert code == 0
    rest = next(line for line in said if "--ignore" in line and line.startswith("full: engines"))
    named = rest.split("--ignore ")[1:]
    others = [
        line for line in said if line.startswith("full: ") and "-m full and (engine or browser) " in line
    ]
    assert len(named) >= 10 and len(others) >= 5
    for path in named:
        assert (ROOT / path.strip()).exists(), path
        assert any(path.strip() in line for line in others if not line.startswith("full: engines")), path
    assert any("-m full and not (full and (engine or browser))" in line for line in said)
    assert all(how.startswith("ok") for how in outcome(said).values())


def test_a_part_that_fails_is_named_and_the_others_run(tree: Path) -> None:
    script(
        tree / ".venv" / "bin" / "python",
        'case "$*" in *test_offload*) exit 1;; esac; echo "3 passed in 2.00s"',
    )
    code, said = ran(tree, ".ci/full", "tier", "soak")
    assert code == 1
    assert outcome(said)["tier"].startswith("FAILED (exit 1)") and outcome(said)["soak"].startswith("ok")


def test_what_does_not_fit_is_left_out_by_name_and_fails_nothing(tree: Path) -> None:
    code, said = ran(tree, ".ci/full", "--minutes", "0.5")
    assert code == 0 and set(outcome(said).values()) == {"LEFT OUT"}


def test_a_part_that_is_not_done_in_time_is_ended_and_named(tree: Path) -> None:
    script(tree / ".venv" / "bin" / "python", "sleep 60")
    (tree / ".ci" / "full").write_text(
        (tree / ".ci" / "full").read_text().replace("LEAST_S = 60", "LEAST_S = 0")
    )
    code, said = ran(tree, ".ci/full", "--minutes", "0.02", "tier")
    assert code == 0 and outcome(said)["tier"].startswith("LEFT OUT, not done after")


def test_versions_whose_packages_cannot_be_had_fail_nothing(tree: Path) -> None:
    script(tree / ".ci" / "versions", "exit 3")
    code, said = ran(tree, ".ci/full", "vllm-0.31.0")
    assert code == 0 and outcome(said)["vllm-0.31.0"].startswith("NOT TRIED")


@pytest.mark.full
def test_the_commit_chooses_where_the_parts_begin(tree: Path) -> None:
    names = list(outcome(ran(tree, ".ci/full")[1]))
    first = []
    for number in range(len(names)):
        script(tree / "bin" / "git", f"echo {number:08x}{'f' * 32}")
        begun = list(outcome(ran(tree, ".ci/full", "--minutes", "0.5")[1]))
        assert sorted(begun) == sorted(names)
        first.append(begun[0])
    assert first == names


def ci(tree: Path, tests: int, full: int, lint: int = 0) -> tuple[int, list[str]]:
    script(
        tree / "bin" / "make",
        f"""if [ "$1" = lint ]; then exit {lint}; fi
        if [ "$1" = test ]; then echo "test: what came of it"; echo "{CLOSING}"; exit {tests}; fi
        echo "$*"; echo "full: what came of it"; echo "  soak: LEFT OUT"; exit {full}""",
    )
    return ran(tree, ".ci/run", KVTUNE_CI_MINUTES="30")


@pytest.mark.parametrize(
    ("tests", "full", "lint", "code"),
    [(0, 0, 0, 0), (0, 1, 0, 0), (2, 0, 0, 2), (2, 1, 1, 2), (0, 0, 1, 1)],
)
def test_ci_ends_with_the_closing_lines_of_the_tests_and_their_exit_code(
    tree: Path, tests: int, full: int, lint: int, code: int
) -> None:
    ended, said = ci(tree, tests, full, lint)
    assert f"lint: {'FAILED (exit 1)' if lint else 'ok'}" in said
    assert (ended, said[-1]) == (code, CLOSING)
    assert "full MINUTES_OF_CI=30" in said, "what is left of CI's minutes"
    assert "  soak: LEFT OUT" in said[-4:]


def test_what_tests_leave_in_the_temp_folder_is_a_failure(tree: Path) -> None:
    code, said = ran(tree, ".ci/in-temp", "sh", "-c", 'mkdir "$TMPDIR/kvtune-left"')
    assert code == 1 and said == ["  temp folder: FAILED, tests left behind: kvtune-left"]
    code, said = ran(tree, ".ci/in-temp", "sh", "-c", 'mkdir "$TMPDIR/other"; exit 3')
    assert (code, said) == (3, []) and not list(tree.glob("kvtests-*"))
