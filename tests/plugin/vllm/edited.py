"""A vLLM in which a file reads otherwise, for what reads its files without importing them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtune.plugin.vllm import manifest as compat

Edit = Callable[[str, str, str], None]
"""`edit(module, old, new)`: let the module be a copy of its file in which `old` reads `new`."""


def editing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Edit:
    def edit(module: str, old: str, new: str) -> None:
        real = compat.source_path
        path = real(module)
        assert path is not None
        source = path.read_text()
        assert old in source
        copy = tmp_path / path.name
        copy.write_text(source.replace(old, new))
        monkeypatch.setattr(compat, "source_path", lambda name: copy if name == module else real(name))

    return edit
