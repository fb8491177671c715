"""Which windows a tier of host memory keeps behind kvtune's policy."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

    from kvtune.core.offload import install
    from kvtune.core.offload.spec import ReuseManager
    from kvtune.core.offload.windows import Windows, offer_all

pytestmark = pytest.mark.vllm
CHUNK, WINDOW = 16, 3
FULL, SLIDING, STATES = 0, 1, 2


def config(retention: int | None = 0) -> Any:
    """Full attention, windows of three chunks, and states that the pool hands over."""
    groups = [
        SimpleNamespace(
            group_idx=number,
            tokens_per_chunk=CHUNK,
            sliding_window_size_in_chunks=window,
            requires_cow_source=number == STATES,
        )
        for number, window in ((FULL, None), (SLIDING, WINDOW), (STATES, 1))
    ]
    made = SimpleNamespace(kv_group_configs=groups, alignment_tokens=CHUNK, retention_interval=retention)
    made._replace = lambda **changed: SimpleNamespace(**{**vars(made), **changed})
    return made


class Engine:
    """Requests one after another; the pool holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.manager: Any = ReuseManager(capacity, install.POLICY_CLASS, install.POLICY_MODULE)
        self.policy = self.manager._policy
        self.side: Any = SimpleNamespace(manager=self.manager, config=config(), _req_status={})
        offer_all(self.side)

    def ask(self, prompt: str, tokens: int, shared: int = 0) -> int:
        """Chunks that a prompt hits. The first letter names what its first `shared` chunks are, the rest is its own."""
        name = f"{len(self.side._req_status)}"
        request = SimpleNamespace(num_prompt_tokens=tokens, shared_prefix_boundary=0)
        self.side._req_status[name] = SimpleNamespace(req=request)
        context = ReqContext(name)
        chunks = tokens // CHUNK
        texts = [prompt[0] if n < shared else prompt for n in range(chunks)]
        keys = {
            group: [make_offload_key(f"{text}{n:04}".encode(), group) for n, text in enumerate(texts)]
            for group in (FULL, SLIDING)
        }
        for some in keys.values():
            for end, key in enumerate(some, start=1):
                context.set_offload_key_position(key, end * CHUNK)
        self.manager.on_new_request(context)

        def has(key: Any) -> bool:
            return self.manager.lookup(key, context) is LookupResult.HIT  # type: ignore[no-any-return]

        most = 0
        while most < (tokens - 1) // CHUNK and has(keys[FULL][most]):
            most += 1
        hit = next(
            (end for end in range(most, 0, -1) if all(map(has, keys[SLIDING][max(0, end - WINDOW) : end]))), 0
        )
        if hit:
            loaded = [*keys[FULL][:hit], *keys[SLIDING][max(0, hit - WINDOW) : hit]]
            self.manager.prepare_load(loaded, context)
            self.manager.complete_load(loaded, context)
        offered = [*keys[FULL][hit:], *keys[SLIDING][hit:]]
        if offered:
            stores = self.manager.prepare_store(offered, context)
            assert stores is not None
            self.manager.complete_store(stores.keys_to_store, context)
        assert not self.policy.violations()
        self.manager.on_request_finished(context)
        assert not self.policy.violations()
        return hit


def test_a_prefix_hits_at_its_second_visit_while_there_is_room() -> None:
    engine = Engine(1000)
    for letter in "abc":
        assert engine.ask(f"{letter}1", 20 * CHUNK, shared=12) == 0
    assert [engine.ask(f"{letter}2", 20 * CHUNK, shared=12) for letter in "abc"] == [12] * 3


def test_windows_that_nobody_is_known_to_need_make_room_for_all_else() -> None:
    """Twenty chunks and the window at the end: what vLLM stores of a prompt by default."""
    default = 20 + WINDOW
    engine = Engine(4 * default)
    for letter in "abcd":
        engine.ask(f"{letter}1", 20 * CHUNK + 1)
    assert not engine.policy._spare and len(engine.policy.chunks) == 4 * default
    assert [engine.ask(f"{letter}1", 20 * CHUNK + 1) for letter in "abcd"] == [20] * 4


def test_where_a_second_visit_shows_that_a_prefix_is_shared_the_third_one_hits() -> None:
    engine = Engine(2 * (20 + WINDOW))
    for letter in "ab":
        engine.ask(f"{letter}1", 20 * CHUNK + 1, shared=12)
    assert not engine.policy._spare
    assert engine.ask("b2", 20 * CHUNK + 1, shared=12) == 0
    assert engine.ask("b3", 20 * CHUNK + 1, shared=12) == 12


def test_spare_windows_replace_older_ones_and_nothing_else() -> None:
    engine = Engine(20 + WINDOW + 5)
    engine.ask("a1", 20 * CHUNK + 1)
    kept = set(engine.policy._once)
    assert len(engine.policy._spare) == 5
    first = set(engine.policy._spare)
    engine.ask("b1", 4 * CHUNK + 1)  # four chunks and a window, of which five find room
    assert len(engine.policy.chunks) == engine.policy.cache_capacity
    assert not first & set(engine.policy.chunks) and len(kept & set(engine.policy.chunks)) == 20 + WINDOW - 2


def test_a_window_that_is_loaded_stays_as_long_as_what_it_belongs_to() -> None:
    engine = Engine(60)
    engine.ask("a1", 16 * CHUNK, shared=12)
    assert engine.ask("a2", 16 * CHUNK, shared=12) == 12
    assert len(engine.policy._reused) == 12 + WINDOW


def test_an_interval_that_the_user_sets_stays_as_it_is() -> None:
    for retention in (None, 512):
        side: Any = SimpleNamespace(
            manager=ReuseManager(10, install.POLICY_CLASS, install.POLICY_MODULE),
            config=config(retention),
            _req_status={},
        )
        offer_all(side)
        assert side.config.retention_interval == retention and side.manager._policy.windows is None


def test_models_without_windows_are_left_alone() -> None:
    groups = config()
    groups.kv_group_configs = [groups.kv_group_configs[FULL], groups.kv_group_configs[STATES]]
    side: Any = SimpleNamespace(
        manager=ReuseManager(10, install.POLICY_CLASS, install.POLICY_MODULE), config=groups, _req_status={}
    )
    offer_all(side)
    assert side.config is groups and side.manager._policy.windows is None


def test_a_chunk_is_needed_where_a_window_before_a_known_boundary_has_it() -> None:
    request = SimpleNamespace(num_prompt_tokens=20 * CHUNK, shared_prefix_boundary=5 * CHUNK)
    windows = Windows(config(), {"0": SimpleNamespace(req=request)})  # type: ignore[dict-item]
    context = ReqContext("0")
    keys = [make_offload_key(b"%032d" % n, group) for group in range(3) for n in range(20)]
    for n, key in enumerate(keys):
        context.set_offload_key_position(key, (n % 20 + 1) * CHUNK)
    spare = windows.spare(keys, context, 10 * CHUNK)  # type: ignore[arg-type]
    needed = {n for n in range(20) if keys[20 + n] not in spare}
    assert needed == {2, 3, 4} | {7, 8, 9} | {16, 17, 18}  # the last token of a prompt is always computed
    assert set(spare) <= set(keys[20:40])
