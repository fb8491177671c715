"""What `make release` writes beside the wheel: an image of the wheel, and a workflow that only a signed tag runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_deploy import ENTRY, listed, steps

ROOT = Path(__file__).parents[2]
WHEEL = "kvtune-1.2.3-py3-none-any.whl"
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def written(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci" / "publishing"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_image_is_that_of_the_wheel(tmp_path: Path) -> None:
    (tmp_path / WHEEL).touch()
    assert written(tmp_path).returncode == 0
    instructions = steps(tmp_path / "Containerfile")
    assert [text for name, text in instructions if name == "COPY"] == [f"{WHEEL} /src/"]
    assert any(name == "RUN" and text.endswith(f"/src/{WHEEL}") for name, text in instructions)
    same = {"FROM", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert [each for each in instructions if each[0] in same] == [each for each in steps() if each[0] in same]
    assert listed(dict(instructions)["CMD"]) == ENTRY
    assert f'source="{ADDRESS}"' in dict(instructions)["LABEL"] and '"1.2.3"' in dict(instructions)["LABEL"]


def test_the_workflow_keeps_no_key_and_asks_for_a_signed_tag(tmp_path: Path) -> None:
    (tmp_path / WHEEL).touch()
    written(tmp_path)
    text = (tmp_path / "publish.yml").read_text(encoding="utf-8")
    workflow: dict[Any, Any] = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` so
    assert workflow["permissions"] == {"contents": "read"}
    build, index, image = (workflow["jobs"][name] for name in ("build", "index", "image"))
    commands = [step.get("run", "") for step in build["steps"]]
    signed = next(at for at, command in enumerate(commands) if "git verify-tag" in command)
    assert signed < next(at for at, command in enumerate(commands) if ".ci/release" in command)
    assert index["needs"] == "build" and index["environment"] == "pypi"
    assert index["permissions"] == {"id-token": "write"} and "permissions" not in build
    assert "password" not in str(index) and image["needs"] == "index"
    assert f"repository {ADDRESS.split('/', 3)[3]}" in text and "v1.2.3" in text


@pytest.mark.parametrize("wheels", [0, 2])
def test_without_one_wheel_nothing_is_written(wheels: int, tmp_path: Path) -> None:
    for number in range(wheels):
        (tmp_path / f"kvtune-1.{number}-py3-none-any.whl").touch()
    done = written(tmp_path)
    assert done.returncode != 0 and f"has {wheels} wheels" in done.stderr
    assert not (tmp_path / "publish.yml").exists()


@pytest.mark.lint
def test_one_file_holds_the_projects_address() -> None:
    """pyproject.toml, whose `Source` all its other addresses begin with; nothing else names it."""
    owner = ADDRESS.rsplit("/", 1)[0] + "/"
    listing = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT)
    holders = set()
    for name in listing.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and owner.encode() in path.read_bytes():
            holders.add(name)
    assert holders == {"pyproject.toml"}
    addresses = re.findall(
        rf"{re.escape(owner)}[\w-]+", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert len(addresses) > 3 and set(addresses) == {ADDRESS}
