"""The simulator's LRU and manager of a tier of host memory against vLLM's, and ours against its quick form."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

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
    from kvtune.core.offload import install
    from kvtune.core.offload.policy import asked_of
    from kvtune.core.offload.spec import ReuseManager
    from kvtune.sim.fast import offload, tier

pytestmark = pytest.mark.vllm

WHAT = ["begin", "store", "load", "copied", "end", "failed", "turn", "reset"]
OPERATION = st.tuples(st.sampled_from(WHAT), st.integers(0, 99))


def answers(manager: Any, operations: list[tuple[str, int]]) -> list[object]:
    """What a manager says to each of these calls, and what the tier holds after each."""
    said: list[object] = []
    requests: list[tuple[ReqContext, list[bytes]]] = []
    copies: list[tuple[bool, list[bytes], ReqContext]] = []
    for what, number in operations:
        if what == "begin":
            context = ReqContext(f"{len(said)}")
            keys = [make_offload_key(b"%032d" % n, 0) for n in range(number % 7, number % 7 + 1 + number % 5)]
            for end, key in enumerate(keys, start=1):
                context.set_offload_key_position(key, end * 16)
            manager.on_new_request(context)
            requests.append((context, keys))
        elif what == "copied" and copies:
            stored, keys, context = copies.pop(number % len(copies))
            (manager.complete_store if stored else manager.complete_load)(keys, context)
        elif what == "failed" and copies and copies[0][0]:
            _, keys, context = copies.pop(0)
            manager.complete_store(keys, context, success=False)
        elif what == "reset" and number < 3:
            manager.reset_cache()
            copies.clear()
        elif what == "turn" and hasattr(manager._policy, "duel"):
            manager._policy.duel.by_age = not manager._policy.duel.by_age
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
        counts = (manager._num_evictable_cache_chunks, manager._num_write_pending_chunks)
        said.append((counts, manager._get_num_free_chunks()))
        said.append([manager.lookup(make_offload_key(b"%032d" % n, 0), ReqContext("")) for n in range(12)])
    return said


@given(st.lists(OPERATION, max_size=120))
@settings(deadline=None, max_examples=150)
def test_both_evict_the_same_chunks_whatever_is_asked(operations: list[tuple[str, int]]) -> None:
    heap, ordered, quick = CPUOffloadingManager(9), CPUOffloadingManager(9), CPUOffloadingManager(9)
    for manager in (ordered, quick):
        tier.adopt(SimpleNamespace(connector_scheduler=SimpleNamespace(manager=manager)))
    if not ranks_chunks_by_request(LRUCachePolicy):
        assert type(ordered._policy) is tier.OrderedLru and offload.quicken(quick)
    first = answers(heap, operations)
    assert first == answers(ordered, operations) and first == answers(quick, operations)


@pytest.mark.skipif(ranks_chunks_by_request(LRUCachePolicy), reason="stands aside from vLLM 0.33 on")
@given(st.lists(OPERATION, max_size=120))
@settings(deadline=None, max_examples=150)
def test_the_manager_of_our_policy_decides_the_same_with_less_python(
    operations: list[tuple[str, int]],
) -> None:
    plain, quick = (ReuseManager(9, install.POLICY_CLASS, install.POLICY_MODULE) for _ in range(2))
    assert offload.quicken(quick)
    assert answers(plain, operations) == answers(quick, operations)
    for name in ("_once", "_reused", "_clock", "_kept_by_age", "refused", "new_requests"):
        assert getattr(plain._policy, name) == getattr(quick._policy, name), name
    assert list(plain._policy._once) == list(quick._policy._once)
    mine, its = plain._policy.duel, quick._policy.duel
    assert (mine.by_age, mine.balance, list(mine._lru)) == (its.by_age, its.balance, list(its._lru))


@given(st.integers(0, 8), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_a_run_of_lookups_is_the_single_lookups(first: int, runs: list[int]) -> None:
    keys = [make_offload_key(b"%032d" % n, 0) for n in range(first, first + 8)]
    contexts = ReqContext("single"), ReqContext("run")
    for context in contexts:
        for end, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, end * 16)
    policy: Any = ReuseManager(9, install.POLICY_CLASS, install.POLICY_MODULE)._policy
    for number, hits in enumerate(runs):
        looked_up = keys[number:]
        hits = min(hits, len(looked_up))
        for n, key in enumerate(looked_up[: hits + 1]):
            policy.looked_up(key, n < hits, contexts[0])
        policy.looked_up_in_order(looked_up, hits, contexts[1])
        assert asked_of(contexts[0]) == asked_of(contexts[1])
