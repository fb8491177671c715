"""Imports what a replay does not need when it is first used, if ever: half of what importing vLLM takes.

`defer` is called once, before vLLM is imported, in a process that computes nothing. `from MODULE import NAME` of a
module of `MODULES` then gives a `Later`, which stands for the object and fetches it when it is called, subclassed,
asked for an attribute or compared; every other use of such a module imports it.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

from kvtune.plugin.vllm.plugin_state import STATE

MODULES = (
    "aiohttp",
    "compressed_tensors.offload",
    "opentelemetry.exporter",
    "scipy",
    "torch._dynamo",
    "torch._inductor",
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.distributed",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "vllm.compilation.passes.fusion",
    "vllm.connections",
    "vllm.env_override",
    "vllm.kernels.triton",
    "vllm.parser",
    "vllm.reasoning",
)
"""What compiles, loads weights, reads images and sounds, parses answers, and downloads."""

AT_ONCE = ("torch._dynamo.config", "torch._inductor.config", "torch._inductor.custom_graph_pass")
"""Modules of a deferred package that are imported as ever, without the package: vLLM's configuration needs them."""

IMPORTERS = ("importlib._bootstrap", "transformers.utils.import_utils")
"""Modules that ask for a name because another imports it."""

IMPORTS = dis.opmap["IMPORT_FROM"]


class Later:
    """An object of a deferred module, by the module's name and its own."""

    def __init__(self, module: str, name: str) -> None:
        self.__dict__.update(module=module, name=name)

    def __getattr__(self, name: str) -> Any:
        return getattr(fetched(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(fetched(self), name, value)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[Any, ...]:
        return (fetched(self),)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return cast(type, fetched(self).__class__)


OPERATORS: dict[str, Callable[..., Any]] = {
    "__call__": lambda own, *values, **named: own(*values, **named),
    "__instancecheck__": lambda own, value: isinstance(value, own),
    "__subclasscheck__": lambda own, value: issubclass(value, own),
    "__ror__": lambda own, value: value | own,
    "__bool__": bool,
    "__contains__": operator.contains,
    "__delitem__": operator.delitem,
    "__eq__": operator.eq,
    "__getitem__": operator.getitem,
    "__hash__": hash,
    "__iter__": iter,
    "__len__": len,
    "__or__": operator.or_,
    "__repr__": repr,
    "__setitem__": operator.setitem,
}


def _forward(operate: Callable[..., Any]) -> Callable[..., Any]:
    return lambda later, *values, **named: operate(fetched(later), *values, **named)


for _name, _operate in OPERATORS.items():
    setattr(Later, _name, _forward(_operate))


def fetched(later: Later) -> Any:
    """Return the object that `later` stands for; import its module now if need be."""
    kept = later.__dict__
    if "own" not in kept:
        kept["own"] = _named(kept["module"], kept["name"])
    return kept["own"]


def _named(module: str, name: str) -> Any:
    """Return what `from module import name` gives once the module is imported."""
    home = STATE.deferred.take(module)
    try:
        return getattr(home, name)
    except AttributeError:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{module}.{name}")
        raise


def _as_it_is(function: Any = None, *values: object, **named: object) -> Any:
    """Return the function, as a decorator with or without settings."""
    return function if function is not None else _as_it_is


COMPILER: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "allow_in_graph": _as_it_is,
        "assume_constant_result": _as_it_is,
        "disable": _as_it_is,
        "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
    },
    "vllm.compilation.passes.fusion.allreduce_rms_fusion": {"FI_ALLREDUCE_FUSION_MAX_SIZE_MB": {}},
}
"""What is known of a compiler that compiles nothing: a function stays as it is, and no size of batch is fused."""


class DeferredModule(ModuleType):
    """A module that is not imported yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in COMPILER.get(self.__name__, ()):
            return COMPILER[self.__name__][name]
        if f"{self.__name__}.{name}" in AT_ONCE:
            return importlib.import_module(f"{self.__name__}.{name}")
        return Later(self.__name__, name) if _imports(sys._getframe(1)) else _named(self.__name__, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            setattr(STATE.deferred.take(self.__name__), name, value)


def _imports(frame: FrameType) -> bool:
    """Whether a frame asks for an attribute because of `from MODULE import ..`."""
    if frame.f_globals.get("__name__") in IMPORTERS:
        return True
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == IMPORTS


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the deferred modules, and those inside them, until one of them is needed."""

    def __init__(self, modules: Sequence[str], at_once: Sequence[str] = ()) -> None:
        self._modules, self._at_once = list(modules), at_once

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._at_once or not self._root(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        return spec and importlib.machinery.ModuleSpec(
            fullname, self, origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.submodule_search_locations is not None and spec.origin:
            module.__path__ = [str(Path(spec.origin).parent)]

    def take(self, name: str) -> ModuleType:
        """Import a module, and no longer defer the deferred one that it is or is in."""
        root = self._root(name)
        if root:
            self._modules.remove(root)
            for other, module in list(sys.modules.items()):
                if isinstance(module, DeferredModule) and _inside(other, root):
                    del sys.modules[other]
        return importlib.import_module(name)

    def _root(self, name: str) -> str:
        return next((root for root in self._modules if _inside(name, root)), "")


def _inside(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def defer() -> None:
    """Import the modules of `MODULES` when they are needed, and compile nothing, from now on in this process."""
    import torch

    if STATE.deferred is not None or "vllm" in sys.modules:
        return
    STATE.deferred = Finder([name for name in MODULES if name not in sys.modules], AT_ONCE)
    sys.meta_path.insert(0, STATE.deferred)
    torch.compile = _as_it_is
