"""The core's pool and windows under vLLM's real schedulers, sync and async: audited after every step.

Preemption (small pools), aborts, priorities, resets, shared prefixes; then: what must hit, hits; what may not differ
from stock, does not; and a failure of our own bookkeeping never stops a step.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.core import adopt, audit, state
from kvtune.core.settings import CoreSettings, parse
from tests.core.steady_rig import VOCAB, Model, RequestStatus, Shape, build, inside, plain, request

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def fresh() -> Any:
    state.clear()
    yield
    state.clear()


class Engine:
    """One scheduler, stepped as EngineCore does (with a queue of two steps when asynchronous)."""

    def __init__(self, shape: Shape, settings: CoreSettings | None, seed: int = 0) -> None:
        self.shape = shape
        self.scheduler = build(shape)
        if settings is not None:
            adopt.adopt(self.scheduler.kv_cache_manager, settings)
        self.model = Model(seed, shuffles=False)
        self.in_flight: deque[Any] = deque()
        self.hits: dict[str, int] = {}
        self.count = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, prompt: list[int], output: int, priority: int = 0) -> str:
        self.count += 1
        name = f"r-{self.count}"
        self.scheduler.add_request(
            request(block=self.shape.block, name=name, prompt=prompt, output=output, priority=priority)
        )
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        self.in_flight.append((scheduled, self.model.run(self.scheduler, scheduled)))
        if len(self.in_flight) > self.shape.asynchronous:
            self.scheduler.update_from_output(*self.in_flight.popleft())
        return scheduled

    def drain(self) -> None:
        for _ in range(5000):
            if not self.scheduler.requests:
                break
            self.step()
        while self.in_flight:
            self.scheduler.update_from_output(*self.in_flight.popleft())
        assert not self.scheduler.requests

    def serve(self, prompt: list[int], output: int = 4) -> int:
        """Send one request, wait for it; tokens that it found in the cache."""
        name = self.add(prompt, output)
        self.drain()
        return self.hits[name]


SHAPES = {
    "full": Shape(blocks=70),
    "hybrid": Shape(windows=(12, 12), blocks=400),
    "small_hybrid": Shape(windows=(12, 12), blocks=110),
    "dense": Shape(windows=(20,), retention=None, blocks=120),
    "interval": Shape(windows=(20,), retention=32, blocks=120),
    "priority": Shape(windows=(12,), policy="priority", blocks=90),
    "all_windows": Shape(windows=(12,), blocks=60),
}
SETTINGS = {
    "tiered": {"slack": 8, "min_drop": 2},
    "pin": {"policy": "pin", "min_drop": 2},
    "lru": {"policy": "lru", "slack": 8, "min_drop": 2},
    "two_class": {"policy": "two_class", "reuse_bonus_s": 0.001, "min_drop": 2},
}


def random_steps(engine: Engine, seed: int, steps: int, each: Any) -> None:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
    load = 0.2
    for step in range(steps):
        if step % 60 == 0:
            load = chance.choice((0.02, 0.1, 0.4))
        while chance.random() < load:
            prompt = chance.choice(prefixes)[: chance.randrange(1, 60)]
            prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(0, 30))]
            engine.add(prompt, chance.choice((1, 2, 5, 20, 50)), chance.randrange(3))
        if chance.random() < 0.03 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))
        if chance.random() < 0.01:
            engine.scheduler.reset_prefix_cache()
        if chance.random() < 0.02:
            engine.pool.evict_blocks(set(chance.sample(range(engine.pool.num_gpu_blocks), 5)))
        engine.step()
        each()


@BOTH
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_invariants_hold_after_every_step(shape: str, settings: str, asynchronous: bool) -> None:
    engine = Engine(replace(SHAPES[shape], asynchronous=asynchronous), parse(SETTINGS[settings]), seed=1)

    def each() -> None:
        found = audit.check(engine.scheduler)
        assert not found, found

    random_steps(engine, seed=1, steps=90, each=each)
    engine.drain()
    assert audit.check(engine.scheduler) == []
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not state.state()["notes"] or all("failed" not in note for note in state.state()["notes"])


@BOTH
@pytest.mark.parametrize("shape", ["full", "small_hybrid", "dense", "interval"])
def test_switched_off_or_plain_lru_decides_as_stock_does(shape: str, asynchronous: bool) -> None:
    """Block ids, scheduled tokens and the cache's contents, step by step."""
    made = replace(SHAPES[shape], asynchronous=asynchronous)
    settings = CoreSettings() if shape == "full" else parse({"pinning": False, "policy": "lru"})
    ours, stock = Engine(made, settings), Engine(made, None)
    for engine in (ours, stock):
        engine.log = []  # type: ignore[attr-defined]
        step = engine.step
        random_steps(engine, 3, 200, lambda e=engine: e.log.append(inside(e.scheduler)))
        assert step
    assert ours.log == stock.log  # type: ignore[attr-defined]


@BOTH
def test_the_tiered_pool_with_policy_lru_gives_stocks_blocks(asynchronous: bool) -> None:
    """The same, with the tiered pool itself in place (adopt leaves it out when policy lru needs nothing of it)."""
    from kvtune.core.pool import TieredPool

    made = replace(SHAPES["small_hybrid"], asynchronous=asynchronous)
    ours, stock = Engine(made, None), Engine(made, None)
    ours.pool.__class__ = TieredPool
    ours.pool.adopt_tiers("lru", CoreSettings())
    logs: list[list[Any]] = [[], []]
    for engine, log in zip((ours, stock), logs, strict=True):
        random_steps(engine, 5, 300, lambda e=engine, found=log: found.append(inside(e.scheduler)))
    for mine, theirs in zip(*logs, strict=True):
        assert mine == theirs


def tokens(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


HYBRID = Shape(windows=(12, 12), blocks=1200, batched=32, max_len=400)


@BOTH
@pytest.mark.parametrize("suffix", [3, 8, 17, 40])
def test_a_new_suffix_hits_at_the_second_visit(asynchronous: bool, suffix: int) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous)
    prefix = tokens(1, 200)
    ours = Engine(shape, parse({"slack": 40, "min_drop": 2}))
    stock = Engine(shape, None)
    found = {}
    for name, engine in (("ours", ours), ("stock", stock)):
        found[name] = [engine.serve(prefix + tokens(10 + visit, suffix)) for visit in range(3)]
    assert found["ours"] == [0, 200, 200]
    if suffix > shape.block:
        assert found["stock"] == [0, 0, 200]


@BOTH
def test_a_suffix_longer_than_the_slack_hits_at_a_speculative_window(asynchronous: bool) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous)
    engine = Engine(shape, parse({"slack": 16, "windows": 3, "min_drop": 2}))
    prefix = tokens(1, 200)
    assert engine.serve(prefix + tokens(2, 50)) == 0
    hit = engine.serve(prefix + tokens(3, 50))
    # 250 tokens, windows 32, 64 and 128 before the end: the one at 64 is the last inside the prefix.
    assert 200 - 64 <= hit < 200
    none = Engine(shape, parse({"slack": 16, "windows": 0, "min_drop": 2}))
    none.serve(prefix + tokens(2, 50))
    assert none.serve(prefix + tokens(3, 50)) == 0


@BOTH
def test_the_next_turn_of_a_chat_hits_the_answer_too(asynchronous: bool) -> None:
    shape = replace(HYBRID, asynchronous=asynchronous)
    hits = {}
    for name, settings in (("ours", parse({"min_drop": 2})), ("stock", None)):
        engine = Engine(shape, settings)
        first = engine.add(tokens(1, 100), 40)
        turn = engine.scheduler.requests[first]
        engine.drain()
        hits[name] = engine.serve([*turn.prompt_token_ids, *turn.output_token_ids, *tokens(2, 30)])
    assert hits["ours"] == (100 + 40 - 1) // 4 * 4
    assert hits["stock"] == 100 // 4 * 4 or hits["stock"] < hits["ours"]


@BOTH
def test_hits_survive_release_and_a_flood_of_one_offs(asynchronous: bool) -> None:
    """A prefix that was hit is protected; stock loses it to prompts that never come again."""
    shape = replace(HYBRID, asynchronous=asynchronous, blocks=400)
    hits = {}
    for name, settings in (("ours", parse({"slack": 16, "min_drop": 2})), ("stock", None)):
        engine = Engine(shape, settings)
        prefix = tokens(1, 200)
        for visit in range(3):
            engine.serve(prefix + tokens(20 + visit, 8))
        for flood in range(12):
            engine.serve(tokens(100 + flood, 200))
        hits[name] = engine.serve(prefix + tokens(90, 8))
    assert hits == {"ours": 200, "stock": 0}


def test_the_published_policy_pins_chunk_ends_and_not_decode_steps() -> None:
    engine = Engine(HYBRID, parse({"policy": "pin", "min_drop": 4}))
    engine.serve(tokens(1, 128), output=60)
    tiers = engine.pool.free_block_queue
    pinned = tiers.queues[3].num_free_blocks
    # Two groups, windows of three blocks at the chunk ends 32, 64, 96 and 128; two of the last one's blocks are
    # also the window at 124, where a resend resumes: that one ages as stock's does.
    assert pinned == 2 * (3 * 3 + 1)
    hit = engine.serve(tokens(1, 100) + tokens(9, 50))
    assert hit == 96


def test_reset_gives_everything_up() -> None:
    engine = Engine(HYBRID, parse({"min_drop": 2}))
    prefix = tokens(1, 200)
    engine.serve(prefix)
    assert engine.serve(prefix) > 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.serve(prefix) == 0
    assert audit.check(engine.scheduler) == []


class Failing:
    """A policy whose every call raises."""

    def __getattr__(self, name: str) -> Any:
        def fails(*args: Any) -> Any:
            raise RuntimeError(f"{name} is broken")

        return fails


@BOTH
@pytest.mark.parametrize("method", ["place", "choose", "hit", "retired", "stored", "evicted", "reset"])
def test_a_policy_that_raises_is_replaced_and_serving_goes_on(method: str, asynchronous: bool) -> None:
    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS["tiered"]))
    tiers = engine.pool.free_block_queue
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            setattr(tiers.policy, method, getattr(Failing(), method))
        assert audit.check(engine.scheduler) == []

    random_steps(engine, 7, 160, each)
    engine.pool.retire([])
    engine.scheduler.reset_prefix_cache()
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    assert tiers.policy.name == "in_order"
    assert tiers.failures == 1
    assert any(f"{method} is broken" in note for note in state.state()["notes"])
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert audit.check(engine.scheduler) == []


@pytest.mark.parametrize("answer", [(99, 1), (1, 0), (1, 10**6), (-1, 1), None])
def test_a_policy_that_chooses_nonsense_is_replaced(answer: Any) -> None:
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["tiered"]))
    tiers = engine.pool.free_block_queue
    tiers.policy.choose = lambda wanted: answer
    random_steps(engine, 8, 120, lambda: None)
    engine.drain()
    assert tiers.policy.name == "in_order"
    assert audit.check(engine.scheduler) == []


@pytest.mark.parametrize("tier", [-1, 0, 99, None])
def test_a_policy_that_places_nowhere_is_replaced(tier: Any) -> None:
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["tiered"]))
    tiers = engine.pool.free_block_queue
    tiers.policy.place = lambda block_id, grade: tier
    random_steps(engine, 8, 120, lambda: None)
    engine.drain()
    assert tiers.policy.name == "in_order"
    assert audit.check(engine.scheduler) == []


@pytest.mark.parametrize("damage", ["tier_of", "links"])
def test_damaged_queues_are_rebuilt(damage: str) -> None:
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["tiered"]))
    tiers = engine.pool.free_block_queue
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 60:
            if damage == "tier_of":
                tiers.tier_of[:] = bytes(len(tiers.tier_of))
            else:
                for block in tiers.get_all_free_blocks():
                    block.next_free_block = block.prev_free_block = None

    random_steps(engine, 9, 200, each)
    engine.drain()
    assert tiers.failures >= 1
    assert any("rebuilt" in note for note in state.state()["notes"])
    assert audit.check(engine.scheduler) == []


@BOTH
@pytest.mark.parametrize("method", ["_spans", "keep_output"])
def test_window_bookkeeping_that_raises_leaves_stock_behind(
    method: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtune.core.window import KeepingWindowManager

    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS["tiered"]))
    monkeypatch.setattr(KeepingWindowManager, method, getattr(Failing(), method))
    random_steps(engine, 11, 150, lambda: None)
    engine.drain()
    assert any(f"{method} is broken" in note for note in state.state()["notes"])
    assert audit.check(engine.scheduler) == []


def test_audit_sees_what_it_should() -> None:
    """Each kind of damage is found: an audit that cannot fail would be worth nothing."""
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["tiered"]))
    engine.serve(tokens(1, 60))
    engine.add(tokens(2, 60), 20)
    engine.step()
    assert audit.check(engine.scheduler) == []
    pool, tiers = engine.pool, engine.pool.free_block_queue
    used = next(block for block in pool.blocks if block.ref_cnt == 1 and not block.is_null)
    free = tiers.get_all_free_blocks()[0]

    def finds(text: str) -> None:
        assert any(text in line for line in audit.check(engine.scheduler)), audit.check(engine.scheduler)

    used.ref_cnt -= 1
    finds("is in 0 queues")
    finds("places in block tables")
    used.ref_cnt = -1
    finds("ref_cnt -1")
    used.ref_cnt = 1
    free.ref_cnt = 1
    finds("with ref_cnt 1 is in 1 queues")
    free.ref_cnt = 0
    tiers.tier_of[free.block_id] ^= 1
    finds("its tier byte says")
    tiers.tier_of[free.block_id] ^= 1
    tiers.num_free_blocks += 1
    finds("blocks counted as free")
    tiers.num_free_blocks -= 1
    hashed = next(block for block in pool.blocks if block.block_hash is not None)
    key = hashed._block_hash
    hashed._block_hash = b"another" + bytes(8)
    finds("is not found under its hash")
    finds("under a hash that it does not have")
    hashed._block_hash = key
    assert audit.check(engine.scheduler) == []


def test_audit_after_each_step_is_counted_and_can_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtune.errors import KvtuneError

    engine = Engine(SHAPES["hybrid"], CoreSettings())
    audit.watch(engine.scheduler)
    engine.serve(tokens(1, 60))
    counters = state.state()["counters"]
    assert counters["audits"] > 3
    assert "audit_violations" not in counters
    engine.pool.free_block_queue.num_free_blocks += 1
    engine.add(tokens(2, 20), 4)
    engine.step()
    assert state.state()["counters"]["audit_violations"] >= 1
    monkeypatch.setenv("KVTUNE_AUDIT", "raise")
    with pytest.raises(KvtuneError, match="audit: "):
        engine.step()


def test_plain_compares_schedules() -> None:
    """The rig's `plain` sees a difference (the decision tests stand on it)."""
    one, two = Engine(SHAPES["full"], None), Engine(SHAPES["full"], None)
    one.add(tokens(1, 20), 3)
    two.add(tokens(1, 21), 3)
    assert plain(one.step()) != plain(two.step())
