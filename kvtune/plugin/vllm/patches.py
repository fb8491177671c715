"""The registry of everything that kvtune replaces in vLLM, one in each process (`plugin_state.py`).

Each part of kvtune (`steps.scheduler`, `probe.plugin` ..) adds its own patches, and undoes them all at once. Several
parts may wrap one symbol: the last one added is the outermost, and any of them can be undone without the others.
docs/internals.md lists them all; tests/plugin/vllm/test_patches.py compares the list with the patches of this registry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar, cast

Function = Callable[..., object]
Owner = type | ModuleType
"""The owner of a symbol: a class or a module."""

F = TypeVar("F", bound=Function)
Instance = TypeVar("Instance")
Result = TypeVar("Result")
Wrap = Callable[[Function], Function]
"""Takes a symbol's present function, and returns the one that replaces and calls it."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement by one part."""

    symbol: str
    part: str


@dataclass(frozen=True, slots=True)
class _Entry:
    part: str
    wrap: Wrap


@dataclass(slots=True)
class _Symbol:
    owner: Owner
    name: str
    stock: Function | classmethod[object, ..., object]
    entries: list[_Entry]


class Patches:
    """The replacements of this process, in the order they were made."""

    def __init__(self) -> None:
        self._symbols: dict[tuple[Owner, str], _Symbol] = {}
        self._order: list[Patch] = []

    def wrap(self, part: str, owner: Owner, name: str, wrap: Callable[[F], F]) -> None:
        """Replace `owner.name`, which this class or module defines, by `wrap` of the present function.

        Classmethods are unwrapped for `wrap` and wrapped again. The new function names the former one in
        `__wrapped__`, by which the manifest's check recognizes it.
        """

        put = cast("Wrap", wrap)  # a part knows the type of the symbol that it names

        def wrapped(inner: Function) -> Function:
            return functools.wraps(inner)(put(inner))

        self._add(part, owner, name, wrapped)

    def after(self, part: str, owner: type[Instance], name: str, act: Callable[[Instance], object]) -> None:
        """Call `act` with the instance each time the method has returned."""

        def wrap(method: Function) -> Function:
            def followed(instance: Instance, *args: object, **options: object) -> object:
                result = method(instance, *args, **options)
                act(instance)
                return result

            return followed

        self.wrap(part, owner, name, wrap)

    def before(self, part: str, owner: type[Instance], name: str, act: Callable[[Instance], object]) -> None:
        """Call `act` with the instance each time the method is about to run."""

        def wrap(method: Function) -> Function:
            def preceded(instance: Instance, *args: object, **options: object) -> object:
                act(instance)
                return method(instance, *args, **options)

            return preceded

        self.wrap(part, owner, name, wrap)

    def replace(self, part: str, owner: Owner, name: str, function: Function) -> None:
        """Replace `owner.name` by `function`, which does not call the former one."""
        self._add(part, owner, name, lambda _: function)

    def undo(self, part: str) -> None:
        """Undo all patches of one part; those of other parts stay."""
        for key, symbol in list(self._symbols.items()):
            kept = [entry for entry in symbol.entries if entry.part != part]
            if len(kept) < len(symbol.entries):
                self._set(symbol, kept)
            if not kept:
                del self._symbols[key]
        self._order = [patch for patch in self._order if patch.part != part]

    def installed(self) -> tuple[Patch, ...]:
        """Return the patches in the order they were added: of one symbol's patches the last is the outermost."""
        return tuple(self._order)

    def _add(self, part: str, owner: Owner, name: str, wrap: Wrap) -> None:
        symbol = self._symbols.get((owner, name)) or _Symbol(owner, name, vars(owner)[name], [])
        self._set(symbol, [*symbol.entries, _Entry(part, wrap)])
        self._symbols[owner, name] = symbol
        self._order.append(Patch(_full_name(owner, name), part))

    def _set(self, symbol: _Symbol, entries: list[_Entry]) -> None:
        stock = symbol.stock
        value = stock
        if entries:
            function = stock.__func__ if isinstance(stock, classmethod) else stock
            for entry in entries:
                function = entry.wrap(function)
            value = classmethod(function) if isinstance(stock, classmethod) else function
        setattr(symbol.owner, symbol.name, value)
        symbol.entries = entries


def in_place_of(owner: object, name: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorate a function that is called in place of this one object's method, which it gets before the arguments."""

    def put(function: Callable[..., Result]) -> Callable[..., Result]:
        setattr(owner, name, functools.partial(function, getattr(owner, name)))
        return function

    return put


def _full_name(owner: Owner, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    return f"{owner.__module__}.{owner.__qualname__}.{name}"
