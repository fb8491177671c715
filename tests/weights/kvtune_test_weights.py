"""`--load-format kvtune-seeded`: random weights of realistic scale, so that answers depend on the whole prompt.

A plugin of the tests' engines (tests/conftest.py puts its folder on their path), which runs in vLLM's workers. With
vLLM's dummy weights (+-1e-3) a model answers every prompt with the same token, so equal
answers prove nothing. A parameter's values depend only on its name: they are equal in every process and layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    import torch
    from torch import nn

LOAD_FORMAT = "kvtune-seeded"
ASKS = ("KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_PROBE", "KVTUNE_RUN_DIR")

RANGES = {"A_log": (-3.0, 1.0), "dt_bias": (-6.0, -2.0)}
"""Ranges of recurrent states' decay parameters: some heads forget after tens of tokens, others after thousands."""

SHARP = 2.0


def register() -> None:
    """Register the format with vLLM, in each process of an engine that kvtune starts. Idempotent."""
    if not any(os.environ.get(name) for name in ASKS):
        return
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class SeededLoader(model_loader.DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: nn.Module, model_config: object) -> None:
            for path, layer in model.named_modules():
                for name, tensor in (*layer.named_parameters(recurse=False), *_kept_buffers(layer)):
                    fill(f"{path}.{name}", tensor, one_plus=type(layer).__name__.startswith("Gemma"))

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = SeededLoader


def fill(name: str, tensor: torch.Tensor, one_plus: bool = False) -> None:
    """Fill one parameter with values that depend on its name. `one_plus`: the layer adds one to its norm weights."""
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
    elif leaf == "weight":
        # Of a norm; q and k are SHARP: with 1.0, attention would average over a long prompt.
        wanted = SHARP if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        values = torch.full(tensor.shape, wanted - one_plus)
    elif leaf == "bias":  # small, or it outweighs the embeddings (OPT has many biases)
        values = torch.randn(tensor.shape, generator=generator) / 64
    else:
        values = torch.randn(tensor.shape, generator=generator) / 4
    tensor.data.copy_(values.to(tensor.dtype))


def _kept_buffers(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    temporary = layer._non_persistent_buffers_set
    return ((name, b) for name, b in layer.named_buffers(recurse=False) if name not in temporary)
