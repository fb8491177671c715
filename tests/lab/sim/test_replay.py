"""Replays in a simulator process: modes agree, records are whole, cores load, bad input ends in two lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.device.fit import fit
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.choice import each_value
from tests.simulator import on

pytestmark = pytest.mark.vllm

SMALL = [
    "--block-size",
    "32",
    "--max-model-len",
    "1700",
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
]
# (model, blocks, workload): each short of blocks, so that eviction, waiting and preemption take part.
CASES = [
    ("tiny-llama", 120, "zipf:prefixes=12,prefix=500,requests=60,concurrency=8,output=90"),
    ("tiny-llama", 90, "decode:requests=24,prompt=48,output=300"),
    ("tiny-llama", 200, "chat:sessions=8,turns=4,output=60,rate=2.0"),
    ("tiny-gemma3", 260, "zipf:prefixes=10,prefix=600,suffix=40,requests=40,concurrency=6,output=70"),
    ("tiny-gemma3", 260, "mix:prefixes=3,prefix=700,requests=40,cold=700,rate=3.0,concurrency=0,output=50"),
    ("tiny-qwen3next", 40, "chat:sessions=6,turns=3,first=500,output=300"),
]
CORES = ("stock", "kvtune")
TIMES = ("sent_s", "first_token_s", "finished_s")


def settings(model: str, blocks: int, core: Any = "stock", **more: Any) -> Setup:
    flags = [*(SMALL if model != "tiny-qwen3next" else ["--max-model-len", "4096"])]
    flags += ["--num-gpu-blocks-override", str(blocks)]
    return Setup(model=model, engine_args=flags, core=core, device=Simulated(**more))


def replays(simulators: Simulators, workload: str, wanted: list[Setup]) -> list[Run]:
    by_name: dict[int, Run] = {}
    for number, outcome in simulators.run(on(build(workload, seed=1), wanted)):
        assert isinstance(outcome, Run), outcome
        by_name[number] = outcome
    return [by_name[number] for number in range(len(wanted))]


def failure(simulators: Simulators, workload: str, wanted: Setup) -> KvtuneError:
    ((_, outcome),) = simulators.run(on(build(workload, seed=1), [wanted]))
    assert isinstance(outcome, KvtuneError)
    assert outcome.message and outcome.hint and "\n" not in outcome.message
    return outcome


def same_tables(run: Run, other: Run) -> None:
    for table in ("requests", "steps", "pool", "tokens"):
        for column, values in run.table(table).items():
            np.testing.assert_array_equal(values, other.table(table)[column], err_msg=column)


ALIKE = ("tiny-llama", 90, "decode:requests=24,prompt=40,output=200,concurrency=12")
"""Answers of many blocks in a full pool."""


@pytest.mark.parametrize(("case", "ahead"), each_value((*CASES, ALIKE), [False, True]))
def test_leaps_change_neither_hits_nor_order_nor_times(
    simulators: Simulators, case: tuple[str, int, str], ahead: bool
) -> None:
    """All tables are those of single steps: what is evicted when, the free blocks of each step, every token's time."""
    model, blocks, workload = case
    wanted = [
        settings(model, blocks, core=core, shortcuts=shortcuts, digests=digests, async_scheduling=ahead)
        for core in CORES
        for shortcuts, digests in ((False, True), (True, True), (True, False))  # digests: no leaps
    ]
    runs = replays(simulators, workload, wanted)
    for single, short, leaped in (runs[:3], runs[3:]):
        assert leaped.header.extra.sim.jumped_steps > single.header.extra.sim.jumped_steps == 0
        assert short.header.extra.digests == single.header.extra.digests
        for quick in (short, leaped):
            assert (
                single.header.core.active == quick.header.core.active == (single.header.core.name == "kvtune")
            )
            same_tables(single, quick)


def test_a_replay_that_ends_by_its_clock_is_the_first_part_of_the_whole(simulators: Simulators) -> None:
    model, blocks, workload = CASES[2]
    until = [settings(model, blocks, end_s=end_s) for end_s in (0.0, 2.0)]
    whole, cut = replays(simulators, workload, until)
    assert cut.header.state == "complete"
    one, other = whole.table("requests"), cut.table("requests")
    ended = np.isfinite(other["finished_s"])
    assert 0 < ended.sum() < len(ended)
    np.testing.assert_array_equal(one["hit_tokens"][ended], other["hit_tokens"][ended])
    np.testing.assert_array_equal(one["finished_s"][ended], other["finished_s"][ended])
    assert ended[one["finished_s"] < 2.0].all(), "what ends before the clock's end ends in both"


@pytest.mark.full
def test_shortcuts_change_no_step_where_a_steps_budget_cuts_chunks(simulators: Simulators) -> None:
    """States in align mode, a budget of one block: a request in prefill gets nothing in a step that decodes others."""
    flags = ["--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "160"]
    wanted = [
        Setup(
            model="tiny-qwen3next",
            engine_args=flags,
            core="kvtune",
            core_settings={"packed": True},
            device=Simulated(shortcuts=shortcuts, digests=True),
        )
        for shortcuts in (False, True)
    ]
    work = "zipf:prefixes=4,prefix=330,suffix=30,requests=10,concurrency=4,output=8"
    plain, short = replays(simulators, work, wanted)
    assert short.header.extra.digests == plain.header.extra.digests


def test_the_cases_have_evictions_and_preemptions(simulators: Simulators) -> None:
    """The cases above are worth something: blocks run out in them."""
    run = replays(simulators, CASES[1][2], [settings(*CASES[1][:2])])[0]
    assert run.table("requests")["preemptions"].sum() > 0
    assert run.table("steps")["free_blocks"].min() <= 1


def test_every_eviction_is_recorded(simulators: Simulators) -> None:
    """By step and queue, and in total what the core's own counters say; stock evicts from its one queue."""
    kvtune, stock = replays(
        simulators, CASES[3][2], [settings(*CASES[3][:2], core=core) for core in CORES[::-1]]
    )
    pool, counters = kvtune.table("pool"), kvtune.header.core.counters
    queues = kvtune.header.engine.settings["tiers"]
    assert queues == ["speculative", "far", "near", "aged"]  # of policy first
    for number, name in enumerate(queues):
        assert pool["evicted"][pool["tier"] == number].sum() == counters[f"given_out_{name}"], name
    assert pool["evicted"].sum() > 0
    assert set(pool["t_s"]) <= set(kvtune.table("steps")["t_s"])
    assert stock.table("pool")["evicted"].sum() > 0 and not stock.table("pool")["tier"].any()


def test_a_runs_tables_agree_with_each_other(simulators: Simulators) -> None:
    work = "zipf:prefixes=8,prefix=300,requests=40,concurrency=4,output=20"
    run = replays(simulators, work, [settings("tiny-llama", 2000, digests=True)])[0]
    requests, steps, tokens = (run.table(name) for name in ("requests", "steps", "tokens"))
    assert run.header.source == "sim" and run.header.state == "complete"
    assert (requests["output_tokens"] == 20).all() and (requests["finish"] == "length").all()
    computed = requests["prompt_tokens"] - requests["hit_tokens"]
    # The last token of an answer is handed out, not computed.
    assert steps["scheduled_tokens"].sum() == computed.sum() + (20 - 1) * len(computed)
    assert steps["prefill_tokens"].sum() == computed.sum()
    assert len(tokens["t_s"]) == requests["output_tokens"].sum()
    first = [tokens["t_s"][tokens["request"] == row].min() for row in range(40)]
    np.testing.assert_array_equal(first, requests["first_token_s"])
    assert (requests["sent_s"] <= requests["first_token_s"]).all()
    assert len(run.header.extra.digests) == len(steps["t_s"])
    assert run.header.engine_counters["hits"] == requests["hit_tokens"].sum() > 0
    assert not run.header.valid.timings and "nominal" in run.header.valid.why


def test_captured_specs_rebuild_the_engine(simulators: Simulators) -> None:
    """What a real run would store is enough: without the model, block by block the same."""
    work = CASES[3][2]
    first = replays(simulators, work, [settings("tiny-gemma3", 260, digests=True)])[0]
    captured = json.loads(json.dumps(first.header.engine.kv_specs))
    again = replays(
        simulators, work, [Setup(model="tiny-gemma3", device=Simulated(specs=captured, digests=True))]
    )[0]
    assert again.header.engine.num_blocks == 260 and again.header.engine.block_size == 32
    # Without the model there are no attention backends to name.
    groups = [{**group, "backend": ""} for group in first.header.engine.groups]
    assert [{**group, "backend": ""} for group in again.header.engine.groups] == groups
    assert again.header.extra.digests == first.header.extra.digests


def test_async_scheduling_replays_with_the_batch_queue(simulators: Simulators) -> None:
    work = "chat:sessions=6,turns=3,output=40"
    plain, queued = replays(
        simulators,
        work,
        [settings("tiny-llama", 2000), settings("tiny-llama", 2000, async_scheduling=True)],
    )
    assert queued.header.engine.async_scheduling and queued.header.extra.sim.batch_queue
    assert queued.header.engine.settings["scheduler"] != plain.header.engine.settings["scheduler"]
    for column in ("hit_tokens", "output_tokens"):
        np.testing.assert_array_equal(plain.table("requests")[column], queued.table("requests")[column])
    for core in replays(
        simulators, work, [settings("tiny-gemma3", 400, core=c, async_scheduling=True) for c in CORES]
    ):
        assert (core.table("requests")["output_tokens"] == 40).all()


def test_block_tokens_set_the_block_size_except_with_states(simulators: Simulators) -> None:
    wanted = settings("tiny-llama", 400, block_tokens=16)
    assert replays(simulators, "rounds", [wanted])[0].header.engine.block_size == 16
    error = failure(simulators, "rounds", settings("tiny-qwen3next", 400, block_tokens=16))
    assert "state-space" in error.message


def test_predicted_times_are_marked(simulators: Simulators) -> None:
    cost = StepCost(
        step_us=1000,
        prefill_token_us=10,
        decode_us=20,
        kv_token_us=0,
        fitted=True,
        machine="this one",
        steps=500,
    )
    run = replays(
        simulators, "decode:requests=1,prompt=100,output=3", [settings("tiny-llama", 400, cost=cost)]
    )[0]
    assert run.header.valid.timings and run.header.valid.why.startswith("predicted")
    times = run.table("tokens")["t_s"]
    np.testing.assert_allclose(times, [0.002, 0.00302, 0.00404])
    assert run.header.extra.step_cost["machine"] == "this one"


@pytest.mark.full
def test_requests_and_answers_take_their_transport_delays(simulators: Simulators) -> None:
    cost = StepCost(
        step_us=1000,
        prefill_token_us=10,
        decode_us=20,
        kv_token_us=0,
        between_us=100,
        enter_us=300,
        leave_us=500,
    )
    work = "decode:requests=3,prompt=100,output=3,concurrency=1"
    run = replays(simulators, work, [settings("tiny-llama", 400, cost=cost)])[0]
    requests = run.table("requests")
    np.testing.assert_allclose(requests["first_token_s"] - requests["sent_s"], 0.0003 + 0.0021 + 0.0005)
    np.testing.assert_allclose(requests["sent_s"][1:], requests["finished_s"][:-1])
    for ahead in (False, True):
        shape = {"cost": cost, "async_scheduling": ahead}
        busy = [settings("tiny-llama", 120, **shape, shortcuts=on, digests=True) for on in (False, True)]
        plain, short, jumped = replays(simulators, CASES[0][2], [*busy, settings("tiny-llama", 120, **shape)])
        assert short.header.extra.digests == plain.header.extra.digests
        for column in ("hit_tokens", "preemptions", *TIMES):
            np.testing.assert_array_equal(plain.table("requests")[column], short.table("requests")[column])
            np.testing.assert_array_equal(plain.table("requests")[column], jumped.table("requests")[column])


@pytest.mark.full
def test_a_cost_fitted_to_one_load_predicts_another(simulators: Simulators) -> None:
    """Chunks beside decodes: what a prompt token attends to is its own request's, not the step's."""
    truth = StepCost(
        step_us=7000,
        prefill_token_us=55,
        decode_us=700,
        kv_token_us=0.05,
        prefill_step_us=5000,
        prefill_kv_us=0.04,
        enter_us=1500,
        leave_us=1500,
    )
    seen = replays(
        simulators,
        "mix:prefixes=3,prefix=1200,requests=40,cold=1600,concurrency=3,output=24",
        [settings("tiny-gemma3", 4000, cost=truth)],
    )[0]
    cost = fit(seen)
    assert cost.trusted and cost.held_out_share < 0.01
    wanted = [settings("tiny-gemma3", 4000, cost=c) for c in (truth, cost)]
    work = "zipf:prefixes=6,prefix=900,suffix=80,requests=30,concurrency=4,output=20"
    times = [run.table("requests") for run in replays(simulators, work, wanted)]
    real, predicted = (float(np.mean(t["first_token_s"] - t["sent_s"])) for t in times)
    assert predicted == pytest.approx(real, rel=0.01)


def test_arrivals_move_the_clock(simulators: Simulators) -> None:
    run = replays(
        simulators, "decode:requests=20,prompt=64,output=4,rate=0.5", [settings("tiny-llama", 400)]
    )[0]
    requests = run.table("requests")
    assert (requests["sent_s"] >= requests["planned_s"]).all()
    # Also those that arrive during a step: the client does not wait for the engine.
    np.testing.assert_array_equal(requests["sent_s"], requests["planned_s"])
    assert run.header.wall_s > 20


def test_a_pool_of_one_block_is_refused(simulators: Simulators) -> None:
    assert "vLLM refuses" in failure(simulators, "rounds", settings("tiny-llama", 1)).message


def test_a_refusal_quotes_vllm(simulators: Simulators) -> None:
    small = ["--num-gpu-blocks-override", "100", "--max-num-batched-tokens", "16", "--max-num-seqs", "64"]
    error = failure(simulators, "rounds", Setup(model="tiny-llama", engine_args=[*SMALL, *small]))
    assert "must be greater than or equal to max_num_seqs" in error.message


def test_a_prompt_that_never_fits_is_refused(simulators: Simulators) -> None:
    error = failure(simulators, "prefill:requests=2,prompt=1690,output=20", settings("tiny-llama", 400))
    assert "max-model-len" in error.message and error.exit_code == 2


def test_a_pool_of_unknown_size_is_refused(simulators: Simulators, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    from kvtune.data.layout.models import config

    (folder / "config.json").write_text(json.dumps(config("tiny-llama")))
    error = failure(simulators, "rounds", Setup(model=str(folder)))
    assert "how large" in error.message and "--num-gpu-blocks-override" in error.hint


def test_a_model_class_that_vllm_lacks_is_refused(simulators: Simulators, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["NobodyForCausalLM"], "hidden_size": 64})
    )
    error = failure(simulators, "rounds", Setup(model=str(tmp_path)))
    assert str(tmp_path) in error.message and "NobodyForCausalLM" in error.message
    assert len(error.message) < 600  # vLLM names every model that it knows


def test_flags_that_vllm_lacks_are_refused(simulators: Simulators) -> None:
    error = failure(simulators, "rounds", Setup(model="tiny-llama", engine_args=["--no-such-flag", "1"]))
    assert "--no-such-flag" in error.message and error.exit_code == 2


@pytest.mark.full
def test_an_interrupt_leaves_a_partial_record() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    work = build("decode:requests=640,prompt=48,output=30k,concurrency=16", seed=0)
    wanted = Setup(model="tiny-llama", device=Simulated(cost=NOMINAL)).with_load(work)

    def press_ctrl_c(report: object) -> None:
        raise KeyboardInterrupt

    with Simulators(1) as simulators:
        for number in range(3):
            simulators.submit(number, wanted)
        with pytest.raises(KeyboardInterrupt):
            simulators.next_done(press_ctrl_c)
        simulators.stop()
        _, run = simulators.next_done()
        assert not simulators.running, "the others had not begun"
    assert isinstance(run, Run) and run.header.state == "partial" and run.header.why == "interrupted"
    assert run.table("steps")["t_s"].size > 0
    assert (run.table("requests")["finish"] == "").any()
