"""Modules that are imported when they are first used: what uses them sees no difference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvtune.lab.as_if.deferred import DeferredModule, Finder, Later, fetched
from kvtune.plugin.vllm.plugin_state import STATE

HEAVY = """
import heavy.flags
LIMIT = 7
TABLE = {"a": 1}
class Base:
    def name(self):
        return "base"
def double(value):
    return 2 * value
"""


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that is deferred, all but one of its modules."""
    folder = tmp_path / "heavy"
    folder.mkdir()
    (folder / "__init__.py").write_text(HEAVY)
    (folder / "flags.py").write_text("FLAG = 1\n")
    (folder / "inner.py").write_text("DEPTH = 2\n")
    (folder / "plain.py").write_text("class Pass:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    finder = Finder(["heavy"], ["heavy.plain"])
    monkeypatch.setattr(STATE, "deferred", finder)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("heavy", "user")]:
        del sys.modules[name]


def run(text: str) -> ModuleType:
    """Import a module `user` with this text."""
    module = ModuleType("user")
    exec(compile(text, "user", "exec"), module.__dict__)
    return module


def is_deferred() -> bool:
    return isinstance(sys.modules["heavy"], DeferredModule)


def test_a_name_is_taken_without_an_import(heavy: Path) -> None:
    user = run(
        "import heavy.inner\nfrom heavy import Base, double, inner\nfrom heavy.inner import DEPTH\n"
        "import heavy.flags as flags\ndef use(base: Base) -> None: ..."
    )
    assert is_deferred() and isinstance(user.double, Later)
    assert user.double(4) == 8 and not is_deferred()
    assert fetched(user.DEPTH) == 2 and user.DEPTH == 2 and user.inner.DEPTH == 2 and user.flags.FLAG == 1


@pytest.mark.parametrize(
    "use",
    [
        "class Own(Base): ...\nassert Own().name() == 'base' and Own.__mro__[1] is not Base",
        "assert Base().name() == 'base'",
        "assert not isinstance(3, Base) and not issubclass(int, Base)",
        "assert isinstance(Base, type) and Base.__name__ == 'Base'",
        "assert 'a' in TABLE and TABLE['a'] == 1 and len(TABLE) == 1 and [*TABLE] == ['a'] and TABLE",
        "assert LIMIT == 7 and hash(LIMIT) == hash(7) and repr(LIMIT) == '7'",
        "assert (Base | None) and (None | Base)",
        "TABLE['b'] = 2\ndel TABLE['a']\nimport heavy\nassert heavy.TABLE == {'b': 2}",
        "double.mark = 1\nimport heavy\nassert heavy.double.mark == 1",
        "import heavy\nassert not hasattr(heavy, 'gone') and hasattr(heavy, 'LIMIT')",
        "import heavy\nheavy.LIMIT = 8\nimport sys\nassert sys.modules['heavy'].LIMIT == 8",
        "import heavy.inner\nassert heavy.inner.DEPTH == 2 and heavy.LIMIT == 7",
    ],
)
def test_a_use_is_that_of_the_object(heavy: Path, use: str) -> None:
    run(f"from heavy import LIMIT, TABLE, Base, double\n{use}")
    assert not is_deferred()


def test_a_name_that_is_missing_fails_when_it_is_used(heavy: Path) -> None:
    user = run("from heavy import gone")
    with pytest.raises(AttributeError, match="gone"):
        user.gone()


def test_a_module_that_is_missing_fails_at_once(heavy: Path) -> None:
    with pytest.raises(ModuleNotFoundError):
        run("import heavy.missing")


def test_some_modules_are_imported_without_their_package(heavy: Path) -> None:
    user = run("from heavy.plain import Pass\nfrom heavy import plain\nclass Own(Pass): ...")
    assert isinstance(user.Pass, type) and user.plain.Pass is user.Pass and is_deferred()


PREPARED = """
import sys
from kvtune.lab.sim import worker
from kvtune.lab.as_if.deferred import DeferredModule, defer
defer()
worker.prepare("llama-3.1-8b", "h100")
for name in ("torch._dynamo", "torch._inductor", "scipy", "vllm.env_override", "vllm.reasoning"):
    print("prepared", name, isinstance(sys.modules.get(name), DeferredModule | None))
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.mark.vllm
@pytest.mark.full
def test_a_simulator_needs_none_of_the_heaviest() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", PREPARED], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("prepared")]
    assert len(lines) == 5 and all(line.endswith("True") for line in lines), done.stderr[-2000:]
