"""Names that models have on the hub, and the built-in layouts that stand for them: by family and size, assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtune.data.layout.models import builtin

QUANTIZED = re.compile(
    r"fp8|nvfp4|mxfp4|awq|gptq|auto-?round|exl3|bnb|w\da\d+|int-?[468]|(?<![a-z\d])[468]-?bit|\dbpw|gguf|q\d_"
)
"""What a name says of weights that are not stored in 16 bits."""
NAMES = Path(__file__).parent / "names.json"
"""What names have in them, and the layout that this stands for; of several, the first."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """A built-in layout that stands for a model. `weights`: whether the model's weights are stored as the layout's."""

    name: str
    layout: str
    weights: bool

    @property
    def said(self) -> str:
        differs = "" if self.weights else ", and its weights are quantized, of a size that is not known"
        return f"layout of {self.layout}, assumed for {self.name}: its config.json was not read{differs}"


def assumed(model: str) -> Assumed | None:
    """Return the built-in layout that a name on the hub, or a folder's, stands for; None if none does."""
    name = model.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    named: list[tuple[str, str]] = msgspec.json.decode(NAMES.read_bytes(), type=list[tuple[str, str]])
    for pattern, layout in named:
        match = re.search(pattern, name)
        shape = match.expand(layout) if match else ""
        if builtin(shape) is not None:
            return Assumed(model, shape, weights=shape.endswith("-fp8") or QUANTIZED.search(name) is None)
    return None
