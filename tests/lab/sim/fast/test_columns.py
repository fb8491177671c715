"""Requests that decode are counted in columns, beside vLLM's scheduler; an abort settles them."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.clock import VirtualClock
from kvtune.requests.loads.spec import build as workload_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

FLAGS = ["--max-model-len", "700", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "70"]


def played(*, shortcuts: bool, ahead: bool) -> dict[str, Any]:
    """Abort two requests when a third gets its first token; return what the engine and the pool then are, and later."""
    pytest.importorskip("vllm")
    from kvtune.lab.sim.build import build
    from kvtune.lab.sim.player import Player

    flags = Setup(
        model="tiny-llama",
        engine_args=[*FLAGS, "--block-size", "16"],
        device=Simulated(shortcuts=shortcuts, async_scheduling=ahead),
    )
    clock = VirtualClock()
    engine = build(flags, clock)
    try:
        workload = workload_of("decode:requests=9,prompt=90,output=60,rate=20", seed=1)
        player = Player(workload, flags.simulated, engine, clock)
        scheduler, journal = engine.scheduler, player.journal
        player.begin()
        aborted: list[tuple[str, int, int, int]] = []
        while player.finished < 7:
            for index, sent_s in player._transport.arrivals(clock.now_s):
                player.send(index, sent_s)
            if not player.busy:
                clock.advance_to(player._transport.next_arrival())
                continue
            player.turn()
            if journal.output[5] and not aborted:
                rows = getattr(scheduler, "columns", None)
                assert rows is None or rows.requests, "rows are counted when the abort comes"
                engine.abort_requests(["2", "4"])  # type: ignore[attr-defined]
                aborted = [
                    (r.request_id, r.num_computed_tokens, r.num_tokens, r.num_in_flight_tokens)
                    for r in scheduler.running
                ]
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "aborted": aborted,
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "cached": sorted(
                (key, block.block_id) for key, block in pool.cached_block_hash_to_block._cache.items()
            ),
            "finished": journal.finished_s.tolist(),
            "tokens": journal.output.tolist(),
        }
    finally:
        engine.scheduler.shutdown()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_finds_all_requests_as_vllm_would_have_left_them(ahead: bool) -> None:
    plain, short = (played(shortcuts=shortcuts, ahead=ahead) for shortcuts in (False, True))
    assert len(plain["aborted"]) > 2 and plain["tokens"][2] < 60
    assert str(short) == str(plain)
