"""Methods of vLLM's classes that a part of the core has replaced, so that it can put them all back."""

from __future__ import annotations

from typing import Any


class Replaced:
    """One part's replacements, in the order they were made."""

    def __init__(self) -> None:
        self._was: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, method: Any) -> None:
        """`owner.name` is `method` from now on."""
        self._was.append((owner, name, vars(owner)[name]))
        setattr(owner, name, method)

    def undo(self) -> None:
        """Everything is what it was before `put`."""
        while self._was:
            owner, name, method = self._was.pop()
            setattr(owner, name, method)
