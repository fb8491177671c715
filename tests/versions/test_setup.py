"""`.ci/setup` with a stand-in for uv: which packages an engine gets."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = (".ci/setup", ".ci/overrides.txt", "pyproject.toml", "kvtune/__init__.py")


@pytest.mark.parametrize(("engine", "left_out"), [("cpu", True), ("cuda", False), ("none", False)])
def test_torchvision_is_left_out_for_the_cpu_engine_only(tmp_path: Path, engine: str, left_out: bool) -> None:
    """On CUDA multimodal models need it."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python, uv = tmp_path / ".venv" / "bin" / "python", tmp_path / ".venv" / "bin" / "uv"
    python.parent.mkdir(parents=True)
    # The environment's Python answers the version check, and has pip; uv writes down what it is asked for.
    python.write_text("#!/bin/sh\nexit 0\n")
    uv.write_text('#!/bin/sh\necho "$@" >>uv.said\n')
    for path in (python, uv):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "KVTUNE_ENGINE": engine}
    done = subprocess.run(
        [".ci/setup"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "uv.said").read_text()
    assert said.startswith("pip install") and ("overrides.txt" in said) == left_out
    assert f"engine {engine}" in done.stdout
