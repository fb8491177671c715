"""Stand-ins for what only a GPU's vLLM has: named, called and subclassed freely, and never asked for a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.platforms import DEVICES
from kvtune.lab.as_if import absent
from kvtune.lab.as_if import platform as as_if
from kvtune.lab.as_if.absent import ANSWERS, Absent, AbsentModule, Finder, Undecided
from kvtune.plugin.vllm.plugin_state import STATE

KERNELS = AbsentModule("kernels")


@pytest.fixture(autouse=True)
def unasked() -> Iterator[None]:
    yield
    STATE.reset()


def test_code_that_only_names_a_stand_in_runs() -> None:
    kernels: Any = KERNELS

    @kernels.jit
    def kernel(pointer: kernels.Pointer[kernels.Float32] | None) -> int:
        return 7

    class Operation(kernels.Operation):  # type: ignore[misc]
        @kernels.register(name="it")
        def run(self) -> int:
            return 8

    assert kernel(None) == 7 and Operation().run() == 8
    assert not isinstance(kernel, kernels.Function)
    assert kernels.launch and bool(kernels.Launcher)  # a function and a class are there
    kernels.scale * 2 + kernels.prepare(1).layout
    assert not STATE.asked


@pytest.mark.parametrize(
    "ask",
    [bool, int, float, len, list, lambda value: value > 3, lambda value: [1, 2][value]],
    ids=["bool", "int", "float", "len", "list", "compared", "index"],
)
def test_a_value_of_a_stand_in_is_not_made_up(ask: Callable[[Any], object]) -> None:
    kernels: Any = KERNELS
    with pytest.raises(Undecided, match=r"kernels.supports\(\)"):
        ask(kernels.supports(90))
    assert list(STATE.asked) == ["kernels.supports()"]


def test_a_question_that_was_caught_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = KERNELS
    STATE.platform = DEVICES["b200"]
    as_if.check_answered()
    try:
        supported = bool(kernels.supports(100))
    except Exception:  # as vLLM's own checks for optional kernels
        supported = False
    assert not supported
    with pytest.raises(KvtuneError, match=r"NVIDIA B200 .* depends on kernels.supports\(\)") as refused:
        as_if.check_answered()
    assert "profile it where it runs" in refused.value.hint


def test_what_kernels_answer_plainly_is_answered() -> None:
    supports = Absent("torch.ops._C.cutlass_scaled_mm_supports_fp4")
    assert [bool(supports(capability)) for capability in (80, 90, 100)] == [False, False, True]
    assert all(name.startswith(("torch.ops.", "flashinfer.utils.")) for name in ANSWERS)


def test_only_what_is_missing_is_imported_as_a_stand_in() -> None:
    finder = Finder(("missing_kernels",))
    assert finder.find_spec("missing_kernels_too", None) is None
    found = finder.find_spec("missing_kernels.inner", None)
    assert found is not None
    module: Any = finder.create_module(found)
    assert repr(module.thing) == "<missing_kernels.inner.thing, which this machine lacks>"
    assert absent._here("json") and absent._here("json.decoder") and not absent._here("json.no_such")
    assert not absent._here("no_such_package")


def test_python_beside_kernels_that_are_not_built_is_a_stand_in_too() -> None:
    """vLLM's source, and 0.33 over a CPU build, have the kernels' Python without what it calls."""
    python = {"vllm.third_party.deep_gemm", "vllm.vllm_flash_attn.cute", "quack"}
    wanted = absent.missing(python.__contains__)
    assert {"vllm.third_party.deep_gemm", "vllm.vllm_flash_attn.cute", "cutlass"} <= set(wanted)
    assert "quack" not in wanted
    assert absent.missing(lambda name: True) == ()
    assert "cutlass" in absent.missing({absent.COMPILED[0]}.__contains__)


def test_a_process_with_vllm_is_not_made_anothers() -> None:
    pytest.importorskip("vllm")
    with pytest.raises(KvtuneError, match="this process's vLLM is not that of NVIDIA H100"):
        as_if.force(DEVICES["h100"])
