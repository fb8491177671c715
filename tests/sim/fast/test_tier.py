"""The simulator's LRU of a tier of host memory against vLLM's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    from kvtune.core.compat.names import ranks_chunks_by_request
    from kvtune.sim.fast import tier

pytestmark = pytest.mark.vllm

OPERATION = st.tuples(st.sampled_from(["begin", "store", "load", "copied", "end"]), st.integers(0, 99))


@given(st.lists(OPERATION, max_size=120))
@settings(deadline=None, max_examples=150)
def test_both_evict_the_same_chunks_whatever_is_asked(operations: list[tuple[str, int]]) -> None:
    heap, ordered = CPUOffloadingManager(9), CPUOffloadingManager(9)
    tier.adopt(SimpleNamespace(connector_scheduler=SimpleNamespace(manager=ordered)))
    assert ranks_chunks_by_request(LRUCachePolicy) or type(ordered._policy) is tier.OrderedLru
    answers: list[list[object]] = []
    for manager in (heap, ordered):
        said: list[object] = []
        requests: list[tuple[ReqContext, list[bytes]]] = []
        copies: list[tuple[bool, list[bytes], ReqContext]] = []
        for what, number in operations:
            if what == "begin":
                context = ReqContext(f"{len(said)}")
                keys = [
                    make_offload_key(b"%032d" % n, 0) for n in range(number % 7, number % 7 + 1 + number % 5)
                ]
                for end, key in enumerate(keys, start=1):
                    context.set_offload_key_position(key, end * 16)
                manager.on_new_request(context)
                requests.append((context, keys))
            elif what == "copied" and copies:
                stored, keys, context = copies.pop(number % len(copies))
                (manager.complete_store if stored else manager.complete_load)(keys, context)
            elif requests:
                context, keys = requests[number % len(requests)]
                if what == "store":
                    stores = manager.prepare_store(keys, context)
                    said.append(None if stores is None else (stores.keys_to_store, stores.evicted_keys))
                    if stores is not None:
                        copies.append((True, stores.keys_to_store, context))
                elif what == "load":
                    there = [key for key in keys if manager.lookup(key, context) is LookupResult.HIT]
                    manager.prepare_load(there, context)
                    said.append(there)
                    copies.append((False, there, context))
                elif what == "end":
                    manager.on_request_finished(context)
                    requests.remove((context, keys))
            said.append(
                [manager.lookup(make_offload_key(b"%032d" % n, 0), ReqContext("")) for n in range(12)]
            )
        answers.append(said)
    assert answers[0] == answers[1]
