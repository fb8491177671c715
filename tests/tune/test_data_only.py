"""Recipes, traces, journals and run files are data: nothing that reads them can execute what they hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError, UsageError
from kvtune.recipe import About, read_recipe, write_recipe
from kvtune.recipe import Recipe as RecipeFile
from kvtune.tune.recipes.serving import serving

PACKAGE = Path(__file__).parents[2] / "kvtune"
READERS = [
    PACKAGE / "recipe.py",
    *(p for name in ("tune", "workload", "run") for p in (PACKAGE / name).glob("*.py")),
]
LOADERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "imp", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.name)
def test_nothing_that_reads_data_can_execute_it(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not LOADERS & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in LOADERS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS
        elif isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle" or (
                isinstance(node.value, ast.Constant) and not node.value.value
            )


NAMES_CODE = (
    'kv_transfer_config = "{}"',
    'spec_module_path = "mine"',
    'cache_policy_module_path = "mine"',
    'scheduler_cls = "mine.Scheduler"',
    'eviction_policy = "mine.Policy"',
    'eviction_policy = ["lru"]',
    'blocks_per_chunk = "2, \\"spec_module_path\\": \\"mine\\""',
    'kv_offloading_size = { spec_module_path = "mine" }',
)


@pytest.mark.parametrize("line", NAMES_CODE)
@pytest.mark.parametrize("table", ["engine", "core"])
def test_a_recipe_that_names_a_class_is_refused_in_one_line(line: str, table: str, tmp_path: Path) -> None:
    about = 'model = "tiny-llama"\ndevice = "cpu"\nvllm = "0.32.0"\nkvtune = "0"'
    path = tmp_path / "r.toml"
    path.write_text(f"[recipe]\n{about}\n\n[{table}]\n{line}\n")
    with pytest.raises(KvtuneError) as refused:
        serving("tiny-llama", path, None, [], {})
    assert str(path) in refused.value.message and "\n" not in refused.value.message + refused.value.hint


def test_the_evidence_of_a_recipe_cannot_load_code_either(tmp_path: Path) -> None:
    """`recipe verify` runs an engine with the flags that are written there."""
    about = About(model="tiny-llama", device="cpu", vllm="0.32.0", kvtune="0", status="confirmed")
    extra = '{"kv_connector_extra_config":{"spec_module_path":"mine"}}'
    evidence = {
        "workload": "decode",
        "seed": 0,
        "workload_hash": "",
        "engine_args": ["--kv-transfer-config", extra],
    }
    write_recipe(RecipeFile(recipe=about, evidence=evidence), tmp_path / "r.toml")
    with pytest.raises(UsageError, match="spec_module_path"):
        Setup.of_recipe(read_recipe(tmp_path / "r.toml"), "r.toml")
