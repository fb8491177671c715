"""Stand-ins for what only a GPU's vLLM has: compiled modules and operators, and the packages of its CUDA wheel.

A stand-in may be imported, named, decorated with, subclassed and called; the result is another stand-in. If vLLM wants
a value of one (a truth, a number, a length, its items), nobody here knows it: `Undecided` says what vLLM asked, and
`STATE.asked` keeps it, as vLLM catches errors in places. `ANSWERS` has questions that vLLM's kernels answer plainly.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NoReturn, Self

from kvtune.plugin.vllm.plugin_state import STATE

COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._deepselect_C",
    "vllm._flashkda_C",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm.cumem_allocator",
    "vllm.third_party.deep_gemm",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.third_party.fmha_sm100",
    "vllm.third_party.tml_fa4",
    "vllm.third_party.triton_kernels",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn.cute",
    "vllm.vllm_flash_attn.layers",
)
"""Modules of the CUDA wheel that the CPU wheel lacks. Without the first none works, whatever of it is Python."""

PACKAGES = (
    "cuda",
    "cutlass",
    "flashinfer",
    "flashinfer_cubin",
    "humming",
    "quack",
    "tilelang",
    "timm",
    "torchaudio",
    "torchvision",
    "tokenspeed_mla",
    "triton_kernels",
)
"""Packages that vLLM's CUDA wheel requires, and flashinfer's compiled kernels (vLLM's image has them)."""

OPERATORS = (
    "_C",
    "_C_cache_ops",
    "_C_cuda_utils",
    "_C_custom_ar",
    "_flashkda_C",
    "_flashmla_C",
    "_flashmla_extension_C",
    "_moe_C",
    "_qutlass_C",
    "_vllm_fa2_C",
    "_vllm_fa3_C",
    "deep_select",
)
"""Namespaces of torch.ops with operators of the compiled modules."""

ANSWERS: dict[str, Callable[..., object]] = {
    "flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda *_: 0,
    "torch.ops._C.cutlass_group_gemm_supported": lambda capability: capability >= 90,
    "torch.ops._C.cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "torch.ops._C.cutlass_scaled_mm_supports_fp4": lambda capability: capability >= 100,
    "torch.ops._C.cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "torch.ops._C.mxfp4_experts_quant_supported": lambda capability: capability >= 100,
    "torch.ops._moe_C.moe_permute_unpermute_supported": lambda: True,
}
"""What vLLM's kernels, built with CUDA 13, answer about a device. `capability`: 90 for 9.0.

The first is the size of a kernel's own counters, which decides no block.
"""


class Undecided(Exception):
    """vLLM asked a stand-in for a value."""


class Absent:
    """A stand-in for a class, function, operator or value, by its full name."""

    def __init__(self, name: str, *, value: bool = False) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = name.rpartition(".")[0]
        self.__value = value

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *values: Any, **named: Any) -> Any:
        if answer := ANSWERS.get(self.__name__):
            return answer(*values, **named)
        if len(values) == 1 and not named and isinstance(values[0], FunctionType | type):
            return values[0]  # a decorator
        return Absent(f"{self.__name__}()", value=True)

    def __bool__(self) -> bool:
        """A function or class is true. A constant, or what a call returned, is not known."""
        if self.__value or self.__name__.rpartition(".")[2].isupper():
            self._undecided()
        return True

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __getitem__(self, key: object) -> Self:
        return self

    def __or__(self, other: object) -> Any:
        return object

    __ror__ = __or__

    def _computed(self, *values: object) -> Absent:
        return Absent(f"{self.__name__} (computed with)", value=True)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __lshift__ = __rshift__ = __and__ = __neg__ = __invert__ = _computed

    def _undecided(self, *values: object) -> NoReturn:
        STATE.asked[self.__name__] = None
        raise Undecided(self.__name__)

    __int__ = __index__ = __float__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = _undecided

    def __iter__(self) -> Iterator[object]:
        self._undecided()

    def __repr__(self) -> str:
        return f"<{self.__name__}, which this machine lacks>"


class AbsentModule(ModuleType):
    """A stand-in for a module: every name in it is a stand-in."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports stand-ins for the packages, and for modules inside them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._packages):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = None


def install() -> None:
    """Put stand-ins in place of what this machine lacks, in this process. Call it before vLLM is imported."""
    import torch._ops
    import torch.library

    sys.meta_path.insert(0, Finder(missing(_here)))
    spaces: Any = torch._ops._OpNamespace
    real, register = spaces.__getattr__, torch.library.register_fake

    def operator(namespace: Any, name: str) -> Any:
        try:
            return real(namespace, name)
        except AttributeError:
            if namespace.name in OPERATORS and not name.startswith("__"):
                return Absent(f"torch.ops.{namespace.name}.{name}")
            raise

    def register_fake(op: Any, func: Any = None, /, **named: Any) -> Any:
        """Register a shape function, or nothing for an operator that is not here."""
        namespace, _, name = str(getattr(op, "__name__", op)).partition("::")
        stand_in = op
        if namespace in OPERATORS and not isinstance(op, Absent):
            stand_in = getattr(getattr(torch.ops, namespace), name.partition(".")[0])
        if isinstance(stand_in, Absent):
            return func if func is not None else lambda function: function
        return register(op, func, **named)

    spaces.__getattr__ = operator
    torch.library.register_fake = register_fake


def missing(here: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the modules and packages that need stand-ins. `here`: whether a module is installed."""
    return tuple(
        name for name in (*COMPILED, *PACKAGES) if not here(COMPILED[0] if name in COMPILED else name)
    )


def _here(name: str) -> bool:
    """Whether a module is installed. A module of vLLM is looked for by its file: finding it would import vLLM."""
    top, _, rest = name.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    from pathlib import Path

    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *rest.split("."))
        package = place.is_dir() and any(place.glob("*.py"))
        if package or any(place.parent.glob(f"{place.name}.*")):
            return True
    return False
