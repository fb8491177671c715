"""Recipes: what is written is read again; damaged, edited and foreign ones are refused; export is data only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.recipes import shelf
from kvtune.answers.tune.recipes import verify as verifying
from kvtune.answers.tune.recipes.make import simulated_recipe
from kvtune.answers.tune.recipes.serving import serving
from kvtune.answers.tune.recipes.shelf import export, load
from kvtune.answers.tune.recipes.verify import other_states, refuse_foreign, state_of
from kvtune.answers.tune.result import Trial
from kvtune.base.commands import exported_serve
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.file_flags import allowed_flags
from kvtune.data.knobs import ENGINE
from kvtune.data.layout.models import SHAPES, builtin
from kvtune.data.recipe import (
    About,
    Recipe,
    Scalar,
    checksum,
    differences,
    engine_flags,
    read_recipe,
    to_toml,
    write_recipe,
)
from kvtune.data.show.screen import document_lines
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.report.recipe import document
from kvtune.requests.loads.spec import build

ABOUT = About(model="tiny-gemma3", device="cpu", vllm="0.32.0", kvtune="0.1.0", status="confirmed")
EVIDENCE = {
    "objective": "hit-rate",
    "workload": "rounds:prefixes=2",
    "seed": 0,
    "workload_hash": "h",
    "engine_args": ["--block-size", "32"],
    "figures": {"ttft_ms_mean": {"baseline": 1.5, "verdict": "better"}},
}
RECIPE = Recipe(
    recipe=ABOUT,
    engine={"block_size": 32, "prefix_cache_retention_interval": "none", "enable_prefix_caching": True},
    core={"slack": 128, "freeze": False, "ghost_factor": 0.65},
    evidence=EVIDENCE,
)


@pytest.fixture(autouse=True)
def vllm_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is installed: elsewhere the recipe has expired."""
    monkeypatch.setattr(verifying, "check_engine", lambda: ABOUT.vllm)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    write_recipe(RECIPE, path)
    return path


scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=10)
tables = st.recursive(
    scalars | st.lists(scalars, max_size=3),
    lambda inner: st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(names, tables, max_size=5))
def test_any_data_survives_toml(data: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(data)) == data


@pytest.mark.parametrize(
    ("before", "after"),
    [("slack = 128", "slack = 129"), ("block_size = 32", "block_size = 64"), ('"better"', '"worse"')],
)
def test_an_edited_recipe_is_refused(written: Path, before: str, after: str) -> None:
    text = written.read_text()
    assert before in text
    written.write_text(text.replace(before, after))
    with pytest.raises(UsageError, match="checksum"):
        read_recipe(written)


def test_a_confirmed_recipe_needs_a_checksum(written: Path) -> None:
    lines = [line for line in written.read_text().splitlines() if not line.startswith("checksum")]
    written.write_text("\n".join(lines))
    with pytest.raises(UsageError, match="checksum"):
        read_recipe(written)
    written.write_text("\n".join(lines).replace('"confirmed"', '"hand-written"'))
    assert read_recipe(written).recipe.status == "hand-written"


def test_flags() -> None:
    assert engine_flags(RECIPE.engine) == [
        *("--block-size", "32", "--prefix-cache-retention-interval", "None", "--enable-prefix-caching")
    ]


def test_differences_name_what_differs() -> None:
    assert differences(RECIPE, vllm="0.32.0+cpu") == []
    assert differences(RECIPE, vllm="0.33.0") == ["vLLM 0.32.0 (here: 0.33.0)"]


QWEN = msgspec.structs.replace(
    RECIPE, recipe=msgspec.structs.replace(ABOUT, model="tiny-qwen3next", state_dtype="bfloat16")
)


@pytest.mark.parametrize(
    ("has", "args", "other"),
    [
        ("1", [], ["recurrent states in bfloat16 (here: float32)"]),
        ("0", [], []),
        ("1", ["--mamba-ssm-cache-dtype", "bfloat16"], []),
    ],
)
def test_a_recipe_says_where_states_are_of_another_type(
    monkeypatch: pytest.MonkeyPatch, has: str, args: list[str], other: list[str]
) -> None:
    """The CPU decides it, so blocks and hits differ from the evidence's; the recipe is not refused."""
    monkeypatch.setattr("kvtune.answers.tune.space.model.is_cpu_build", lambda: True)
    monkeypatch.setenv("KVTUNE_AVX512_BF16", has)
    recipe = msgspec.structs.replace(QWEN, evidence={**EVIDENCE, "engine_args": args})
    assert other_states(recipe) == other
    assert state_of(recipe) == ", made with ".join(["confirmed", *other])
    refuse_foreign(recipe, "r.toml", anyway=False, model="tiny-qwen3next")
    older = msgspec.structs.replace(recipe, recipe=msgspec.structs.replace(recipe.recipe, state_dtype=""))
    assert other_states(older) == []


def test_the_type_of_states_is_under_the_checksum_and_older_recipes_keep_theirs(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    write_recipe(QWEN, path)
    assert read_recipe(path).recipe.state_dtype == "bfloat16"
    path.write_text(path.read_text().replace('state_dtype = "bfloat16"', 'state_dtype = "float32"'))
    with pytest.raises(UsageError, match="checksum"):
        read_recipe(path)
    write_recipe(RECIPE, path)  # without states, as every recipe from before the field
    path.write_text(path.read_text().replace('state_dtype = ""\n', ""))
    assert read_recipe(path).recipe == msgspec.structs.replace(ABOUT, checksum=checksum(RECIPE))


@pytest.mark.parametrize("name", [name for name in ENGINE if name != "eviction_policy"])
def test_no_engine_setting_takes_a_flag_for_its_value(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.toml"
    for value in ("--trust-remote-code", "--host=0.0.0.0", "1", "true", "", -1, 1e300):
        write_recipe(msgspec.structs.replace(RECIPE, engine={name: value}), path)
        with pytest.raises(UsageError, match=rf"r\.toml: {name} = .* is not allowed in \[engine\]$"):
            read_recipe(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", True),
        ("block_size", 32.5),
        ("num_gpu_blocks_override", 1 << 40),
        ("gpu_memory_utilization", 2.0),
        ("enable_prefix_caching", 1),
        ("trust_remote_code", True),
        ("middleware", "evil_module"),
        ("worker_cls", "x"),
        ("load_format", "x"),
        ("eviction_policy", "fifo"),
        ("eviction_policy", "kvtune"),
        ("blocks_per_chunk", 0),
        ("blocks_per_chunk", True),
        ("store_threshold", -1),
        ("store_threshold", 1.5),
        ("offload_prompt_only", "no"),
        ("max_tracker_size", 0),
    ],
)
def test_an_engine_setting_has_its_name_type_and_range(tmp_path: Path, name: str, value: Scalar) -> None:
    path = tmp_path / "r.toml"
    write_recipe(msgspec.structs.replace(RECIPE, engine={name: value}), path)
    with pytest.raises(UsageError, match=rf"r\.toml: {name}.* is not allowed in \[engine\]$") as refused:
        read_recipe(path)
    assert "take" in refused.value.hint


@pytest.mark.parametrize(
    "field", ["model", "device", "vllm", "kvtune", "python", "device_name", "created", "note"]
)
def test_text_of_a_recipe_that_is_no_line_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "r.toml"
    for breaks in ("\r", "\n", "\x85", "\u2028", "\u2029", "\x1b]0;owned\x07", "\u202e", "\x00"):
        about = msgspec.structs.replace(ABOUT, **{field: f"0.32.0{breaks}trust-remote-code: true{breaks}#"})
        write_recipe(msgspec.structs.replace(RECIPE, recipe=about), path)
        with pytest.raises(UsageError, match=rf"\[recipe\] {field} = ") as refused:
            read_recipe(path)
        assert refused.value.message.isprintable()


BREAKS = (
    "\r",
    "\n",
    "\x85",
    "\u2028",
    "\u2029",
    "\t",
    "\x00",
    "'",
    '"',
    "\U0001f600",
    ": ",
    " #",
    "\\",
    "$(id)",
    "`id`",
)


@pytest.mark.parametrize("breaks", BREAKS, ids=ascii)
def test_no_text_of_a_recipe_leaves_its_place_in_the_exported_files(tmp_path: Path, breaks: str) -> None:
    """Even of one that read_recipe refuses; by a plain reader of YAML, by vLLM's own where it is, and by a shell."""
    text = f"a{breaks}trust-remote-code: true{breaks}#"
    about = msgspec.structs.replace(ABOUT, vllm=text, device=text, model=text)
    evil = msgspec.structs.replace(RECIPE, recipe=about, core={"policy": text})
    config, env = export(evil, tmp_path / "x")
    written = config.read_text(encoding="utf-8")
    named = yaml.safe_load(written)
    assert named["model"] == text and named.keys() == {"model", *(n.replace("_", "-") for n in RECIPE.engine)}
    assert not any(line.startswith("trust") for line in written.splitlines())
    said = subprocess.run(
        ["sh", "-ec", f". {shlex.quote(str(env))}; env -0"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    (settings,) = [line.partition("=")[2] for line in said if line.startswith("KVTUNE_SET=")]
    assert json.loads(settings) == {"policy": text}
    assert all(line.isprintable() for line in env.read_text(encoding="utf-8").split("\n"))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllms_own_reader_finds_what_was_exported(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    text = "0.32.0\rtrust-remote-code: true\x85#"
    about = msgspec.structs.replace(ABOUT, vllm=text, model="org/name")
    config, _ = export(msgspec.structs.replace(WITH_TIER, recipe=about), tmp_path)
    words = FlexibleArgumentParser().load_config_file(str(config))
    assert words[:6] == ["--model", "org/name", "--block-size", "32", "--kv-offloading-size", "0.5"]
    assert words[6] == "--kv-transfer-config" and len(words) == 8
    assert json.loads(words[7]) == {"kv_connector_extra_config": TIER}


def test_a_full_disk_leaves_nothing_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shelf.creating

    @contextlib.contextmanager
    def full(path: Path) -> Iterator[IO[bytes]]:
        if path.name == "env.sh":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with real(path) as file:
            yield file

    monkeypatch.setattr(shelf, "creating", full)
    with pytest.raises(KvtuneError, match="No space left"):
        export(RECIPE, tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []
    monkeypatch.undo()
    assert all(path.is_file() for path in export(RECIPE, tmp_path / "x"))


def test_an_exported_recipe_has_its_api_servers(tmp_path: Path) -> None:
    config, _ = export(msgspec.structs.replace(RECIPE, engine={"api_server_count": 2}), tmp_path / "x")
    assert "api-server-count: 2" in config.read_text().splitlines()


@pytest.mark.parametrize(
    ("model", "named"),
    [("tiny-granite", True), ("gemma-3-4b", False), ("some/hub-model", True), ("./a folder", True)],
)
def test_an_exported_recipe_says_what_plain_vllm_must_know(tmp_path: Path, model: str, named: bool) -> None:
    about = msgspec.structs.replace(ABOUT, model=model)
    engine_settings = {"block_size": 64, "enable_prefix_caching": True}
    config, _ = export(msgspec.structs.replace(RECIPE, recipe=about, engine=engine_settings), tmp_path / "x")
    served = yaml.safe_load(config.read_text())
    assert ("model" in served) == named, (
        "a published shape has no weights here: MODEL is named by whoever serves"
    )
    assert (" serve --config " in exported_serve("stock", shape=model in SHAPES)) == named
    assert served["block-size"] == 64
    if model == "tiny-granite":
        assert Path(served["model"], "config.json").is_file()
        assert served["served-model-name"] == model
        assert served["enforce-eager"] is served["skip-tokenizer-init"] is True
        assert served["enable-prefix-caching"] is True, (
            "the recipe's own settings go over what the model needs"
        )
    else:
        assert served.get("model", model) == model
        assert "load-format" not in served


def test_an_exported_environment_gives_each_start_counters_of_its_own(tmp_path: Path) -> None:
    _, env = export(RECIPE, tmp_path / "it's here")
    script = f"for i in 1 2; do . {shlex.quote(str(env))}; env | grep ^KVTUNE_; done"
    shell = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    done = subprocess.run(["sh", "-ec", script], env=shell, capture_output=True, text=True, check=True)
    variables = [line.partition("=")[::2] for line in done.stdout.splitlines()]
    assert [json.loads(v) for n, v in variables if n == "KVTUNE_SET"] == [RECIPE.core] * 2
    assert [v for n, v in variables if n == "KVTUNE_CORE"] == ["kvtune"] * 2
    folders = {v for n, v in variables if n == "KVTUNE_METRICS_DIR"}
    assert len(folders) == 2 and not any(Path(folder).exists() for folder in folders)  # the server makes it


def test_the_bench_of_a_recipe() -> None:
    bench, settings = Setup.of_recipe(RECIPE, "r.toml"), RECIPE.knobs
    assert bench.engine_args == ["--block-size", "32"]
    assert settings["slack"] == 128
    with pytest.raises(UsageError, match="evidence"):
        Setup.of_recipe(msgspec.structs.replace(RECIPE, evidence={}), "r.toml")


def test_evidence_that_this_kvtune_does_not_know_is_kept_and_not_used(tmp_path: Path) -> None:
    """A recipe of another version: it is read with its checksum, sets what it sets, and cannot be verified."""
    path = tmp_path / "r.toml"
    write_recipe(msgspec.structs.replace(RECIPE, evidence={"other": {"up_to": 0, "runs": "no list"}}), path)
    read = read_recipe(path)
    assert read.knobs == RECIPE.knobs and read.evidence["other"]["up_to"] == 0
    said = " ".join(document_lines(document(read, "r", "")))
    assert "No evidence" in said and "It names no load that it was measured with." in said
    with pytest.raises(UsageError, match=r"\[evidence\] lacks 'workload'"):
        Setup.of_recipe(read, str(path))


def test_serving_becomes_vllm_serve(written: Path, tmp_path: Path) -> None:
    made = serving(
        "tiny-gemma3", written, tmp_path / "t.jsonl", ["--port", "1", "--block-size", "64"], {"A": "b"}
    )
    at = made.command.index("kvtune.lab.engine.serve")
    assert made.command[at + 1].endswith("tiny-gemma3")
    assert made.command.count("--block-size") == 1
    assert "64" in made.command
    assert msgspec.json.decode(made.environment["KVTUNE_SET"]) == RECIPE.core
    assert made.environment["KVTUNE_CORE"] == "kvtune"
    assert (tmp_path / "t.jsonl").read_bytes() == b""
    with pytest.raises(UsageError, match="exists"):
        serving("tiny-gemma3", None, tmp_path / "t.jsonl", [], {})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", "other", "for the model"),
        ("vllm", "0.31.0", "expired"),
        ("device", "cuda", "for the device"),
        ("device", "timed", "for the device"),
    ],
)
def test_foreign_recipes_are_refused(tmp_path: Path, field: str, value: str, says: str) -> None:
    """Also one that `tune --on host` made: it may be verified on a simulated device, not served here."""
    path = tmp_path / "r.toml"
    about = msgspec.structs.replace(ABOUT, **{field: value})
    evidence = {**RECIPE.evidence, **({"engine_on": "host"} if value == "timed" else {})}
    write_recipe(msgspec.structs.replace(RECIPE, recipe=about, evidence=evidence), path)
    with pytest.raises(UsageError, match=says):
        serving("tiny-gemma3", path, None, [], {})
    assert serving("tiny-gemma3", path, None, [], {}, anyway=True).command


SHIPPED = sorted((Path(__file__).parents[4] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_recipe_is_whole_can_be_verified_and_stands_in_the_list(path: Path, tmp_path: Path) -> None:
    loaded = load(path)
    assert loaded.recipe.checksum and loaded.recipe.status in ("confirmed", "simulated")
    bench, settings = Setup.of_recipe(loaded, path.name), loaded.knobs
    assert build(bench.load.spec, seed=bench.load.seed).hash == bench.load.hash
    assert bench.model == loaded.recipe.model and builtin(bench.model) is not None
    assert bench.with_knobs(settings).engine_args
    about = f"| `{path.stem}` | {loaded.recipe.status} |"
    text = path.with_name("README.md").read_text()
    assert about in text and bench.load.spec in text
    if loaded.recipe.status == "confirmed":
        hits = loaded.evidence["figures"]["prefix_cache_hit_rate"]
        stock, mine = hits["baseline"], hits["recipe"]
        assert hits["verdict"] == "better" and len(loaded.evidence["runs"]) >= 2
    else:
        stock, mine = loaded.evidence["simulated_baseline"], loaded.evidence["simulated"]
    assert f"| {100 * stock:.1f} % | {100 * mine:.1f} % |" in text
    assert mine > stock
    export(loaded, tmp_path)


def test_recipes_are_shipped() -> None:
    assert {p.stem for p in SHIPPED} >= {
        "tiny-gemma3-cpu",
        "gemma-3-4b-cpu",
        "gpt-oss-20b-cpu",
        "qwen3-next-80b-cpu",
    }


TIER = {"eviction_policy": "lru", "blocks_per_chunk": 2, "store_threshold": 0, "offload_prompt_only": True}
WITH_TIER = msgspec.structs.replace(RECIPE, engine={"block_size": 32, "kv_offloading_size": 0.5, **TIER})


def test_a_recipes_tier_is_read_again_and_becomes_the_connectors_settings(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    write_recipe(WITH_TIER, path)
    assert read_recipe(path).engine == WITH_TIER.engine
    *first, flag, text = engine_flags(WITH_TIER.engine)
    assert first == ["--block-size", "32", "--kv-offloading-size", "0.5"]
    assert (flag, json.loads(text)) == ("--kv-transfer-config", {"kv_connector_extra_config": TIER})
    flags = engine_flags(WITH_TIER.engine)
    assert allowed_flags(flags, "r.toml") == flags, "what a recipe sets, a run with it may have recorded"


def test_a_flag_of_the_tier_goes_over_the_recipes_one(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    write_recipe(WITH_TIER, path)
    flags = ["--kv-transfer-config", '{"kv_connector_extra_config": {"eviction_policy": "arc"}}']
    command = serving("tiny-gemma3", path, None, flags, {}, anyway=True).command
    assert command.count("--kv-transfer-config") == 1
    extra = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra == {**TIER, "eviction_policy": "arc"}


def test_a_recipe_has_the_tier_of_its_flags_and_what_the_search_changed_of_it() -> None:
    given = '{"kv_connector_extra_config": {"eviction_policy": "arc", "max_tracker_size": 9}}'
    bench = Setup(
        model="tiny-gemma3",
        load=Load(spec="rounds", seed=0, hash="h"),
        engine_args=["--kv-offloading-size", "0.5", "--kv-transfer-config", given],
        core="kvtune",
    )
    summary = {"prefix_cache": {"hit_rate": 0.5}}
    best = Trial(number=1, settings={"eviction_policy": "lru"}, on="sim", summary=summary)
    made = simulated_recipe(bench, OBJECTIVES["hit-rate"], best, best, 1)
    tier = {"eviction_policy": "lru", "max_tracker_size": 9}
    assert made.engine == {"kv_offloading_size": 0.5, **tier}
    verified, settings = Setup.of_recipe(made, "r.toml"), made.knobs
    (text,) = [word for word in verified.with_knobs(settings).engine_args if word.startswith("{")]
    assert json.loads(text) == {"kv_connector_extra_config": tier}


STOCK = msgspec.structs.replace(RECIPE, recipe=msgspec.structs.replace(ABOUT, core="stock"), core={})


def test_a_recipe_of_stock_is_served_without_the_core(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    write_recipe(STOCK, path)
    text = path.read_text()
    assert 'core = "stock"' in text and "[core]" not in text
    assert read_recipe(path).recipe.core == "stock"
    made = serving("tiny-gemma3", path, None, [], {}, anyway=True)
    assert made.environment["KVTUNE_CORE"] == "stock" and made.environment["KVTUNE_SET"] == "{}"
    assert "--block-size" in made.command
    ours = serving("tiny-gemma3", path, None, [], {}, core="kvtune", core_settings={"slack": 64}, anyway=True)
    assert ours.environment["KVTUNE_CORE"] == "kvtune" and '"slack":64' in ours.environment["KVTUNE_SET"]
    with pytest.raises(UsageError, match="stock was asked for"):
        serving("tiny-gemma3", path, None, [], {}, core_settings={"slack": 64}, anyway=True)
    bench, settings = Setup.of_recipe(STOCK, "r.toml"), STOCK.knobs
    assert bench.core == "stock" and settings == dict(STOCK.engine)


def test_settings_of_the_core_override_the_recipes(written: Path) -> None:
    made = serving("tiny-gemma3", written, None, [], {}, core_settings={"slack": 64}, anyway=True)
    assert msgspec.json.decode(made.environment["KVTUNE_SET"]) == {**RECIPE.core, "slack": 64}


def test_export_of_a_recipe_of_stock_names_no_core(tmp_path: Path) -> None:
    (config,) = export(STOCK, tmp_path)
    assert config.name == "config.yaml" and [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert "KVTUNE" not in config.read_text()


def test_a_recipe_of_stock_has_no_settings_of_the_core(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(
        '[recipe]\nmodel = "m"\ndevice = ""\nvllm = ""\nkvtune = ""\ncore = "stock"\n[core]\nslack = 64\n'
    )
    with pytest.raises(UsageError, match='core is "stock", but'):
        read_recipe(path)


def test_a_recipe_of_kvtunes_core_is_written_as_before(written: Path) -> None:
    """An older kvtune refuses a field that it does not know."""
    assert "core =" not in written.read_text()


def test_profile_takes_the_core_of_a_recipe(tmp_path: Path) -> None:
    from kvtune.cli.settings import with_recipe

    path = tmp_path / "r.toml"
    write_recipe(STOCK, path)
    assert with_recipe(str(path), [], [], model="tiny-gemma3", core="", anyway=True).core == "stock"
    assert with_recipe(str(path), [], [], model="tiny-gemma3", core="kvtune", anyway=True).core == "kvtune"
    assert with_recipe("", [], [], model="tiny-gemma3", core="", anyway=True).core == "kvtune"
