"""`--load-format kvtune-seeded`: random weights of real scale, so that an answer depends on every token before it.

Runs in vLLM's workers. vLLM's own dummy weights (+-1e-3) make a model say one token whatever it is asked, and then
equal answers prove nothing. A parameter's values follow from its name alone: the same in every process and layout.
"""

from __future__ import annotations

import os
from math import sqrt
from typing import Any
from zlib import crc32

LOAD_FORMAT = "kvtune-seeded"

RANGES = {"A_log": (-3.0, 1.0), "dt_bias": (-6.0, -2.0)}
"""Of what decays a recurrent state: heads that forget within tens of tokens beside heads that remember thousands."""

SHARP = 2.0


def register() -> None:
    """Make the format known to vLLM, in each process of an engine of ours; idempotent."""
    if not any(name.startswith("KVTUNE_") for name in os.environ):
        return
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class SeededLoader(model_loader.DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            for path, layer in model.named_modules():
                for name, tensor in (*layer.named_parameters(recurse=False), *_kept_buffers(layer)):
                    fill(f"{path}.{name}", tensor, one_plus=type(layer).__name__.startswith("Gemma"))

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = SeededLoader


def fill(name: str, tensor: Any, one_plus: bool = False) -> None:
    """Fill one parameter. `one_plus`: a norm that adds one to its weight."""
    import torch

    if not torch.is_floating_point(tensor):
        tensor.data.zero_()
        return
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    leaf = name.rpartition(".")[2]
    if tensor.dim() > 1:
        values = torch.randn(tensor.shape, generator=generator) / sqrt(tensor.shape[-1])
    elif leaf in RANGES or leaf == "A":
        low, high = RANGES.get(leaf, RANGES["A_log"])
        values = torch.empty(tensor.shape).uniform_(low, high, generator=generator)
        values = -values.exp() if leaf == "A" else values
    elif leaf == "weight":  # a norm's; attention that is spread evenly over a long prompt sees none of it
        wanted = SHARP if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        values = torch.full(tensor.shape, wanted - one_plus)
    elif leaf == "bias":  # small beside the embeddings, or all prompts are answered alike (OPT has many)
        values = torch.randn(tensor.shape, generator=generator) / 64
    else:
        values = torch.randn(tensor.shape, generator=generator) / 4
    tensor.data.copy_(values.to(tensor.dtype))


def _kept_buffers(layer: Any) -> Any:
    temporary = layer._non_persistent_buffers_set
    return ((name, b) for name, b in layer.named_buffers(recurse=False) if name not in temporary)
