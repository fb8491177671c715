"""Parts of the core load or not, one by one, each by the symbols that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.data.installed import installed_version
from kvtune.plugin.core.plugin import MODULES, switches_of
from kvtune.plugin.core.settings import parse, without
from kvtune.plugin.vllm import manifest as compat
from kvtune.plugin.vllm import parts
from kvtune.plugin.vllm.parts import Standing, differing, standing
from kvtune.plugin.vllm.symbols import PARTS
from tests.plugin.vllm.edited import Edit, editing

CORE = "vllm.v1.core."


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Edit:
    return editing(monkeypatch, tmp_path)


@pytest.mark.vllm
def test_with_a_known_vllm_every_part_loads() -> None:
    assert standing() == Standing(installed_version(), known=True, left_out={})
    assert standing().line() == "" and differing(tuple(PARTS)) == ""


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("module", "old", "new", "left_out"),
    [
        (f"{CORE}block_pool", "popleft_n(num_blocks)", "popleft_n(num_blocks + 0)", "pool states"),
        (f"{CORE}block_pool", "def insert(", "def put(", "pool states"),
        (f"{CORE}kv_cache_coordinator", "def replay_boundaries(", "def replays(", "pool states"),
        (
            f"{CORE}single_type_kv_cache_manager",
            "class MambaManager(",
            "class Mamba2Manager(",
            "decode states",
        ),
        (
            f"{CORE}sched.scheduler",
            "def make_stats(\n        self,",
            "def make_stats(\n        this,",
            "decode",
        ),
        ("vllm.v1.worker.cpu_model_runner", "class CPUModelRunner(", "class Runner(", "decode"),
        ("vllm.v1.engine.core", "def _process_input_queue(", "def _process_queue(", "decode"),
        ("vllm.v1.kv_cache_layout", "class KVCacheLayout(", "class Layout(", "layout"),
        ("vllm.v1.engine.core", "def step(", "def one_step(", "outputs simulator"),
        ("vllm.v1.metrics.stats", "itl = engine_core_timestamp", "gap = engine_core_timestamp", "outputs"),
    ],
)
def test_a_changed_symbol_puts_exactly_the_parts_aside_that_need_it(
    edit: Edit, module: str, old: str, new: str, left_out: str
) -> None:
    edit(module, old, new)
    found = standing()
    assert found.known
    assert set(found.left_out) == set(left_out.split())
    first = left_out.split()[0]
    assert module in found.left_out[first] and found.left_out[first] in found.line()
    assert differing((first,)) == found.left_out[first]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (
            "vllm.v1.engine.async_llm",
            "self.log_requests = log_requests",
            "self.log_requests = bool(log_requests)",
        ),
        ("vllm.v1.engine.core", "self.log_stats = log_stats", "self.log_stats = bool(log_stats)"),
    ],
)
def test_code_that_a_part_only_follows_may_change(edit: Edit, module: str, old: str, new: str) -> None:
    edit(module, old, new)
    assert standing().left_out == {}


@pytest.mark.vllm
def test_an_unknown_version_keeps_the_parts_whose_symbols_a_known_version_has(
    monkeypatch: pytest.MonkeyPatch, edit: Edit
) -> None:
    monkeypatch.setattr("kvtune.plugin.vllm.parts.installed_version", lambda: "0.99.0")
    edit("vllm.v1.kv_cache_layout", "class KVCacheLayout(", "class Layout(")
    found = standing()
    assert not found.known and set(found.left_out) == {"layout"}
    line = found.line()
    assert line.startswith("vLLM 0.99.0 is not one that kvtune knows (") and "\n" not in line
    assert "vLLM's own code runs in place of layout (" in line
    assert found.line(("pool", "decode", "outputs")) == ""


@pytest.mark.vllm
def test_a_part_does_not_mix_the_symbols_of_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its symbols as in one known version and half as in another is a vLLM that was never tried."""
    real = compat.read(installed_version())
    changed = {
        name: {**entry, "sha256": "", "symbols": dict(entry["symbols"])} for name, entry in real.items()
    }
    outputs, runner = "vllm.v1.outputs", "vllm.v1.worker.cpu_model_runner"
    other = {"parameters": [], "ast": "another"}
    one = {**changed, outputs: {**changed[outputs], "symbols": {"ModelRunnerOutput": other}}}
    two = {**changed, runner: {**changed[runner], "symbols": {"CPUModelRunner": other}}}
    manifests = {"0.98.0": one, "0.97.0": two}
    monkeypatch.setattr("kvtune.plugin.vllm.parts.installed_version", lambda: "0.99.0")
    monkeypatch.setattr(compat, "known_versions", lambda: sorted(manifests))
    monkeypatch.setattr(compat, "read", manifests.__getitem__)
    assert set(standing().left_out) == {"decode"}


def test_the_line_names_each_reason_once_with_its_parts() -> None:
    found = Standing(
        "0.32.0", True, {"pool": "a.B is gone", "outputs": "c.D is gone", "decode": "a.B is gone"}
    )
    assert (
        found.line()
        == "vLLM 0.32.0: vLLM's own code runs in place of pool, decode (a.B is gone); outputs (c.D is gone)"
    )
    assert found.line(("layout",)) == ""


def test_every_part_has_switches_and_can_be_switched_off() -> None:
    asked = parse({"collect_at_wait": True, "packed": True, "keep_states": True})
    assert {module.part for module in MODULES.values() if module.part} == set(PARTS) - {"simulator"}
    assert set(asked.switches()) == {name for module in MODULES.values() for name in module.switches}
    for part in PARTS:
        left = without(asked, switches_of((part,))).switches()
        assert left == tuple(name for name in asked.switches() if name not in switches_of((part,)))


def test_the_nearest_older_version_gives_the_reasons() -> None:
    versions = ["0.32.0", "0.33.0", "0.35.0"]
    assert parts.nearest_first("0.34.1", versions) == ["0.33.0", "0.32.0", "0.35.0"]
    assert parts.nearest_first("0.29.0", versions) == versions
