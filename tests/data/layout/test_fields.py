"""A model's config.json is checked where it is read: one line names the field, whatever stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.layout.config import shape_of, state_dtype_of

CONFIGS = Path(__file__).parent / "configs"
WRONG: tuple[Any, ...] = ("x", [], {}, -1, 0, 1.5, True, 10**12, [[1]], "9" * 5000)


def fields() -> list[tuple[str, str]]:
    """Each field of each family's config that its shape depends on."""
    found = []
    for path in sorted(CONFIGS.glob("*.json")):
        config = json.loads(path.read_text())
        text = config.get("text_config") or config
        for name in text:
            without = {key: value for key, value in text.items() if key != name}
            try:
                needed = shape_of(without, "m") != shape_of(text, "m")
            except UsageError:
                needed = True
            if needed:
                found.append((path.name, name))
    return found


@pytest.mark.parametrize(("file", "name"), fields())
def test_a_field_of_another_type_is_named(file: str, name: str) -> None:
    config = json.loads((CONFIGS / file).read_text())
    refused = 0
    for wrong in WRONG:
        changed = json.loads(json.dumps(config))
        (changed.get("text_config") or changed)[name] = wrong
        try:
            shape_of(changed, "m")
            state_dtype_of(changed)
        except UsageError as error:
            refused += 1
            assert len(error.message.splitlines()) == 1 and len(error.message) < 400 and error.hint
    assert refused, "every one of these was taken"


def test_a_text_config_that_is_no_object_is_named() -> None:
    with pytest.raises(UsageError, match="text_config"):
        shape_of({"text_config": [1]}, "m")


def test_a_number_that_is_written_as_a_float_is_taken() -> None:
    config = json.loads((CONFIGS / "granite-4.0-h-tiny.json").read_text())
    assert shape_of({**config, "hidden_size": float(config["hidden_size"])}, "m") == shape_of(config, "m")
