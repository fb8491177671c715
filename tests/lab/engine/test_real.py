"""kvtune against the real vLLM engine: the whole way from the command line to JSON, run file and page.

An engine start costs about 25 s of two cores, so the tests of this module share one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.lab.engine.real import Ran, counts_as_vllm, engine_roles, profiled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PREFIXES, PREFIX, ROUNDS, OUTPUT = 4, 768, 3, 16
REQUESTS, PROMPT = PREFIXES * ROUNDS, PREFIX + 64


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("ran"),
        "tiny-gemma3",
        "-w", f"rounds:prefixes={PREFIXES},prefix={PREFIX},suffix=64,output={OUTPUT},rounds={ROUNDS}",
        engine=("--max-num-seqs", "256", "--block-size", "32", "--num-gpu-blocks-override", "8000"),
    )  # fmt: skip


CONTRACT = """
schema source model workload.name workload.params workload.hash core.name core.settings seed
engine.vllm engine.device engine.executor engine.block_size engine.num_blocks engine.settings
python host.cpu host.cores requests prompt_tokens output_tokens wall_s throughput_tok_s
ttft_ms.mean ttft_ms.p50 ttft_ms.p99 itl_ms.mean itl_ms.p50 itl_ms.p99 e2e_ms.mean rounds
prefix_cache.query_tokens prefix_cache.hit_tokens prefix_cache.hit_rate prefix_cache.misses
gc host_us.schedule host_us.update host_us.per_request_step memory valid.timings valid.why
""".split()  # noqa: SIM905


@pytest.mark.parametrize("path", CONTRACT)
def test_the_contracts_fields_are_there(ran: Ran, path: str) -> None:
    value: Any = ran.facts
    for name in path.split("."):
        assert name in value, f"--json has no {path}"
        value = value[name]
    assert value is not None


def test_what_was_asked_for_was_served(ran: Ran) -> None:
    facts = ran.facts
    assert (facts["requests"], facts["prompt_tokens"], facts["output_tokens"]) == (
        REQUESTS,
        REQUESTS * PROMPT,
        REQUESTS * OUTPUT,
    )
    assert facts["engine"]["settings"]["max_num_seqs"] == 256
    assert facts["valid"]["timings"] is True
    cache = facts["prefix_cache"]
    assert cache["hit_tokens"] + sum(cache["misses"].values()) == cache["query_tokens"]


def test_the_front_ends_counts_agree_with_vllms(ran: Ran) -> None:
    counts_as_vllm(ran)


def test_the_core_hits_from_the_second_visit_on(ran: Ran) -> None:
    assert ran.facts["core"]["name"] == "kvtune"
    assert ran.run.header.core.active, ran.run.header.core.why
    assert [r["hit_tokens"] for r in ran.facts["rounds"]] == [0, *[PREFIXES * PREFIX] * (ROUNDS - 1)]


def test_every_process_has_its_own_instruments(ran: Ran) -> None:
    header = ran.run.header
    roles = engine_roles(ran.run)
    assert roles <= {p.role for p in header.processes}
    assert header.probe.level == "light" and not header.probe.disabled and not header.probe.lost_records
    measured = {header.processes[i].role for i in ran.run.table("memory")["process"]}
    assert roles <= measured
    for name in roles:
        assert ran.facts["memory"][name] > 100 << 20


def test_every_step_was_seen(ran: Ran) -> None:
    steps = ran.run.table("steps")
    scheduled = int(steps["scheduled_tokens"].sum())
    # Each output token but a request's last is fed back as input.
    computed = REQUESTS * PROMPT - ran.facts["prefix_cache"]["hit_tokens"]
    assert scheduled == computed + REQUESTS * (OUTPUT - 1)
    assert (steps["step_us"] >= steps["schedule_us"] + steps["update_us"]).all()
    assert int(steps["prefill_tokens"].sum()) == computed


def test_token_times_are_whole_and_in_order(ran: Ran) -> None:
    tokens, requests = ran.run.table("tokens"), ran.run.table("requests")
    assert int(tokens["count"].sum()) == ran.facts["output_tokens"]
    for i in (0, REQUESTS // 2, REQUESTS - 1):
        times = tokens["t_s"][tokens["request"] == i]
        assert math.isclose(times[0], requests["first_token_s"][i])
        assert (times[1:] >= times[:-1]).all()
        assert requests["sent_s"][i] <= times[0] <= times[-1] <= requests["finished_s"][i]


def test_the_page_is_one_file_without_any_address(ran: Ran) -> None:
    page = Path(ran.facts["page"])
    text = page.read_text()
    assert "tiny-gemma3" in text and text.lstrip().lower().startswith("<!doctype html>")
    assert page.stat().st_size < 3 << 20


def test_nothing_is_left_in_the_output_folder_but_results(ran: Ran) -> None:
    folder = Path(ran.facts["run_file"]).parent
    assert {p.suffix for p in folder.iterdir()} == {".kvrun", ".html"}
