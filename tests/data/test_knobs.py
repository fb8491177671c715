"""The catalogue of knobs: one entry is all that a knob needs, and no other file lists knobs again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.knobs import CORE, ENGINE, GROUPS, KNOBS, SEARCHED, TIER, Knob, ModelFacts, knob_of, named
from tests.copies import after, copied, python
from tests.simulator import check_schema

NEW = "long_prefill_token_threshold"
ENTRY = f"""        _count(
            "{NEW}",
            "a prompt of more tokens than this is long; 0: no prompt is",
            "scheduler",
            low=0,
            unit="tokens",
            worth=lambda facts: (0, 512),
            config="scheduler",
        ),
"""
MODELS = [
    ModelFacts(),
    ModelFacts(window=512),
    ModelFacts(
        state_layers=3, alignment=32, blocks=(32, 64), layouts=((("block_size", 64),), (("packed", True),))
    ),
    ModelFacts(unknown="no config.json"),
]


@pytest.mark.parametrize("facts", MODELS, ids=["plain", "windows", "states", "unknown"])
@pytest.mark.parametrize(
    "knob", [knob for knob in KNOBS.values() if knob.searched], ids=lambda knob: knob.name
)
def test_every_value_worth_a_trial_is_legal(knob: Knob, facts: ModelFacts) -> None:
    assert knob.candidates(facts)
    for value in knob.candidates(facts):
        read = knob.read_for(str(value), facts)
        assert read == value and type(read) is type(value)


def test_groups_and_the_tier_come_from_the_catalogue() -> None:
    assert {name for names in GROUPS.values() for name in names} == {
        k.name for k in KNOBS.values() if k.group
    }
    assert set(TIER) < set(ENGINE) and "kv_offloading_size" not in TIER
    assert set(CORE) < set(SEARCHED)


def test_names_are_taken_as_people_write_them() -> None:
    assert named("core.pin-window") == "pin_window"
    assert named("retention") == "prefix_cache_retention_interval"
    with pytest.raises(UsageError) as error:
        named("max_model_len")
    assert "there is no knob" in str(error.value)
    assert knob_of("rope_theta").help == "vLLM's --rope-theta"


@pytest.mark.full
@pytest.mark.vllm
def test_a_new_knob_is_one_entry(tmp_path: Path) -> None:
    """In a copy of kvtune with one more entry the knob is swept, documented and taken from recipes."""
    place = "ENGINE: dict[str, Knob] = {\n    knob.name: knob\n    for knob in (\n"
    after(copied(tmp_path, "recipes", "tests", "bench") / "data" / "knobs.py", place, ENTRY)
    script = f"""
import json
from kvtune.data import knobs
from kvtune.data.file_flags import allowed_flags
from kvtune.plugin.probe.kv_specs import CONFIG_FIELDS
from kvtune.data.recipe import check_engine_settings
from bench.doc_tables import engine_knob_table
assert knobs.__file__.startswith({str(tmp_path)!r}), knobs.__file__
check_engine_settings({{"{NEW}": 512}}, "r.toml", "[engine]")
print(json.dumps({{
    "flags": allowed_flags(["--{NEW.replace("_", "-")}", "512"], "run"),
    "documented": list(engine_knob_table()),
    "captured": CONFIG_FIELDS["scheduler_config"],
}}))
"""
    answer = json.loads(python(tmp_path, "-c", script))
    assert NEW in answer["captured"]
    assert answer["flags"] == [f"--{NEW.replace('_', '-')}", "512"]
    assert any(f"`{NEW}`" in row for row in answer["documented"])
    load = "rounds:prefixes=2,prefix=64,suffix=16,output=4,rounds=2"
    pool = ["--max-model-len", "512", "--num-gpu-blocks-override", "200"]
    sweep = ["sweep", "tiny-llama", "-w", load, "--on", "sim", "--set", f"{NEW}=0,512", "-o", "out"]
    printed = python(tmp_path, "-m", "kvtune", *sweep, "--json", "--", *pool)
    check_schema(sweep, printed)
    study = json.loads(printed)
    assert sorted(t["settings"][NEW] for t in study["trials"] if t["settings"]) == [0, 512]
    (journal,) = (tmp_path / "out").glob("*.jsonl")
    assert "a prompt of more tokens than this is long" in python(
        tmp_path, "-m", "kvtune", "report", str(journal), "--console"
    )
    (page,) = (tmp_path / "out").glob("*.html")
    assert f"<dt>{NEW}, tokens</dt>" in page.read_text(encoding="utf-8")
