"""What changed between two versions: each symbol with its parts and a diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.versions.changes import difference, main
from kvtune.answers.diff.changes import changed
from kvtune.plugin.vllm.symbols import MOVED, PARTS, Part

ENGINE = "vllm/v1/engine/__init__.py"
UTILS, PLANNING = "vllm/v1/core/kv_cache_utils.py", "vllm/v1/core/kv_cache_planning.py"
GROUPS = "vllm.v1.core.kv_cache_utils._get_packed_kv_cache_groups"


def parts_of(*names: str) -> dict[str, Part]:
    return {name: PARTS[name] for name in names}


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_changed_body_is_shown_with_the_parts_that_need_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = "class KVCacheBlock:\n    block_id = {}\n"
    old = tree(tmp_path / "old", {UTILS: block.format(1)})
    new = tree(tmp_path / "new", {UTILS: "# another comment\n" + block.format(2)})
    ((symbol, parts),) = changed(old, new, parts_of("pool", "outputs"))
    lines = difference(old, new, symbol)
    assert str(symbol) == "vllm.v1.core.kv_cache_utils.KVCacheBlock" and parts == ["pool"]
    assert "-    block_id = 1" in lines and "+    block_id = 2" in lines
    assert main([str(old), str(new), "pool"]) == 0
    printed = capsys.readouterr().out
    assert (
        "=== vllm.v1.core.kv_cache_utils.KVCacheBlock  (pool)" in printed and "1 symbols changed" in printed
    )
    assert main([str(old), str(new), "outputs"]) == 0
    assert "0 symbols changed" in capsys.readouterr().out


def test_what_is_only_called_has_changed_where_it_is_gone(tmp_path: Path) -> None:
    old = tree(tmp_path / "old", {ENGINE: "class EngineCoreRequestType:\n    ADD = 1\n"})
    other = tree(tmp_path / "other", {ENGINE: "class EngineCoreRequestType:\n    ADD = 2\n"})
    gone = tree(tmp_path / "gone", {ENGINE: "class RequestType:\n    ADD = 1\n"})
    assert list(changed(old, other, parts_of("outputs"))) == []
    ((symbol, _),) = changed(old, gone, parts_of("outputs"))
    assert str(symbol) == "vllm.v1.engine.EngineCoreRequestType"
    assert "+++ (gone)" in difference(old, gone, symbol)


def test_a_symbol_that_moved_is_compared_where_it_went(tmp_path: Path) -> None:
    assert GROUPS in MOVED
    text = "def _get_packed_kv_cache_groups(config):\n    return {}\n"
    old = tree(tmp_path / "old", {UTILS: text.format(1)})
    new = tree(tmp_path / "new", {PLANNING: text.format(2), UTILS: ""})
    found = {str(symbol): difference(old, new, symbol) for symbol, _ in changed(old, new, parts_of("layout"))}
    assert "-    return 1" in found[GROUPS] and "+    return 2" in found[GROUPS]
    assert "+++ vllm.v1.core.kv_cache_planning" in found[GROUPS]
