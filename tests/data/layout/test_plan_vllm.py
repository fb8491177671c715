"""The planner against vLLM: state shapes, data types, effective block sizes and groups as vLLM computes them.

vLLM's own model classes and `_align_hybrid_block_size` run on each config (no weights, no device). The
backend is described, not imported: a GPU's takes multiples of 16 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.data.layout.config import shape_of, state_dtype_of
from kvtune.data.layout.plan import CPU, GPU, Backend, plan_per_layer

# vLLM's imports warn (deprecations of torch): not ours to turn into errors.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CONFIGS = Path(__file__).parent / "configs"
UNSUPPORTED = {"bamba-9b"}  # vLLM dropped the class in 0.23
NEED_TORCHVISION = {"qwen3.5-27b"}  # vLLM's module imports the image processor


def vllm_answer(
    folder: Path, backend: Backend, block_size: int | None, state_dtype: str = "auto"
) -> tuple[int, list[tuple[Any, str]]]:
    """Effective block size and (shape, dtype) of each state tensor, from vLLM's code for this config."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backend import MultipleOf

    class Kernel:
        @staticmethod
        def get_supported_kernel_block_sizes() -> list[Any]:
            return [MultipleOf(backend.alignment)]

        @staticmethod
        def customize_spec(spec: Any) -> Any:
            return spec

    class Device(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config: Any) -> list[Any]:
            return [Kernel]

    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_prefix_caching=True,
        max_model_len=2048,
        mamba_ssm_cache_dtype=state_dtype,
    )
    config = args.create_engine_config()
    cache = config.cache_config
    cache.block_size = block_size or backend.default
    cls, _ = ModelRegistry.resolve_model_cls(
        config.model_config.architecture, model_config=config.model_config
    )
    Device._align_hybrid_block_size(config, Kernel)
    shapes = cls.get_mamba_state_shape_from_config(config)
    dtypes = cls.get_mamba_state_dtype_from_config(config)
    return cache.block_size, list(zip(shapes, (str(dtype) for dtype in dtypes), strict=True))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model classes are inspected here, not in a process each (10 s an architecture)."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        _LazyRegisteredModel,
        "inspect_model_cls",
        lambda self: _ModelInfo.from_model_cls(self.load_model_cls()),
    )


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_block_sizes_and_states_are_vllms(path: Path, tmp_path: Path, avx512_bf16: bool) -> None:
    """On a CPU with and without AVX-512 BF16; a GPU's platform has no such rule, as this CPU's has not without it."""
    config = usable(path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for backend, asked in ((CPU, None), (CPU, 64)) if avx512_bf16 else ((GPU, None), (GPU, 64), (CPU, None)):
        shape = shape_of(config, path.stem, float32_states=avx512_bf16)
        block, states = vllm_answer(tmp_path, backend, asked)
        assert plan_per_layer(shape, backend, asked).block_tokens == block
        assert [tuple(state.shape) for state in shape.states] == [tuple(s) for s, _ in states]
        named = state_dtype_of(config, float32_states=avx512_bf16)
        assert f"torch.{named}" == (states[-1][1] if states else "torch.")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("asked", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3-next-80b-a3b",
        "granite-4.0-h-small",
        "nemotron-h-8b",
        "falcon-h1-0.5b",
        "jamba-1.5-mini",
        "zamba2-2.7b",
    ],
)
def test_a_given_state_type_is_kept_where_vllm_keeps_it(
    name: str, asked: str, tmp_path: Path, avx512_bf16: bool
) -> None:
    """On a CPU with AVX-512 BF16 Falcon-H1's states are float32 whatever is asked; the others keep what is asked."""
    config = usable(CONFIGS / f"{name}.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(config, name, state_dtype=asked, float32_states=avx512_bf16)
    block, states = vllm_answer(tmp_path, CPU, None, asked)
    assert plan_per_layer(shape, CPU).block_tokens == block
    named = state_dtype_of(config, state_dtype=asked, float32_states=avx512_bf16)
    assert f"torch.{named}" == states[-1][1]


def usable(path: Path) -> dict[str, Any]:
    """The config, or a skip where this vLLM cannot load the model's class."""
    if path.stem in UNSUPPORTED:
        pytest.skip("vLLM 0.32 has no class for this model")
    if path.stem in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed
