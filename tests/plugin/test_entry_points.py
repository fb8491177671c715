"""What vLLM loads of kvtune: nothing where no variable asks for it, and no error where something fails."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtune.plugin import entry_points
from kvtune.plugin.vllm.symbols import PARTS

ROOT = Path(__file__).parents[2]
NAMES = ("core", "probe", "recorder")
ASKING = {
    "core": ("KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_AVX512_BF16"),
    "probe": ("KVTUNE_RUN_DIR",),
    "recorder": ("KVTUNE_RECORD", "KVTUNE_METRICS_DIR"),
}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that entry points import; none registers anything."""
    for name in [name for name in os.environ if name.startswith("KVTUNE_")]:
        monkeypatch.delenv(name)
    names: list[str] = []

    def load(name: str) -> SimpleNamespace:
        names.append(name)
        return SimpleNamespace(register=lambda: None)

    monkeypatch.setattr(importlib, "import_module", load)
    return names


def test_the_package_registers_no_other_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (group,) = project["entry-points"]
    assert group == "vllm.general_plugins"
    points = project["entry-points"][group]
    assert points == {f"kvtune_{name}": f"kvtune.plugin.entry_points:{name}" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_imported_unless_a_variable_asks_for_it(
    name: str, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register: Callable[[], None] = getattr(entry_points, name)
    for other in ("KVTUNE_API_KEY", "KVTUNE_OUTPUT", "KVTUNE_STRICT", "KVTUNE_SET"):
        monkeypatch.setenv(other, "1")
    register()
    for variable in ASKING[name]:
        monkeypatch.setenv(variable, "")
        register()
    assert imported == []
    for variable in ASKING[name]:
        monkeypatch.setenv(variable, "1")
        register()
        monkeypatch.delenv(variable)
    assert len(imported) == len(ASKING[name])


@pytest.mark.parametrize("error", [ImportError("gone"), AttributeError("x"), RecursionError(), MemoryError()])
@pytest.mark.parametrize("name", NAMES)
def test_no_error_reaches_vllm_but_a_line(
    name: str,
    error: Exception,
    imported: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(module: str) -> None:
        raise error

    monkeypatch.setenv(ASKING[name][0], "1")
    monkeypatch.setattr(importlib, "import_module", fail)
    getattr(entry_points, name)()
    (record,) = caplog.records
    assert "is off" in record.getMessage() and type(error).__name__ in record.getMessage()
    monkeypatch.setenv("KVTUNE_STRICT", "1")
    if name == "core":
        with pytest.raises(type(error)):
            entry_points.core()
    else:
        getattr(entry_points, name)()


SYMBOLS = sorted({(s.module, s.name) for part in PARTS.values() for s in part.symbols()} | {
    ("vllm.config", "VllmConfig._post_init_kv_transfer_config"),
    ("vllm.v1.engine.core", "EngineCoreProc._process_engine_step"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__"),
    ("vllm.platforms.cpu", "CpuPlatform.check_and_update_config"),
})  # fmt: skip

LOAD = """
import importlib.metadata, json, os, sys, warnings
warnings.simplefilter("ignore")
import vllm.plugins as plugins
symbols, asked = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for module, _ in symbols:
    try:
        importlib.import_module(module)
    except ImportError:
        pass

def seen():
    found = {}
    for module, name in symbols:
        value = sys.modules.get(module)
        for part in name.split("."):
            value = getattr(value, part, None)
        value = getattr(value, "__func__", value)  # a classmethod is bound anew each time
        found[f"{module}.{name}"] = f"{getattr(value, '__module__', '')} {getattr(value, '__code__', '')} {id(value)}"
    gc_hooks = [str(hook) for hook in __import__("gc").callbacks]
    return found, sorted(sys.modules), sorted(os.environ), gc_hooks

def load(allowed):
    os.environ.pop("VLLM_PLUGINS", None)
    if allowed is not None:
        os.environ["VLLM_PLUGINS"] = allowed
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    os.environ.pop("VLLM_PLUGINS", None)
    return seen()

points = importlib.metadata.entry_points(group="vllm.general_plugins")
others = ",".join(point.name for point in points if not point.name.startswith("kvtune"))
load(others)
before = load(others)
after = load(None)
os.environ.update(asked)
import vllm.config
del vllm.config.VllmConfig
sys.modules["vllm.v1.core.sched.scheduler"] = None
load(None)
load(None)
print("seen", json.dumps([before, after]))
"""


@pytest.mark.full
@pytest.mark.vllm
def test_a_stock_process_is_the_same_with_kvtune_installed_and_a_vllm_without_its_classes_starts(
    tmp_path: Path,
) -> None:
    """vLLM's own loader, first without kvtune's plugins; at the end with all asked for, where classes are gone."""
    pytest.importorskip("vllm")
    asked = {"KVTUNE_CORE": "kvtune", "KVTUNE_PROBE": "light", "KVTUNE_RUN_DIR": str(tmp_path)}
    asked |= {"KVTUNE_RECORD": str(tmp_path / "trace"), "KVTUNE_METRICS_DIR": str(tmp_path / "metrics")}
    stock = {name: value for name, value in os.environ.items() if not name.startswith("KVTUNE_")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(SYMBOLS), json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        env={**stock, "KVTUNE_API_KEY": "key", "KVTUNE_OUTPUT": "reports"},
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.partition("seen ")[2])
    assert after[0] == before[0] and len(after[0]) > 50
    assert set(after[1]) - set(before[1]) == {"kvtune", "kvtune.lab.engine", "kvtune.plugin.entry_points"}
    assert after[2:] == before[2:]
    assert "could not be put in: ImportError: cannot import name 'VllmConfig'" in done.stderr
