"""Plants one fault in a server's cache, named by KVTUNE_TEST_FAULT: `kvtune check` has to find it.

A plugin of the tests' servers. In the worker it changes what a hit's blocks hold, just before they are read; a salt is
ignored in EngineCore. `other`: a block holds another prompt's tokens. `late`: a block's tokens are one place late.
`state`: a recurrent state is what its block held before. `window`: a block of a window, likewise. `one_in_20`: `other`,
for each twentieth hit only. `salt`: the cache_salt is left out of the blocks' hashes. `layer`: `other` in one layer.
`scale`: a block is read with another block's scales, as fp8 has them: the keys and the values of each head are
multiplied by the other block's largest number over their own. `adapter`: adapters are left out of the blocks' hashes.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "KVTUNE_TEST_FAULT"
ONE_IN = 20


def register() -> None:
    """Patch vLLM, in each process of the server. Idempotent."""
    fault = os.environ.get(VARIABLE, "")
    if not fault:
        return
    if fault == "salt":
        from vllm.v1.core import kv_cache_utils

        keys = kv_cache_utils.generate_block_hash_extra_keys

        def unsalted(request: Any, *more: Any) -> Any:
            salt, request.cache_salt = request.cache_salt, None
            try:
                return keys(request, *more)
            finally:
                request.cache_salt = salt

        if keys.__name__ != "unsalted":
            kv_cache_utils.generate_block_hash_extra_keys = unsalted
        return
    if fault == "adapter":
        from vllm.v1.core import kv_cache_utils

        kv_cache_utils._gen_lora_extra_hash_keys = lambda request: []
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    run = GPUModelRunner.execute_model
    if run.__name__ == "spoiled":
        return
    spoiler = Spoiler(fault)

    def spoiled(self: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            spoiler.see(self, new)
        return run(self, scheduler_output, *more, **named)

    GPUModelRunner.execute_model = spoiled


class Spoiler:
    """Keeps the blocks of earlier prompts, and copies them over those of a hit."""

    def __init__(self, fault: str) -> None:
        self.fault, self.hits = fault, 0
        self.before: dict[int, list[int]] = {}

    def see(self, runner: Any, new: Any) -> None:
        if new.num_computed_tokens:
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
        """What a block holds in place of its own."""
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
