"""A vLLM whose code was changed by hand: the parts that need the changed symbol do not load, and the engine serves."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.lab.engine.real import profiled

POOL = (
    Path("v1/core/block_pool.py"),
    "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:\n",
    "        ordered_blocks = list(ordered_blocks)\n",
)
UPDATE = (
    Path("v1/core/sched/scheduler.py"),
    "    ) -> dict[int, EngineCoreOutputs]:\n",
    "        scheduler_output = scheduler_output\n",
)
"""A file, a line of it, and what is written behind that line: the same code in other words."""


def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[Path, str, str]) -> None:
    """Puts the installed vLLM in front of the import path, by links, except one edited method."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    folder = tmp_path / "changed"
    shutil.copytree(installed, folder / "vllm", copy_function=os.symlink)
    file, line, more = edit
    source = (installed / file).read_text()
    assert source.count(line) == 1
    (folder / "vllm" / file).unlink()
    (folder / "vllm" / file).write_text(source.replace(line, line + more))
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize(
    ("edit", "in_force", "said"),
    [
        (
            POOL,
            {"rows", "empty_blocks", "steady", "freeze", "front_end"},
            "pool (vllm.v1.core.block_pool.BlockPool.free_blocks has another body)",
        ),
        (
            UPDATE,
            {"pool", "freeze", "front_end"},
            "decode (vllm.v1.core.sched.scheduler.Scheduler.update_from_output has another body)",
        ),
    ],
    ids=["pool", "update"],
)
def test_the_part_that_needs_a_changed_symbol_stands_aside_and_the_engine_serves(
    edit: tuple[Path, str, str],
    in_force: set[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed(tmp_path, monkeypatch, edit)
    ran = profiled(tmp_path, "tiny-opt", "-w", "decode:requests=3,output=8")
    core = ran.run.header.core
    assert core.active and ran.facts["requests"] == 3 and ran.facts["output_tokens"] == 24
    assert {name for name, on in core.parts.items() if on} == in_force
    line = next(note for note in ran.run.header.notes if "in place of" in note)
    assert line.split("in place of ")[1] == said
    page = Path(ran.facts["page"]) if "page" in ran.facts else next(tmp_path.glob("*.html"))
    text = page.read_text()
    assert "were not loaded" in text and said.split("(")[1].split(" ")[0].rpartition(".")[2] in text
