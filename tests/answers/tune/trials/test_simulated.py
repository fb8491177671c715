"""Simulated trials: answers are run summaries, what fails says why, more trials than cores wait for their turn."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from kvtune.answers.tune.trials.run import STOCK, PlannedTrial, Trials
from kvtune.base.errors import KvtuneError
from kvtune.data.run.types import Run
from kvtune.lab.device.settings import nominal
from kvtune.lab.setup.setup import Load, Pool, Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.simulator import SHARED, on

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BENCH = Setup(
    model="tiny-llama",
    load=Load(spec="zipf:prefixes=4,prefix=256,requests=12,output=4", seed=0, hash=""),
    engine_args=["--num-gpu-blocks-override", "200", "--block-size", "32", "--max-model-len", "1024"],
    pool=Pool(block_tokens=32),
    core="kvtune",
)


class Replays(Trials):
    """Trials of a set-up in the simulator. `errors`: of those that failed."""

    def __init__(self, setup: Setup = BENCH) -> None:
        self.errors: list[KvtuneError] = []
        failed = lambda plan, error: self.errors.append(error)  # noqa: E731
        super().__init__(setup.replayed(), lab=SHARED, failed=failed)


@pytest.fixture
def replays() -> Iterator[Replays]:
    pytest.importorskip("vllm", reason="needs vLLM")
    with Replays() as started:
        yield started


def test_trials_come_back_as_summaries_and_each_is_run_once(replays: Replays) -> None:
    plans = [STOCK, *map(PlannedTrial, ({}, {"block_size": 64}, {"no_such_flag": 1}, {}))]
    trials = replays.run(plans)
    assert trials[1] is trials[4] and len(replays.made) == 4
    assert replays.run(plans) == trials and len(replays.made) == 4
    assert [trial.summary["core"]["name"] for trial in trials[:3]] == ["stock", "kvtune", "kvtune"]
    assert trials[1].summary["core"]["active"] and trials[1].summary["prefix_cache"]["hit_tokens"] > 0
    assert [trial.summary["engine"]["num_blocks"] for trial in trials[:3]] == [200, 200, 100]
    assert [trial.state for trial in trials[:4]] == [*["complete"] * 3, "failed"]
    assert "no-such-flag" in trials[3].why and replays.errors[0].hint and not trials[3].summary
    assert all(trial.elapsed_s > 0 for trial in trials)


def test_a_pool_without_room_for_one_request_is_answered_with_the_length_that_fits(replays: Replays) -> None:
    replays.run([PlannedTrial({"num_gpu_blocks_override": 20})])
    (refused,) = replays.errors
    length = re.fullmatch(r"the pool holds ([\d]+) tokens of one request, .*is 1,024", refused.message)
    assert length and f"`-- --max-model-len {length[1]}`" in refused.hint
    fits = PlannedTrial({"num_gpu_blocks_override": 20, "max_model_len": int(length[1])})
    assert replays.run([fits])[0].summary["engine"]["num_blocks"] == 20


@pytest.mark.full
def test_a_pool_that_no_flag_gives_is_that_of_the_engines_run(simulators: Simulators) -> None:
    """With the run's scheduling and KV specs; a trial with other blocks has as many tokens in its pool."""
    wanted = Setup(model=BENCH.model, engine_args=BENCH.engine_args)
    ((_, run),) = simulators.run(on(build(BENCH.load.spec, seed=0), [wanted]))
    assert isinstance(run, Run)
    engine = replace(run.header.engine, async_scheduling=True)
    ran = Run(replace(run.header, engine=engine), run.tables)
    own = replace(BENCH, engine_args=["--block-size", "32", "--max-model-len", "1024"], pool=Pool())
    with Replays(own.as_ran(ran)) as measured:
        trials = measured.run([STOCK, PlannedTrial({"slack": 64}), PlannedTrial({"block_size": 64})])
    assert not any(trial.why for trial in trials), trials
    engines = [trial.summary["engine"] for trial in trials]
    assert [engine["num_blocks"] for engine in engines] == [200, 200, 100]
    assert [engine["block_size"] for engine in engines] == [32, 32, 64]
    assert all("Async" in engine["settings"]["scheduler"] for engine in engines)


@pytest.mark.full
def test_trials_for_a_device_that_only_takes_time_have_its_blocks_on_every_machine() -> None:
    """16 tokens where no flag says otherwise, also under a CPU's vLLM; a pool keeps its size in tokens."""
    flags = ["--num-gpu-blocks-override", "200", "--max-model-len", "1024"]
    timed = replace(BENCH, engine_args=flags, pool=Pool(block_tokens=16), device=nominal())
    with Replays(timed) as replays:
        trials = replays.run([STOCK, PlannedTrial({"block_size": 16}), PlannedTrial({"block_size": 32})])
    assert not any(trial.why for trial in trials), trials
    engines = [trial.summary["engine"] for trial in trials]
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


def test_a_trial_that_dies_says_so(replays: Replays) -> None:
    assert not replays.run([STOCK])[0].why  # what the worker starts for its imports has ended
    worker = replays._simulated[1]._worker
    assert worker is not None
    pid = worker.child.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    before = set(children.read_text().split())

    def kill() -> None:
        while not (new := set(children.read_text().split()) - before):
            pass
        os.kill(int(new.pop()), signal.SIGKILL)

    thread = Thread(target=kill)
    thread.start()
    (trial,) = replays.run([PlannedTrial({})])
    thread.join()
    assert trial.state == "failed" and "SIGKILL" in trial.why and replays.errors[0].hint
