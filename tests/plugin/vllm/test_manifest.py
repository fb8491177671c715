"""The manifest describes the installed vLLM; a symbol that differs is named."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from bench.versions.manifest import describe_installed
from kvtune.data.installed import installed_version
from kvtune.plugin.vllm import manifest as compat
from kvtune.plugin.vllm.symbols import PARTS, SYMBOLS
from tests.plugin.vllm.edited import Edit, editing

MODULE = "vllm.v1.core.block_pool"


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Edit:
    return editing(monkeypatch, tmp_path)


@pytest.fixture
def manifest() -> dict[str, Any]:
    return compat.read(installed_version())


def first_difference(manifest: dict[str, Any]) -> str:
    source = compat.Source()
    symbols = (symbol for part in PARTS.values() for symbol in part.symbols())
    return next((why for symbol in symbols if (why := source.difference(manifest, symbol))), "")


@pytest.mark.vllm
def test_the_installed_vllm_is_the_one_of_its_manifest() -> None:
    assert describe_installed() == compat.read(installed_version())


def test_every_manifest_has_every_symbol_once() -> None:
    assert compat.known_versions() == sorted(compat.known_versions(), key=compat.release)
    for version in compat.known_versions():
        names = [name for entry in compat.read(version).values() for name in entry["symbols"]]
        assert sorted(names) == sorted(name for names in SYMBOLS.values() for name in names)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block.ref_cnt -= 1\n", "block.ref_cnt -= 2\n", "BlockPool.unpin_blocks has another body"),
        ("def touch(self, blocks:", "def touch(self, blokcs:", "BlockPool.touch takes other parameters"),
        ("def evict_blocks(", "def evict_them(", "BlockPool.evict_blocks is gone"),
        ("popleft_n(num_blocks)", "popleft_n(num_blocks + 0)", "BlockPool.get_new_blocks has another body"),
        (
            "def get_one_block(self, key",
            "def get_one_block(self, kee",
            "BlockHashToBlockMap.get_one_block takes",
        ),
    ],
)
def test_a_tampered_symbol_is_named(
    edit: Edit, manifest: dict[str, Any], old: str, new: str, message: str
) -> None:
    edit(MODULE, old, new)
    why = first_difference(manifest)
    assert f"{MODULE}.{message}" in why
    assert "\n" not in why


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # Identify blocks with hash", "    # Something else, with hash"),
        ('"""Get the number of free blocks in the pool.', '"""Say how many are free.'),
        (
            "        blocks_to_evict_last = []\n",
            "        blocks_to_evict_last = (\n            []\n        )\n",
        ),
        ("logger = init_logger(__name__)", "logger = init_logger('another')"),
    ],
)
def test_comments_docstrings_layout_and_other_code_may_differ(
    edit: Edit, manifest: dict[str, Any], old: str, new: str
) -> None:
    edit(MODULE, old, new)
    assert first_difference(manifest) == ""


@pytest.mark.vllm
def test_a_symbol_that_another_plugin_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, manifest: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)
    assert first_difference(manifest) == f"{MODULE}.BlockPool.touch was replaced in this process"


@pytest.mark.vllm
def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch, manifest: dict[str, Any]) -> None:
    real = compat.source_path
    monkeypatch.setattr(compat, "source_path", lambda name: None if name == MODULE else real(name))
    assert first_difference(manifest) == f"module {MODULE} is missing"


@pytest.mark.vllm
def test_checking_imports_nothing_of_vllm() -> None:
    code = (
        "import sys\n"
        "from kvtune.plugin.vllm.parts import standing\n"
        "standing()\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('vllm', 'torch')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.stdout.strip() == "[]", ran.stderr


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.33.0", (0, 33, 0)),
        ("0.33.0+cpu", (0, 33, 0)),
        ("0.34.0rc1", (0, 34, 0)),
        ("0.33.1rc1.dev9+g1", (0, 33, 1)),
    ],
)
def test_a_version_is_the_numbers_that_it_begins_with(version: str, numbers: tuple[int, ...]) -> None:
    assert compat.release(version) == numbers


FUNCTION = '''
def f(a, *rest, b=1, **more):
    """What it does."""
    # why
    for x in rest:
        yield f"{x!r:>{b}}" if x else a[b:]
    return None
'''


def one(source: str) -> str:
    return compat.fingerprint(ast.parse(source).body[0])


def test_fingerprint_is_the_same_on_every_python() -> None:
    """A constant: a Python whose trees say it otherwise fails here, not in production."""
    assert one(FUNCTION) == "1b0c5385c68a6551"
