"""What the skill for coding agents says is true: its commands exist, its fields are in the schemas."""

from __future__ import annotations

import re
from pathlib import Path

from bench.doc_tables import commands
from kvtune.cli.schema import schemas

SKILL = (Path(__file__).parents[2] / "skills" / "kvtune" / "SKILL.md").read_text(encoding="utf-8")


def test_its_commands_and_options_exist() -> None:
    known = dict(commands())
    lines = re.findall(r"`kvtune ([a-z]+)((?: [^`]*)?)`", SKILL)
    assert len(lines) >= 10
    for name, rest in lines:
        command = next((c for full, c in known.items() if full == name), None)
        if command is None:
            assert any(full.startswith(f"{name} ") for full in known), name
            continue
        options = {option for p in command.params for option in p.opts}
        for option in re.findall(r"(?<!\S)--[a-z-]+|(?<!\S)-[a-z]\b", rest):
            assert option in options, f"kvtune {name} {option}"


def test_the_fields_that_it_names_are_in_the_schemas() -> None:
    text = str(schemas())
    for field in (
        "misses",
        "hit_tokens",
        "complete",
        "texts",
        "remedies",
        "needs",
        "infinite",
        "curve",
        "errors",
        "verdict",
        "valid",
        "timings",
        "comparisons",
        "figures",
        "recipe",
        "prefix_cache",
    ):
        assert f"'{field}'" in text, field


def test_it_is_one_page_and_starts_as_a_skill_does() -> None:
    assert SKILL.startswith("---\nname: kvtune\ndescription: ")
    assert len(SKILL.splitlines()) <= 45
