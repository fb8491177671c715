"""The plugin: inert without its variables, all or nothing, one line in the log when it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvtune.cli.settings import core_settings
from kvtune.core import plugin, state
from kvtune.core.compat import manifest as compat
from kvtune.core.settings import KNOBS, LISTED, CoreSettings, from_environment, parse
from kvtune.errors import KvtuneError, UsageError

VARIABLES = ("KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_SET", "KVTUNE_STRICT", "KVTUNE_AUDIT")


class Part:
    """Stands for a module of the core with install()."""

    def __init__(self, error: Exception | None = None) -> None:
        self.installed: list[CoreSettings] = []
        self.error = error

    def install(self, settings: CoreSettings) -> None:
        if self.error:
            raise self.error
        self.installed.append(settings)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "_registered", False)
    state.clear()
    yield
    state.clear()


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Part:
    found = Part()
    monkeypatch.setattr(plugin, "_part", lambda name: found if name == "cache.adopt" else None)
    monkeypatch.setattr(compat, "check", lambda: None)
    return found


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
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv("KVTUNE_STRICT", "1")
    with pytest.raises(KvtuneError) as stopped:
        plugin.register()
    assert message in stopped.value.message


def test_another_vllm_runs_stock_and_names_the_symbol(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs() -> None:
        raise KvtuneError("vLLM 0.32.0: vllm.x.Y.z has another body", "run stock")

    monkeypatch.setattr(compat, "check", differs)
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    assert not part.installed
    assert "vllm.x.Y.z has another body" in state.state()["why"]
    assert state.state()["active"] is False


def test_an_unexpected_failure_runs_stock(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    part.error = RuntimeError("broken")
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    assert state.state()["active"] is False
    assert "RuntimeError: broken" in state.state()["why"]


def test_installed_parts_are_undone_when_a_later_part_fails(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_back: list[str] = []
    first = Part()
    first.uninstall = lambda: taken_back.append("first")  # type: ignore[attr-defined]
    bad = Part(RuntimeError("broken"))
    found = {"cache.adopt": first, "tokens.install": bad}
    monkeypatch.setattr(plugin, "_part", found.get)
    monkeypatch.setenv("KVTUNE_CORE", "kvtune")
    plugin.register()
    assert taken_back == ["first"]
    assert state.state()["active"] is False


def test_every_setting_has_a_knob_and_its_default_is_legal() -> None:
    defaults = CoreSettings().to_dict()
    assert set(KNOBS) == set(defaults)
    for name, knob in KNOBS.items():
        assert knob.default == defaults[name]
        assert knob.read(knob.default) == knob.default
        assert knob.read(str(knob.default)) == knob.default
        assert knob.help and knob.legal


@pytest.mark.parametrize(
    "bad",
    [{"slack": -1}, {"slack": 1.5}, {"slack": True}, {"pool": "maybe"}, {"protected_share": 1.1}, {"no": 1}],
)
def test_illegal_values_name_the_legal_ones(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        parse(bad)
    assert next(iter(bad)) in refused.value.message
    assert refused.value.hint


def test_settings_go_through_the_environment() -> None:
    settings = parse(
        {"policy": "pin", "slack": "96", "pool": "on", "core.windows": 2, "protected_share": "0.5"}
    )
    environ = {"KVTUNE_CORE": "kvtune", "KVTUNE_SET": json.dumps(settings.changed())}
    assert from_environment(environ) == settings


def test_legacy_switches_are_in_no_list_and_can_be_set() -> None:
    """They bring back what vLLM once did, for `kvtune evidence`."""
    assert set(KNOBS) - set(LISTED) == {"legacy_empty_blocks", "legacy_free_list"}
    with pytest.raises(UsageError) as refused:
        parse({"no_such_knob": 1})
    assert "slack" in refused.value.hint and "legacy" not in refused.value.hint
    assert parse({"legacy_free_list": "true"}).legacy_free_list
    with pytest.raises(UsageError) as refused:
        core_settings(["core.no_such_knob=1"])
    assert "slack" in refused.value.hint and "legacy" not in refused.value.hint
    assert core_settings(["core.legacy_empty_blocks=on"]) == {"legacy_empty_blocks": True}
