from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from kvtune.answers.capacity.estimate import Engine, Window, estimate
from kvtune.answers.capacity.search import MOST, Estimates, fitted, largest
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.requests.loads.sessions import Load, Node, Rules, Session, Slots, load
from kvtune.requests.loads.spec import session_load
from tests.recorded_sessions import unpacked

WINDOW = Window(900.0, 2700.0)
SLOW = StepCost(step_us=15_000.0, prefill_token_us=200.0, decode_us=60.0, kv_token_us=0.0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Load:
    return session_load(f"trace:path={unpacked(tmp_path_factory.mktemp('sessions'))}")


def test_a_pool_that_holds_everything_keeps_everything(recorded: Load) -> None:
    found = estimate(Slots(recorded, 0), 8, Engine(10**9), WINDOW)
    assert found.kept == pytest.approx(1.0, abs=0.001) and found.waiting < 0.05
    assert found.hits <= found.possible <= found.prompt


def test_fewer_hits_are_kept_by_smaller_pools_and_more_sessions(recorded: Load) -> None:
    pools = [
        estimate(Slots(recorded, 1), 10, Engine(pool), WINDOW).kept for pool in (150_000, 500_000, 2_000_000)
    ]
    assert pools[0] < pools[1] < pools[2]
    counts = [estimate(Slots(recorded, 1), count, Engine(500_000), WINDOW).kept for count in (2, 10, 30)]
    assert counts[0] > counts[1] > counts[2]


def test_a_tier_larger_than_the_pool_keeps_what_the_pool_loses(recorded: Load) -> None:
    engine = Engine(500_000)
    alone, behind = (
        estimate(Slots(recorded, 1), 12, one, WINDOW).kept for one in (engine, replace(engine, cache=10**9))
    )
    assert alone < 0.9 < 0.99 < behind


def test_a_device_that_does_not_keep_up_makes_prompts_wait_and_hits_collapse(recorded: Load) -> None:
    quick, slow = (
        estimate(Slots(recorded, 0), 24, Engine(534_064, cost=cost), WINDOW) for cost in (NOMINAL, SLOW)
    )
    assert quick.waiting < 0.3 and quick.kept > 0.5
    assert slow.waiting > 0.9 and slow.kept < 0.2


def test_seats_make_requests_wait(recorded: Load) -> None:
    found = estimate(Slots(recorded, 0), 24, Engine(534_064, max_num_seqs=1), WINDOW)
    assert found.blocked > 0.5 and found.waiting >= found.blocked


def test_the_same_seed_gives_the_same_figures(recorded: Load) -> None:
    one, other = (estimate(Slots(recorded, 3), 9, Engine(500_000), WINDOW) for _ in range(2))
    assert one == other


def test_tokens_that_all_sessions_share_are_in_the_pool_once() -> None:
    from kvtune.requests.types import Span

    head = (Span(1, 0, 9_000),)
    session = Session(
        "s",
        (
            Node(10_000, 10, head=head),
            *(Node(10_000 + 20 * n, 10, (n - 1,), 20.0, n - 1, 9_990 + 20 * n) for n in range(1, 9)),
        ),
    )
    kept = [
        estimate(
            Slots(load([session], Rules(share=share), "x"), 0), 12, Engine(40_000), Window(60.0, 600.0)
        ).kept
        for share in (True, False)
    ]
    assert kept[0] > 0.95 > 0.6 > kept[1]


def test_a_beginning_that_was_evicted_is_hit_again_once_another_request_has_computed_it() -> None:
    """Two requests go back to the first tokens of a request that is gone: the first of them computes these again."""
    long = Node(1_400, 10, (0,), 5.0)
    back = [Node(300, 10, (at - 1,), 5.0, 0, 208) for at in (2, 3, 4)]
    session = Session("s", (Node(1_000, 10), long, *back))
    found = estimate(Slots(load([session], Rules(), "x"), 0), 1, Engine(1_410), Window(200.0, 4_000.0))
    assert found.requests > 400 and found.kept == pytest.approx(2 / 3, abs=0.01)


def test_the_largest_number_that_holds_is_found() -> None:
    for limit, near in itertools.product((0, 1, 2, 3, 17, 64, 100, MOST - 1, MOST), (1, 2, 20, 90, MOST)):
        asked: list[int] = []

        def holds(number: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number <= limit

        assert largest(holds, MOST, near) == (limit if limit < MOST else MOST + 1)
        assert len(asked) == len(set(asked)) < 22


def test_ranges_are_by_seed_and_each_estimate_is_made_once(recorded: Load) -> None:
    made = Estimates(recorded, Engine(534_064), WINDOW, range(4))
    kept = made.keeping(0.9)
    assert len(kept.by_seed) == 4 and kept.low == min(kept.by_seed) <= kept.high == max(kept.by_seed)
    count = made.made
    assert made.keeping(0.9) == kept and made.made == count
    for seed, most in enumerate(kept.by_seed):
        assert made.at(seed, most).kept >= 0.9 > made.at(seed, most + 1).kept
    more = made.on(replace(made.engine, pool=2 * made.engine.pool)).keeping(0.9)
    assert more.low > kept.high


def test_an_estimate_is_fitted_to_replays(recorded: Load) -> None:
    made = Estimates(recorded, Engine(534_064), WINDOW, range(3))
    real = made.on(replace(made.engine, pool=int(1.3 * made.engine.pool))).kept(12, range(3))
    assert fitted(made, 12, range(3), real) == pytest.approx(1.3, rel=0.05)


def test_too_few_requests_say_nothing() -> None:
    session = Session("s", (Node(100, 10), Node(120, 10, (0,), 600.0, 0, 110)))
    made = Estimates(load([session], Rules(), "x"), Engine(50), Window(10.0, 60.0), range(2))
    assert made.keeping(0.9).low > 1


def test_a_folder_of_one_long_pause_is_estimated(tmp_path: Path) -> None:
    from tests.recorded_sessions import asked, written

    written(tmp_path, [asked(0, 6400, range(100)), asked(700, 6500, range(101), think_time=690.0)])
    found = estimate(
        Slots(session_load(f"trace:path={tmp_path}"), 0), 40, Engine(50_000), Window(900.0, 3600.0)
    )
    assert found.requests > 40 and found.kept < 0.3
