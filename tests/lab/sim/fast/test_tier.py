"""A quick tier beside vLLM's own: the same calls to both, then the same chunks, copies and order of eviction."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.chains import BlockHashes, with_group
from kvtune.lab.sim.simulators import Simulators
from tests.choice import first_of
from tests.lab.sim.test_offload import replayed

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


def hashes(names: list[int]) -> list[bytes]:
    """Chained hashes: equal ones have equal hashes before them."""
    return [repr(names[: end + 1]).encode() for end in range(len(names))]


class Side:
    """One manager, and what vLLM's connector knows of its requests."""

    def __init__(self, chunks: int, *, quick: bool) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler,
            RequestOffloadState,
        )
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from kvtune.lab.sim.fast import tier

        self.manager: Any = CPUOffloadingManager(chunks)
        self.side: Any = object.__new__(OffloadingConnectorScheduler)
        self.side.manager = self.manager
        self.side._events_tracker = SimpleNamespace(
            self_describing_enabled=False, record_lookup=lambda *_: None
        )
        self.update: Any = RequestOffloadState.update_offload_keys
        if quick:
            tier.adopt(self.side)
            assert type(self.side) is tier.QuickSide and type(self.manager) is tier.QuickManager
            self.update = tier.update_offload_keys

    def request(self, names: list[int], groups: list[tuple[int, int]], chain: bool) -> Any:
        """Return a request's state. `groups`: number, and hashes of a chunk."""
        from vllm.v1.kv_offload.base import ReqContext

        values = BlockHashes(hashes(names)) if chain else hashes(names)
        if isinstance(values, BlockHashes):
            keys = {number: with_group(values, number) for number, _ in groups}
            values.chain = SimpleNamespace(keys=keys.__getitem__)  # type: ignore[assignment]
        configs = [
            SimpleNamespace(group_idx=number, hashes_per_chunk=every, tokens_per_chunk=16 * every)
            for number, every in groups
        ]
        state = SimpleNamespace(
            req=SimpleNamespace(block_hashes=values),
            req_context=ReqContext(req_id=str(len(names))),
            config=SimpleNamespace(kv_group_configs=configs),
            group_states=[SimpleNamespace(offload_keys=[]) for _ in groups],
        )
        self.manager.on_new_request(state.req_context)
        return state

    def chunks(self) -> dict[bytes, tuple[int, int]]:
        return {key: (chunk.chunk_id, chunk.ref_cnt) for key, chunk in self.manager._policy.chunks.items()}


@pytest.mark.parametrize("seed", first_of(range(8)))
@pytest.mark.parametrize("groups", [[(0, 1)], [(0, 1), (1, 2)], [(0, 2), (2, 1), (3, 4)]])
def test_a_quick_tier_has_what_vllms_has_after_each_call(seed: int, groups: list[tuple[int, int]]) -> None:
    """Prompts that share their beginnings in a tier that evicts all the time, has copies under way, or no room."""
    rng = random.Random(seed)
    sides = Side(24, quick=False), Side(24, quick=True)
    running: list[tuple[Any, Any]] = []
    jobs: list[tuple[str, list[bytes], Any, Any]] = []
    seen = dict.fromkeys(("stored", "evicted", "refused", "loaded", "pending"), 0)
    for step in range(900):
        act = rng.random()
        if act < 0.3 and len(running) < 6:
            names = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            one, other = (side.request(names, groups, step % 2 == 0) for side in sides)
            for state, side in ((one, sides[0]), (other, sides[1])):
                side.update(state)
            running.append((one, other))
        elif act < 0.7 and running:
            one, other = rng.choice(running)
            new = [rng.randrange(2)]
            for state, side in ((one, sides[0]), (other, sides[1])):
                if type(state.req.block_hashes) is list:
                    state.req.block_hashes += [state.req.block_hashes[-1] + bytes(new)]
                side.update(state)
            for group, quick_group in zip(one.group_states, other.group_states, strict=True):
                assert group.offload_keys == quick_group.offload_keys
            assert one.req_context._offload_key_positions == other.req_context._offload_key_positions
            keys = [
                key
                for group in one.group_states
                for key in group.offload_keys[rng.randrange(3) : rng.randrange(1, 12)]
            ]
            if keys:
                made = [
                    side.manager.prepare_store(keys, s.req_context)
                    for side, s in zip(sides, (one, other), strict=True)
                ]
                assert (made[0] is None) == (made[1] is None)
                seen["refused"] += made[0] is None
                if made[0] is not None:
                    assert made[0].keys_to_store == made[1].keys_to_store
                    assert made[0].evicted_keys == made[1].evicted_keys
                    stored = made[0].keys_to_store
                    seen["stored"] += len(stored)
                    seen["evicted"] += len(made[0].evicted_keys)
                    jobs.append(("complete_store", stored, one, other))
        elif act < 0.8 and running:
            one, other = rng.choice(running)
            keys = one.group_states[0].offload_keys
            found = [
                side.side._maximal_prefix_lookup(keys, s.req_context, None, None, 0)
                for side, s in zip(sides, (one, other), strict=True)
            ]
            assert found[0] == found[1]
            seen["pending"] += found[0] is None
            if found[0]:
                for side, state in zip(sides, (one, other), strict=True):
                    side.manager.prepare_load(keys[: found[0]], state.req_context)
                seen["loaded"] += found[0]
                jobs.append(("complete_load", keys[: found[0]], one, other))
        elif act < 0.93 and jobs:
            what, keys, *states = jobs.pop(rng.randrange(len(jobs)))
            for side, state in zip(sides, states, strict=True):
                getattr(side.manager, what)(keys, state.req_context)
        elif running:
            states = running.pop(rng.randrange(len(running)))
            for side, state in zip(sides, states, strict=True):
                side.manager.on_request_finished(state.req_context)
        if rng.random() < 0.003:
            jobs.clear()
            running.clear()
            for side in sides:
                side.manager.reset_cache()
        assert sides[0].chunks() == sides[1].chunks()
        ranks = sides[0].manager._policy._ranks
        assert sorted(ranks, key=ranks.__getitem__) == list(sides[1].chunks()), "the order of use"
    assert all(seen.values()), seen


LOADS = {
    "tiny-llama": "zipf:prefixes=12,prefix=500,suffix=40,requests=60,concurrency=8,output=30",
    "tiny-gemma3": "zipf:prefixes=8,prefix=500,suffix=40,requests=40,concurrency=6,output=30",
    "tiny-qwen3next": "chat:sessions=6,turns=4,system=64,first=600,user=40,output=40",
}


@pytest.mark.parametrize("gib", ["0.003", "0.01"])
@pytest.mark.parametrize("model", LOADS)
def test_every_copy_of_a_replay_is_that_of_vllms_own_tier(
    simulators: Simulators, model: str, gib: str
) -> None:
    """Windows, states: what each step stores, loads, evicts, and when; and each request's hits in both tiers."""
    blocks = {"tiny-llama": "70", "tiny-gemma3": "190"}.get(model, "48")
    flags = ["--max-model-len", "1700", "--max-num-seqs", "16", "--num-gpu-blocks-override", blocks]
    if model != "tiny-qwen3next":
        flags += ["--block-size", "32", "--max-num-batched-tokens", "512"]
    setup = Setup(model=model, engine_args=[*flags, "--kv-offloading-size", gib])
    quick, own = replayed(
        simulators,
        LOADS[model],
        [setup.replayed(digests=True), setup.replayed(digests=True, shortcuts=False)],
    )
    assert quick.header.extra.digests == own.header.extra.digests
    for table in ("requests", "copies", "steps", "pool"):
        for name, column in own.table(table).items():
            assert (quick.table(table)[name] == column).all() or column.dtype.kind == "f", name
    copies = own.table("copies")
    assert copies["stored_chunks"].sum() > 0
