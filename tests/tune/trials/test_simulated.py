"""Simulated trials: answers are run summaries, what fails says why, more trials than cores wait for their turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtune.analysis.study import Bench
from kvtune.tune.trials.simulated import SimPool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BENCH = Bench(
    model="tiny-llama",
    spec="zipf:prefixes=4,prefix=256,requests=12,output=4",
    seed=0,
    workload_hash="",
    engine_args=["--num-gpu-blocks-override", "200", "--block-size", "32", "--max-model-len", "1024"],
    block_tokens=32,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[SimPool]:
    pytest.importorskip("vllm", reason="needs vLLM")
    with SimPool(BENCH) as started:
        yield started


def test_trials_come_back_as_summaries(pool: SimPool) -> None:
    pool.submit(0, {}, stock=True)
    pool.submit(1, {})
    pool.submit(2, {"block_size": 64})
    pool.submit(3, {"no_such_flag": 1})
    assert pool.running == 4 and not pool.free
    answers = dict(pool.next_done() for _ in range(4))
    assert pool.running == 0 and pool.free
    assert [answers[n].summary["core"]["name"] for n in range(3)] == ["stock", "kvtune", "kvtune"]
    assert answers[1].summary["core"]["active"] and answers[1].summary["prefix_cache"]["hit_tokens"] > 0
    assert [answers[n].summary["engine"]["num_blocks"] for n in range(3)] == [200, 200, 100]
    assert "no-such-flag" in answers[3].failed and answers[3].hint and not answers[3].summary
    assert all(answers[n].elapsed_s > 0 for n in range(3))


def test_a_trial_that_dies_says_so(pool: SimPool) -> None:
    worker = pool._simulators._process
    assert worker is not None
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    before = set(children.read_text().split())  # helpers of vLLM's, and forks that have ended
    pool.submit(7, {})
    while not (new := set(children.read_text().split()) - before):
        pass
    os.kill(int(new.pop()), signal.SIGKILL)
    number, answer = pool.next_done()
    assert number == 7 and "SIGKILL" in answer.failed and answer.hint
