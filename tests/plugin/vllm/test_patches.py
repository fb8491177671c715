"""The registry of patches: what stands where, in which order, and that each part comes off alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import pytest

from kvtune.plugin.vllm.patches import Patch, Patches
from kvtune.plugin.vllm.plugin_state import PluginState
from kvtune.plugin.vllm.symbols import MOVED

DOCS = Path(__file__).parents[3] / "docs" / "internals.md"


def adding(text: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    return lambda inner: lambda *args: f"{text}({inner(*args)})"


class Stock:
    def method(self) -> str:
        return "stock"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


@pytest.fixture
def patches() -> Iterator[Patches]:
    registry = Patches()
    method, of_class = vars(Stock)["method"], vars(Stock)["of_class"]
    yield registry
    for part in {patch.part for patch in registry.installed()}:
        registry.undo(part)
    assert vars(Stock)["method"] is method and vars(Stock)["of_class"] is of_class


def test_the_last_part_is_the_outermost(patches: Patches) -> None:
    for part in ("core", "probe"):
        patches.wrap(part, Stock, "method", adding(part))
    assert Stock().method() == "probe(core(stock))"
    symbol = f"{__name__}.Stock.method"
    assert patches.installed() == (Patch(symbol, "core"), Patch(symbol, "probe"))


@pytest.mark.parametrize("gone, rest", [("core", "probe(late(stock))"), ("late", "probe(core(stock))")])
def test_a_part_in_the_middle_comes_off_and_the_others_stay(patches: Patches, gone: str, rest: str) -> None:
    patches.wrap("core", Stock, "method", adding("core"))
    patches.wrap("late", Stock, "method", adding("late"))
    patches.undo("late")
    patches.wrap("late", Stock, "method", adding("late"))
    patches.wrap("probe", Stock, "method", adding("probe"))
    assert Stock().method() == "probe(late(core(stock)))"
    patches.undo(gone)
    assert Stock().method() == rest


def test_a_reset_undoes_the_patches_and_forgets_the_rest() -> None:
    method, undone, state = vars(Stock)["method"], list[str](), PluginState()
    first = {name: copy(value) for name, value in vars(state).items()}
    state.patches.wrap("core", Stock, "method", adding("core"))
    state.hand_back["tokens"] = lambda: undone.append("tokens")
    state.core, state.frozen, state.asked = "stock", True, {"kernels.supports()": None}
    state.loaded.add("core")
    state.reset()
    assert vars(Stock)["method"] is method and undone == ["tokens"] and not state.patches.installed()
    assert {**vars(state), "patches": first["patches"]} == first


INSTALL_ALL = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
from kvtune.plugin.core import plugin
from kvtune.plugin.vllm import cpu_flags
from kvtune.plugin.core.cpu_tier import install as cpu_tier
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.core.settings import parse
from kvtune.plugin.core.tokens import runners
from kvtune.plugin.probe import plugin as probe
from kvtune.plugin.probe import recorder
from kvtune.lab.sim import build
switches = ("packed", "whole_states", "collect_at_wait", "keep_states")
cpu_flags.install()
build.look_at_models_here()
cpu_tier.install()
plugin.install(parse(dict.fromkeys(switches, True)))
runners.install_gpu_outputs()
probe._wrap_engine()
recorder.watch_scheduler(sys.argv[1], "")
installed = [(patch.symbol, patch.part) for patch in STATE.patches.installed()]
STATE.reset()
print("installed", json.dumps({"installed": installed, "left": len(STATE.patches.installed())}))
"""
"""Everything that kvtune can replace, installed and taken back: in its own process, where no other test did."""


@pytest.mark.vllm
@pytest.mark.full
def test_the_list_in_the_docs_is_what_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", INSTALL_ALL, str(tmp_path / "trace")],
        capture_output=True,
        text=True,
        env={**os.environ, "KVTUNE_AVX512_BF16": "1"},
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("installed "))
    parsed = json.loads(line.removeprefix("installed "))
    # The list names the first of the places that versions have for a symbol.
    first = {
        f"{home}.{symbol.rpartition('.')[2]}": symbol for symbol, homes in MOVED.items() for home in homes
    }
    installed = [Patch(first.get(symbol, symbol), part) for symbol, part in parsed["installed"]]
    assert parsed["left"] == 0 and installed
    listed = [Patch(*row) for row in re.findall(r"^- `(vllm\.[^`]+)` \(`([^`]+)`;", DOCS.read_text(), re.M)]
    assert sorted(map(repr, listed)) == sorted(map(repr, installed)), "docs/internals.md is out of date"
    for symbol in {patch.symbol for patch in installed}:
        order = [patch.part for patch in installed if patch.symbol == symbol]
        assert [patch.part for patch in listed if patch.symbol == symbol] == order, symbol
