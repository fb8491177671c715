"""Plants a fault in a server's cache, the one that the file KVTUNE_TEST_FAULT names: `kvtune check` has to find it.

A plugin of the tests' servers. In the worker it changes what a hit's blocks hold, just before they are read; in
EngineCore it leaves something out of the blocks' hashes. The file is read each time: one server has one after another.

- other: a block holds another prompt's tokens; layer: in one layer; one_in_20: for each twentieth hit
- late: a block's tokens are one place late
- state, window: a recurrent state, or a block of a window, is what its block held before
- scale: a block is read with another block's scales, as fp8 has them: the keys and the values of each head are
  multiplied by the other block's largest number over their own
- salt, adapter: the cache_salt, or the adapter, is no part of the hashes
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VARIABLE = "KVTUNE_TEST_FAULT"
ONE_IN = 20


def planted() -> str:
    """The fault that is planted now; none if it is empty."""
    return Path(os.environ[VARIABLE]).read_text()


def register() -> None:
    """Patch vLLM, in each process of the server. Idempotent."""
    if not os.environ.get(VARIABLE):
        return
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    keys, adapters, run = (
        kv_cache_utils.generate_block_hash_extra_keys,
        kv_cache_utils._gen_lora_extra_hash_keys,
        GPUModelRunner.execute_model,
    )
    if run.__name__ == "spoiled":
        return
    spoiler = Spoiler()

    def without(request: Any, *more: Any) -> Any:
        salt = request.cache_salt
        request.cache_salt = None if planted() == "salt" else salt
        try:
            return keys(request, *more)
        finally:
            request.cache_salt = salt

    def spoiled(self: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        spoiler.fault = planted()
        for new in scheduler_output.scheduled_new_reqs:
            spoiler.see(self, new)
        return run(self, scheduler_output, *more, **named)

    kv_cache_utils.generate_block_hash_extra_keys = without
    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: (
        [] if planted() == "adapter" else adapters(request)
    )
    GPUModelRunner.execute_model = spoiled


class Spoiler:
    """Keeps the blocks of earlier prompts, and copies them over those of a hit."""

    def __init__(self) -> None:
        self.fault, self.hits = "", 0
        self.before: dict[int, list[int]] = {}

    def see(self, runner: Any, new: Any) -> None:
        if new.num_computed_tokens and self.fault not in ("", "salt", "adapter"):
            self.hits += 1
            if self.fault != "one_in_20" or self.hits % ONE_IN == 0:
                self.spoil(runner, new)
        for group, blocks in enumerate(new.block_ids):
            held = [block for block in blocks if block]
            self.before[group] = (self.before.get(group, []) + held)[-400:]

    def spoil(self, runner: Any, new: Any) -> None:
        layers = runner.compilation_config.static_forward_context
        for group, spec in enumerate(runner.kv_cache_config.kv_cache_groups):
            kind = type(spec.kv_cache_spec).__name__
            size = spec.kv_cache_spec.block_size
            hit = new.block_ids[group][: new.num_computed_tokens // size]
            mine = {"state": "Mamba" in kind, "window": "Sliding" in kind}.get(
                self.fault, "Mamba" not in kind
            )
            held = [block for block in hit if block]
            other = next((b for b in self.before.get(group, []) if b not in new.block_ids[group]), 0)
            if not mine or not held or not other:
                continue
            block = held[len(held) // 2] if self.fault != "state" else held[-1]
            for name in spec.layer_names[:1] if self.fault == "layer" else spec.layer_names:
                for tensor in tensors(layers[name].kv_cache):
                    rows = by_block(tensor, runner.kv_cache_config.num_blocks)
                    rows[block] = self.instead(rows[block], rows[other])

    def instead(self, own: Any, other: Any) -> Any:
        """Return a block's contents with the fault."""
        if self.fault == "late":
            return own.roll(1, dims=-2)
        if self.fault == "scale":
            scales = [each.abs().amax(dim=(-2, -1), keepdim=True) for each in (other, own)]
            return own * (scales[0] / scales[1])
        return other.clone()


def tensors(held: Any) -> list[Any]:
    """The tensors of a layer's cache: one, or those of a state."""
    return [one for each in held for one in tensors(each)] if isinstance(held, (list, tuple)) else [held]


def by_block(tensor: Any, blocks: int) -> Any:
    """The tensor with blocks first: keys and values may come before them."""
    return tensor if tensor.shape[0] == blocks else tensor.transpose(0, 1)
