"""`.ci/versions` with stand-ins for what it calls: what is said, and the exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripts import ROOT, ran, script

COPIED = (
    ".ci/versions",
    "kvtune/answers/diff/environments.py",
    "bench/versions/environment.py",
    "pyproject.toml",
    "kvtune/plugin/vllm/manifests/vllm-0.33.0.json",
)
NO_NETWORK = (
    'echo "error: Failed to fetch: https://example.invalid/simple/: error sending request" >&2; exit 2'
)
NO_SOLUTION = 'echo "  x No solution found when resolving dependencies" >&2; exit 1'


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KVTUNE_VERSIONS", raising=False)
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def environments_that(tree: Path, python: str) -> None:
    """Environments that are made at once, and whose Python does what is given."""
    script(tree / "python", python)
    script(tree / ".venv" / "bin" / "python", 'mkdir -p "$4/bin"; cp python "$4/bin/python"')


def test_packages_that_cannot_be_downloaded_are_named_and_no_failure(tree: Path) -> None:
    script(tree / ".venv" / "bin" / "python", NO_NETWORK)
    code, said = ran(tree, ".ci/versions", "0.31.0")
    assert code == 3
    assert said[-1].startswith(
        "  0.31.0: everything: NOT TRIED, its packages could not be downloaded: error:"
    )


def test_packages_that_do_not_install_are_a_failure(tree: Path) -> None:
    script(tree / ".venv" / "bin" / "python", NO_SOLUTION)
    code, said = ran(tree, ".ci/versions", "0.31.0")
    assert code == 1
    assert said[-1] == "  0.31.0: environment: FAILED, its packages do not install"


def test_a_failure_outweighs_a_version_that_was_not_tried(tree: Path) -> None:
    script(tree / ".venv" / "bin" / "python", f'case "$*" in *0.31.0*) {NO_SOLUTION};; esac; {NO_NETWORK}')
    assert ran(tree, ".ci/versions", "0.30.0", "0.31.0", "0.29.0")[0] == 1


def test_without_time_everything_is_left_out_by_name(tree: Path) -> None:
    code, said = ran(tree, ".ci/versions", "--minutes", "-3")
    assert code == 0
    left_out = [line for line in said if line.endswith("everything: LEFT OUT, 0 s of the budget were left")]
    assert [line.split(":")[0].strip() for line in left_out] == ["0.33.0", "0.31.0", "0.30.0", "0.29.0"]


def test_steps_that_do_not_fit_are_left_out_by_name(tree: Path) -> None:
    """Five minutes hold an environment and a smoke test; the tests of the core want seven."""
    environments_that(tree, "exit 0")
    code, said = ran(tree, ".ci/versions", "--minutes", "5", "0.33.0")
    assert code == 0 and "  0.33.0: smoke: ok" in said
    assert any(line.startswith("  0.33.0: tests of the core: LEFT OUT, ") for line in said)
    assert "  0.33.0: engine and simulator in step: ok" in said


def test_a_step_that_fails_is_named_and_the_others_run(tree: Path) -> None:
    environments_that(tree, 'case "$*" in *tests/plugin/core*) exit 1;; esac')
    code, said = ran(tree, ".ci/versions", "0.33.0")
    assert code == 1 and "  0.33.0: tests of the core: FAILED" in said
    assert "  0.33.0: engine and simulator in step: ok" in said


def test_of_a_new_version_what_changed_comes_first_and_then_its_manifest(tree: Path) -> None:
    """Its parts load by the manifest, so that what follows tries them."""
    environments_that(tree, "exit 0")
    code, said = ran(tree, ".ci/versions", "0.34.0")
    assert code == 0
    assert said[-4:] == [
        "  0.34.0: what changed since 0.33.0: ok",
        "  0.34.0: flags, metrics, events, defaults since 0.33.0: ok",
        "  0.34.0: manifest: ok",
        "  0.34.0: smoke: ok",
    ]


def test_a_version_that_has_a_manifest_or_is_older_gets_none(tree: Path) -> None:
    environments_that(tree, "exit 0")
    said = ran(tree, ".ci/versions", "0.33.0", "0.31.0")[1]
    assert not [line for line in said if "manifest" in line or "changed since" in line]
