"""The manifest describes the installed vLLM; a symbol that differs is refused by name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.core.compat import manifest as compat
from kvtune.core.compat.symbols import SYMBOLS
from kvtune.errors import KvtuneError

MODULE = "vllm.v1.core.block_pool"


@pytest.fixture
def manifest() -> dict[str, Any]:
    shipped: dict[str, Any] = json.loads((compat.MANIFESTS / "vllm-0.32.0.json").read_text())
    return shipped


def edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, old: str, new: str) -> None:
    """Let `module` be a copy of its file in which `old` reads `new`."""
    real = compat.source_path
    path = real(module)
    assert path is not None
    source = path.read_text()
    assert old in source
    copy = tmp_path / path.name
    copy.write_text(source.replace(old, new))
    monkeypatch.setattr(compat, "source_path", lambda name: copy if name == module else real(name))


@pytest.mark.vllm
def test_the_installed_vllm_is_accepted(manifest: dict[str, Any]) -> None:
    compat.check()
    assert compat.first_difference(manifest, SYMBOLS) == ""


@pytest.mark.vllm
def test_manifest_covers_exactly_the_symbols(manifest: dict[str, Any]) -> None:
    assert {module: set(entry["symbols"]) for module, entry in manifest.items()} == {
        module: set(names) for module, names in SYMBOLS.items()
    }


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, message: str
) -> None:
    edited(monkeypatch, tmp_path, MODULE, old, new)
    with pytest.raises(KvtuneError) as refused:
        compat.check()
    assert message in refused.value.message
    assert "0.32.0" in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.hint


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manifest: dict[str, Any], old: str, new: str
) -> None:
    edited(monkeypatch, tmp_path, MODULE, old, new)
    assert compat.first_difference(manifest, SYMBOLS) == ""


@pytest.mark.vllm
def test_a_symbol_that_another_plugin_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks: None)
    with pytest.raises(KvtuneError, match=r"block_pool\.BlockPool\.touch was replaced in this process"):
        compat.check()


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: "0.33.0")
    with pytest.raises(KvtuneError, match=r"does not know vLLM 0\.33\.0") as refused:
        compat.check()
    assert "0.32.0" in refused.value.hint


@pytest.mark.vllm
def test_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compat.source_path
    monkeypatch.setattr(compat, "source_path", lambda name: None if name == MODULE else real(name))
    with pytest.raises(KvtuneError, match=rf"module {MODULE} is missing"):
        compat.check()


@pytest.mark.vllm
def test_checking_imports_nothing_of_vllm() -> None:
    code = (
        "import sys\n"
        "from kvtune.core.compat.manifest import check\n"
        "check()\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('vllm', 'torch')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert ran.stdout.strip() == "[]", ran.stderr


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


def test_the_fingerprint_ignores_docstrings_comments_and_layout() -> None:
    other = (
        FUNCTION.replace('    """What it does."""\n', "")
        .replace("# why", "# because")
        .replace("a[b:]", "a[b : ]")
    )
    assert one(other) == one(FUNCTION)


def test_fingerprint_is_the_same_on_every_python() -> None:
    """A constant: a Python whose trees say it otherwise fails here, not in production."""
    assert one(FUNCTION) == "1b0c5385c68a6551"


@given(st.sampled_from(["a[b:]", "b=1", "!r", "None", "*rest", "yield"]))
def test_any_change_of_the_code_changes_the_fingerprint(part: str) -> None:
    replacement = {
        "a[b:]": "a[b+1:]",
        "b=1": "b=2",
        "!r": "!s",
        "None": "0",
        "*rest": "*rests",
        "yield": "return",
    }
    assert one(FUNCTION.replace(part, replacement[part])) != one(FUNCTION)


def test_parameters_are_distinguished_by_kind() -> None:
    found = compat.describe(FUNCTION.encode(), ("f", "missing"))
    assert found["f"]["parameters"] == ["a", "*rest", "b", "**more"]
    assert "missing" not in found
