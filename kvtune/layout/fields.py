"""Reads and checks the fields of a model's config.json: the file may be damaged.

A field that is missing or has a wrong type is a UsageError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune.errors import UsageError

Config = dict[str, Any]

MOST = 1 << 31
"""The largest accepted number of heads, elements or tokens."""
MOST_LAYERS = 100_000


def text_config(config: Config) -> Config:
    """Return the part of the config that describes the language model, or the whole config if it has no such part."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise UsageError("field text_config is no JSON object", "give the model's whole config.json")
    return text


def text_of(config: Mapping[str, Any], name: str) -> str:
    """Return a field that is text; empty if it is missing."""
    value = config.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise _wrong(name, value, "text")


class Fields:
    """A config's fields by name; `source` names the config in errors."""

    def __init__(self, config: Config, source: str) -> None:
        self.config = config
        self.source = source

    def number(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return the first of the fields `names` that the config has, a whole number between `least` and `most`."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                return self._whole(name, value, least, most)
        if default is not None:
            return default
        raise UsageError(f"{self.source}: field {names[0]} is missing", "give the model's whole config.json")

    def _whole(self, name: str, value: object, least: int, most: int) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not least <= value <= most:  # type: ignore[operator]
            raise _wrong(name, value, f"a whole number from {least} to {most:,}", self.source)
        return int(value)  # type: ignore[call-overload, no-any-return]

    def items(self, name: str) -> list[Any]:
        """Return a field that is a list; empty if it is missing."""
        value = self.config.get(name)
        if value is None or isinstance(value, list):
            return value or []
        raise _wrong(name, value, "a list", self.source)

    def text(self, name: str) -> str:
        try:
            return text_of(self.config, name)
        except UsageError as error:
            raise UsageError(f"{self.source}: {error.message}", error.hint) from error

    def layers(self) -> int:
        return self.number("num_hidden_layers", most=MOST_LAYERS)

    def kv_heads(self) -> int:
        return self.number("num_key_value_heads", default=self.number("num_attention_heads"))

    def head_dim(self) -> int:
        heads = self.number("num_attention_heads")
        # Zamba2's attention reads hidden states and embeddings, concatenated.
        inputs = 2 if self.config.get("model_type") == "zamba2" else 1
        names = ("attention_head_dim",) if inputs == 2 else ("head_dim", "attention_head_dim")
        return self.number(*names, default=0) or self.share(
            "hidden_size", inputs * self.number("hidden_size"), heads
        )

    def share(self, name: str, whole: int, parts: int) -> int:
        """Return `whole` (the value of field `name`) // `parts`; UsageError if that is 0."""
        if whole < parts:
            raise UsageError(
                f"{self.source}: field {name} is too small for {parts:,} heads",
                "repair the model's config.json",
            )
        return whole // parts

    def layer_kinds(self) -> list[str]:
        """Return the kind of each layer in order; empty if the config does not list them."""
        if pattern := self.text("hybrid_override_pattern"):
            return list(pattern)
        kinds = self.items("layer_types") or self.items("layers_block_type")
        if not all(isinstance(kind, str) for kind in kinds):
            raise UsageError(
                f"{self.source}: field layer_types holds a value that is not text",
                "give the model's whole config.json",
            )
        return kinds


def _wrong(name: str, value: object, wanted: str, source: str = "") -> UsageError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}.."
    return UsageError(
        f"{source}{': ' if source else ''}field {name} is {shown}, not {wanted}",
        "repair the model's config.json",
    )
