"""Simulated trials: answers are run summaries, what fails says why, more trials than cores wait for their turn."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvtune.engine.setup import Load, Pool, Setup, Simulated
from kvtune.fake_device.settings import nominal
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.tune.trials.run import SimPool
from kvtune.workload.spec import build
from tests.simulator import SHARED

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BENCH = Setup(
    model="tiny-llama",
    load=Load(spec="zipf:prefixes=4,prefix=256,requests=12,output=4", seed=0, hash=""),
    engine_args=["--num-gpu-blocks-override", "200", "--block-size", "32", "--max-model-len", "1024"],
    pool=Pool(block_tokens=32),
    core="kvtune",
)


@pytest.fixture
def pool() -> Iterator[SimPool]:
    pytest.importorskip("vllm", reason="needs vLLM")
    with SimPool(BENCH, SHARED) as started:
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


def test_a_pool_without_room_for_one_request_is_answered_with_the_length_that_fits(pool: SimPool) -> None:
    pool.submit(0, {"num_gpu_blocks_override": 20})
    _, refused = pool.next_done()
    length = re.fullmatch(r"the pool holds ([\d]+) tokens of one request, .*is 1,024", refused.failed)
    assert length and f"`-- --max-model-len {length[1]}`" in refused.hint
    pool.submit(1, {"num_gpu_blocks_override": 20, "max_model_len": int(length[1])})
    assert pool.next_done()[1].summary["engine"]["num_blocks"] == 20


@pytest.mark.full
def test_a_pool_that_no_flag_gives_is_that_of_the_engines_run(simulators: Simulators) -> None:
    """With the run's scheduling and KV specs; a trial with other blocks has as many tokens in its pool."""
    wanted = Setup(model=BENCH.model, engine_args=BENCH.engine_args)
    ((_, run),) = simulators.map(build(BENCH.load.spec, seed=0), [wanted])
    assert isinstance(run, Run)
    engine = replace(run.header.engine, async_scheduling=True)
    ran = Run(replace(run.header, engine=engine), run.tables)
    own = replace(BENCH, engine_args=["--block-size", "32", "--max-model-len", "1024"], pool=Pool())
    with SimPool(own.as_ran(ran), SHARED) as measured:
        measured.submit(0, {}, stock=True)
        measured.submit(1, {"slack": 64})
        measured.submit(2, {"block_size": 64})
        answers = dict(measured.next_done() for _ in range(3))
    assert not any(answer.failed for answer in answers.values()), answers
    engines = [answers[n].summary["engine"] for n in range(3)]
    assert [engine["num_blocks"] for engine in engines] == [200, 200, 100]
    assert [engine["block_size"] for engine in engines] == [32, 32, 64]
    assert all("Async" in engine["settings"]["scheduler"] for engine in engines)


@pytest.mark.full
def test_trials_for_a_device_that_only_takes_time_have_its_blocks_on_every_machine() -> None:
    """16 tokens where no flag says otherwise, also under a CPU's vLLM; a pool keeps its size in tokens."""
    flags = ["--num-gpu-blocks-override", "200", "--max-model-len", "1024"]
    timed = replace(BENCH, engine_args=flags, pool=Pool(block_tokens=16), device=nominal())
    with SimPool(timed, SHARED) as pool:
        pool.submit(0, {}, stock=True)
        pool.submit(1, {"block_size": 16})
        pool.submit(2, {"block_size": 32})
        answers = dict(pool.next_done() for _ in range(3))
    assert not any(answer.failed for answer in answers.values()), answers
    engines = [answers[n].summary["engine"] for n in range(3)]
    assert [engine["block_size"] for engine in engines] == [16, 16, 32]
    assert [engine["num_blocks"] for engine in engines] == [200, 200, 100]


def test_specs_of_the_run_serve_trials_that_do_not_change_them() -> None:
    shown = replace(BENCH, device=Simulated(specs={"version": 1}))
    for kept in ({"slack": 64, "max_num_seqs": 8}, {}):
        assert shown.with_knobs(kept).simulated.specs == {"version": 1}
    changing: tuple[dict[str, Any], ...] = ({"block_size": 64}, {"packed": True}, {"kv_cache_dtype": "fp8"})
    for each in changing:
        assert shown.with_knobs(each).simulated.specs == {}
    assert replace(shown, core_settings={"packed": True}).with_knobs({}).simulated.specs == {}


def test_a_trial_that_dies_says_so(pool: SimPool) -> None:
    pool.submit(6, {})
    assert not pool.next_done()[1].failed  # what the worker starts for its imports has ended
    worker = pool._simulators._process
    assert worker is not None
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    before = set(children.read_text().split())
    pool.submit(7, {})
    while not (new := set(children.read_text().split()) - before):
        pass
    os.kill(int(new.pop()), signal.SIGKILL)
    number, answer = pool.next_done()
    assert number == 7 and "SIGKILL" in answer.failed and answer.hint
