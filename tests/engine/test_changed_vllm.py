"""A vLLM whose code was changed by hand: the parts that need the changed symbol stand aside, and the engine serves."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.engine.real import profiled

POOL = Path("v1/core/block_pool.py")


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the import path, with the installed vLLM by links, but for one edited method."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    folder = tmp_path / "changed"
    shutil.copytree(installed, folder / "vllm", copy_function=os.symlink)
    source = (installed / POOL).read_text()
    old = "def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:\n"
    assert source.count(old) == 1
    (folder / "vllm" / POOL).unlink()
    (folder / "vllm" / POOL).write_text(
        source.replace(old, f"{old}        ordered_blocks = list(ordered_blocks)\n")
    )
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


@pytest.mark.engine
def test_the_parts_that_need_a_changed_symbol_stand_aside_and_the_engine_serves(
    changed: Path, tmp_path: Path
) -> None:
    ran = profiled(tmp_path, "tiny-opt", "-w", "decode:requests=3,output=8")
    core = ran.run.header.core
    assert core.active and ran.facts["requests"] == 3 and ran.facts["output_tokens"] == 24
    assert core.parts == {
        "pool": False,
        "pinning": False,
        "reuse": False,
        "rows": True,
        "empty_blocks": True,
        "steady": True,
        "freeze": True,
        "collect_at_wait": False,
    }
    line = next(note for note in ran.run.header.notes if "in place of" in note)
    assert "pool (vllm.v1.core.block_pool.BlockPool.free_blocks has another body)" in line
    assert "pinning, reuse (pool stands aside)" in line
    page = (
        Path(ran.facts["page"]).read_text()
        if "page" in ran.facts
        else next(tmp_path.glob("*.html")).read_text()
    )
    assert "stood aside" in page and "BlockPool.free_blocks" in page
