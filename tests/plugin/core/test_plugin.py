"""The plugin: inert without its variables, part by part, one line in the log when a part does not load."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.knobs import CORE, CoreSettings
from kvtune.plugin.core import plugin, state
from kvtune.plugin.core.settings import from_environment, parse
from kvtune.plugin.vllm import parts as compat
from kvtune.plugin.vllm.parts import Standing
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.symbols import PARTS

VARIABLES = ("KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_SET", "KVTUNE_STRICT")


class Part:
    """Stands for a module of the core with install()."""

    PART = "part"

    def __init__(self, error: Exception | None = None) -> None:
        self.installed: list[CoreSettings] = []
        self.error = error

    def install(self, settings: CoreSettings) -> None:
        if self.error:
            raise self.error
        self.installed.append(settings)


def modules(**found: Part) -> Callable[[str], Part]:
    """Return a `part_module` that finds these: `cache_adopt` for `cache.adopt`. Every other module does nothing."""
    return lambda name: found.get(name.replace(".", "_")) or Part()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    found = Part()
    monkeypatch.setattr(plugin, "part_module", modules(cache_adopt=found))
    stands(monkeypatch, {})
    return found


def stands(monkeypatch: pytest.MonkeyPatch, left_out: dict[str, str]) -> None:
    """Let these parts not load in this vLLM."""
    monkeypatch.setattr(compat, "standing", lambda parts=(): Standing("0.32.0", True, left_out))


def test_nothing_happens_without_the_variables(part: Part) -> None:
    plugin.register()
    assert not part.installed
    assert state.state()["why"] == "not asked for"


def test_defaults(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    assert part.installed == [CoreSettings()]
    assert state.state()["active"] is True
    assert state.state()["settings"] == CoreSettings().to_dict()


def test_registering_twice_installs_once(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    plugin.register()
    assert len(part.installed) == 1


def test_stock_is_stock(part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTUNE_CORE", "stock")
    monkeypatch.setenv("KVTUNE_RECIPE", str(tmp_path / "missing.toml"))
    plugin.register()
    assert not part.installed
    assert state.state() | {"counters": {}} == {
        "active": False,
        "why": "stock was asked for",
        "settings": {},
        "parts": {},
        "notes": [],
        "counters": {},
    }


def test_recipe_then_set(part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = tmp_path / "model.toml"
    recipe.write_text('[core]\npolicy = "two_class"\nreuse_bonus_s = 200\nslack = 64\n')
    monkeypatch.setenv("KVTUNE_RECIPE", str(recipe))
    monkeypatch.setenv("KVTUNE_SET", '{"slack": 128}')
    plugin.register()
    assert part.installed[0].changed() == {"policy": "two_class", "reuse_bonus_s": 200.0, "slack": 128}


def test_a_recipe_of_stock_loads_no_core(part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = tmp_path / "model.toml"
    recipe.write_text('[recipe]\nmodel = "tiny-opt"\ncore = "stock"\n[engine]\nblock_size = 32\n')
    monkeypatch.setenv("KVTUNE_RECIPE", str(recipe))
    plugin.register()
    assert not part.installed


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"KVTUNE_CORE": "fast"}, "KVTUNE_CORE='fast' is not a core"),
        ({"KVTUNE_CORE": "kvtune", "KVTUNE_SET": "{"}, "KVTUNE_SET is not JSON"),
        ({"KVTUNE_CORE": "kvtune", "KVTUNE_SET": "[]"}, "KVTUNE_SET is not a JSON object"),
        ({"KVTUNE_CORE": "kvtune", "KVTUNE_SET": '{"pins": 1}'}, "core has no setting 'pins'"),
        ({"KVTUNE_CORE": "kvtune", "KVTUNE_SET": '{"policy": "mru"}'}, "core.policy='mru' is not legal"),
        ({"KVTUNE_RECIPE": "/nowhere.toml"}, "recipe /nowhere.toml"),
    ],
)
def test_bad_input_runs_stock_with_one_line(
    part: Part,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    message: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugin.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert not part.installed
    assert message in state.state()["why"]
    assert len(caplog.records) == 1
    assert message in caplog.text
    STATE.reset()
    monkeypatch.setenv("KVTUNE_STRICT", "1")
    with pytest.raises(KvtuneError) as stopped:
        plugin.register()
    assert message in stopped.value.message


def test_another_vllm_runs_stock_and_names_the_symbol(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    stands(monkeypatch, dict.fromkeys(PARTS, "vllm.x.Y.z has another body"))
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    monkeypatch.setenv("KVTUNE_SET", '{"freeze": false}')
    plugin.register()
    assert not part.installed
    assert "vllm.x.Y.z has another body" in state.state()["why"]
    assert state.state()["active"] is False


def test_a_part_that_stands_aside_is_switched_off_and_said_with_the_symbol(
    part: Part, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stands(monkeypatch, {"decode": "vllm.x.Y.z is gone", "layout": "vllm.x.Q is gone"})
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    monkeypatch.setattr(plugin.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert part.installed[0].changed() == dict.fromkeys(("rows", "steady", "empty_blocks"), False)
    found = state.state()
    assert found["active"] and found["parts"] == dict.fromkeys(("rows", "steady", "empty_blocks"), False)
    assert found["settings"] == CoreSettings().to_dict(), "what was asked for stays on record"
    line = "vLLM 0.32.0: vLLM's own code runs in place of decode (vllm.x.Y.z is gone)"
    assert found["notes"] == [line]
    assert [record.getMessage() for record in caplog.records] == [f"kvtune: {line}"]


def test_a_module_whose_part_stands_aside_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(plugin, "part_module", lambda name: imported.append(name) or Part())
    stands(monkeypatch, {"pool": "vllm.x is gone"})
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    assert imported == [name for name in plugin.MODULES if name != "cache.adopt"]


@pytest.mark.parametrize("strictly", [{"KVTUNE_SET": '{"strict": true}'}, {"KVTUNE_STRICT": "1"}])
def test_strict_keeps_all_or_nothing(
    part: Part, monkeypatch: pytest.MonkeyPatch, strictly: dict[str, str]
) -> None:
    stands(monkeypatch, {"outputs": "vllm.x.Y.z is gone"})
    for name, value in {"KVTUNE_CORE": "kvtune", **strictly}.items():
        monkeypatch.setenv(name, value)
    if "KVTUNE_STRICT" in strictly:
        with pytest.raises(KvtuneError, match="in place of outputs"):
            plugin.register()
    else:
        plugin.register()
    assert not part.installed
    assert state.state()["active"] is False and "vllm.x.Y.z is gone" in state.state()["why"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_part_that_nobody_asked_for_is_not_missed(
    part: Part, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    stands(monkeypatch, {"layout": "vllm.x.Y.z is gone"})
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    monkeypatch.setenv("KVTUNE_SET", json.dumps({"strict": strict}))
    plugin.register()
    assert part.installed and state.state()["notes"] == []


def test_a_part_that_fails_is_undone_and_the_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[str] = []
    stands(monkeypatch, {})
    bad, good = Part(RuntimeError("broken")), Part()
    STATE.hand_back[bad.PART] = lambda: undone.append("bad")
    monkeypatch.setattr(plugin, "part_module", modules(cache_adopt=bad, tokens_install=good))
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    found = state.state()
    assert undone == ["bad"] and good.installed and found["active"]
    assert found["parts"] == {"pool": False, "pinning": False}
    assert found["notes"] == ["cache.adopt could not be put in: RuntimeError: broken"]


def test_strictly_installed_parts_are_undone_when_a_later_part_fails(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back: list[str] = []
    first = Part()
    STATE.hand_back[first.PART] = lambda: taken_back.append("first")
    bad = Part(RuntimeError("broken"))
    monkeypatch.setattr(plugin, "part_module", modules(cache_adopt=first, tokens_install=bad))
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    monkeypatch.setenv("KVTUNE_SET", '{"strict": true}')
    plugin.register()
    assert taken_back == ["first"]
    assert state.state()["active"] is False and "RuntimeError: broken" in state.state()["why"]


def test_every_setting_has_a_knob_and_its_default_is_legal() -> None:
    defaults = CoreSettings().to_dict()
    assert set(CORE) == set(defaults)
    for name, knob in CORE.items():
        assert knob.default == defaults[name]
        assert knob.read(knob.default) == knob.default
        assert knob.read(str(knob.default)) == knob.default
        assert knob.help and knob.legal


@pytest.mark.parametrize(
    "bad",
    [{"slack": -1}, {"slack": 1.5}, {"slack": True}, {"pool": "maybe"}, {"ghost_factor": 65}, {"no": 1}],
)
def test_illegal_values_name_the_legal_ones(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        parse(bad)
    assert next(iter(bad)) in refused.value.message
    assert refused.value.hint


def test_settings_go_through_the_environment() -> None:
    settings = parse({"policy": "pin", "slack": "96", "pool": "on", "core.windows": 2, "ghost_factor": "0.5"})
    environ = {"KVTUNE_CORE": "kvtune", "KVTUNE_SET": json.dumps(settings.changed())}
    assert from_environment(environ) == settings
