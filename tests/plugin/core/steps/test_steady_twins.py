"""The steady path decides and outputs what stock does: random workloads, compared step by step."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from tests.choice import drawn, each_value
from tests.plugin.core.steady_rig import VOCAB, Shape, Twins

pytestmark = pytest.mark.vllm

SEEDS = drawn(1)
STEPS = 200

SHAPES = {
    "full": Shape(),
    "hybrid": Shape(windows=(12, 12)),
    "hybrid_dense": Shape(windows=(20,), retention=None),
    "small_pool": Shape(blocks=60),
    "small_pool_hybrid": Shape(blocks=110, windows=(12, 12)),
    "no_caching": Shape(caching=False, blocks=80),
    "priority": Shape(policy="priority", blocks=70),
    "active_limit": Shape(active=6),
    "no_stats": Shape(log_stats=False, finished_sets=True),
    "v2_runner": Shape(v2_runner=True, finished_sets=True),
    "states": Shape(states=2, blocks=900),
    "states_small_pool": Shape(states=3, blocks=160),
    "states_dense": Shape(states=1, retention=None, blocks=600),
    "states_small_chunks": Shape(states=2, batched=20, blocks=600),
    "states_no_caching": Shape(states=2, caching=False, blocks=150),
    "prefills_at_intervals": Shape(interval=5),
    "prefills_at_intervals_active_limit": Shape(interval=7, active=6),
    "short_context": Shape(max_len=48, windows=(12,)),
}


def drive(shape: Shape, seed: int, steps: int, columns: tuple[int, ...] = ()) -> Twins:
    chance = random.Random(seed)
    twins = Twins(shape, seed=seed)
    twins.read_columns(*columns)
    prefixes = [[chance.randrange(VOCAB) for _ in range(40)] for _ in range(4)]
    count = 0
    load = 0.0
    for step in range(steps):
        if step % 60 == 0:
            load = chance.choice((0.02, 0.1, 0.4))
        while chance.random() < load:
            count += 1
            prompt = chance.choice(prefixes)[: chance.randrange(1, 40)]
            prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(0, 30))]
            twins.add(
                name=f"r-{count}",
                prompt=prompt[: shape.max_len - 2],
                output=chance.choice((1, 2, 5, 20, 60, 200)),
                priority=chance.randrange(3),
                client=chance.choice((0, 0, 0, 1)) if seed % 2 else 0,
                stops=chance.choice((None, None, [3, 7, 400])),
                eos=chance.choice((None, 11)),
                hashed=shape.caching,
            )
        if chance.random() < 0.02 and twins.stock.requests:
            twins.abort(chance.choice(list(twins.stock.requests)))
        twins.step()
        if step % 7 == 0:
            twins.compare()
    twins.compare()
    return twins


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", SHAPES)
def test_random_workloads(name: str, asynchronous: bool) -> None:
    shape = SHAPES[name]
    if asynchronous:
        shape = Shape(**{**vars(shape), "asynchronous": True})
    steady = 0
    for seed in range(asynchronous, SEEDS + asynchronous):  # odd seeds have two clients
        twins = drive(shape, seed, STEPS)
        assert twins.ours.steady_off == ""
        steady += twins.ours.steady_steps
    # With a small pool the waiting queue is seldom empty, and whether its head can be admitted is stock's to say.
    assert steady > SEEDS * STEPS // 20, f"the steady path was hardly taken: {steady} steps"


@pytest.mark.parametrize(
    ("name", "clients"),
    each_value(["full", "small_pool", "no_stats", "v2_runner", "states"], [(0,), (1,), (0, 1)]),
)
def test_columns_stand_for_the_outputs_that_stock_makes(name: str, clients: tuple[int, ...]) -> None:
    """In the same order, of the requests of those clients alone that read them; slots are given out again."""
    messages = dict.fromkeys(clients, 0)
    for seed in range(1, SEEDS + 1):
        for asynchronous in (False, True):
            shape = Shape(**{**vars(SHAPES[name]), "asynchronous": asynchronous})
            twins = drive(shape, seed, STEPS, clients)
            for client, reader in twins.readers.items():
                messages[client] += reader.messages
                assert len(reader.names) < 200
    assert all(messages.values()), messages
