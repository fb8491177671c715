"""Remedies: those first that may win most, and for stock vLLM those that need no kvtune; each has a command."""

from __future__ import annotations

import shlex
from dataclasses import replace

import msgspec
import pytest

from kvtune.answers.changes import Eviction, Situation
from kvtune.answers.explain.remedies import candidates
from kvtune.data.run.extras import Remedy, Replayed
from kvtune.data.run.types import CoreInfo
from kvtune.lab.setup.setup import Setup
from kvtune.reading.analysis.again import MODEL, Invocation, of_run, served_with
from kvtune.reading.analysis.replayed import FLAGS_ONLY, helping, more_tries, needs
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from tests.golden.synthetic import replace_header, rounds_run


def at(**more: object) -> Situation:
    chosen = Setup(model="m", engine_args=["--max-num-seqs", "8"])
    plain = Situation(chosen, blocks=100, unit=128, retention=0, window=512, states=False, pool_gib=0.25)
    return replace(plain, **more)


def changes(misses: dict[str, int], where: Situation) -> list[str]:
    return [option.change for option in candidates(misses, 1000, where)]


def test_what_may_win_most_is_tried_first() -> None:
    mostly_evicted = changes({"evicted": 500, "not_retained": 100}, at())
    assert mostly_evicted[0].startswith("--kv-offloading-size") and mostly_evicted[1].startswith(
        "2x the pool"
    )
    mostly_unkept = changes({"evicted": 100, "not_retained": 500}, at())
    assert mostly_unkept[0].startswith("--prefix-cache-retention-interval 0 -> 512")


def test_a_pool_that_keeps_what_comes_soon_is_enough() -> None:
    """Evicted at most 4 s before the miss, in a pool that is filled in 10 s: half a pool more keeps all of it."""
    soon = at(turn_s=10.0, evictions=[Eviction("prefill of a", 500, 2.0, 4.0)])
    assert soon.kept(0.5) == soon.kept(4.0) == 1.0
    late = at(turn_s=10.0, evictions=[Eviction("prefill of a", 500, 30.0, 60.0)])
    assert late.kept(0.5) == pytest.approx(0.5 * 5 / 30) and late.kept(4.0) == pytest.approx(
        0.5 + 0.5 * 10 / 30
    )
    assert changes({"evicted": 500}, late)[0].startswith("--kv-offloading-size")
    assert changes({"evicted": 500}, soon)[0].startswith("1.5x the pool"), "the cheapest of equals"


def test_to_stock_what_needs_the_core_comes_last() -> None:
    cores = [option.setup.core for option in candidates({"evicted": 500}, 1000, at())]
    assert "kvtune" in cores and cores == sorted(cores, key=lambda core: core == "kvtune")
    of_core = at(setup=Setup(model="m", core="kvtune"))
    assert {option.setup.core for option in candidates({"evicted": 500}, 1000, of_core)} == {"kvtune"}


def test_also_tried_are_fewer_requests_shorter_steps_and_states_of_half_the_size() -> None:
    tried = changes({"evicted": 500}, at(sequences=64, chunk=4096))
    assert "--max-num-seqs 64 -> 32" in tried and "--max-num-batched-tokens 4096 -> 2048" in tried
    states = at(states=True, window=0, unit=544, chunk=8192, retention=None, pool_bytes=1 << 20)
    assert "--max-num-batched-tokens 8192 -> 1088" in changes({"not_retained": 500}, states)
    halved = candidates({"partial_block": 500}, 1000, replace(states, float32_states=True))
    (option,) = [o for o in halved if "--mamba-ssm-cache-dtype bfloat16" in o.change]
    assert option.setup.core == "stock" and not option.setup.simulated.specs
    assert option.setup.engine_args[-2:] == ["--kv-cache-memory-bytes", str(1 << 20)]
    assert not any("ssm" in change for change in changes({"partial_block": 500}, states))


MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}']


def hybrid(*flags: str, **more: object) -> Situation:
    """Qwen3-Next's: blocks of 544 tokens with a state, chunks of 8,192."""
    chosen = Setup(model="m", engine_args=list(flags))
    return at(setup=chosen, states=True, window=0, unit=544, block=544, chunk=8192, sequences=256, **more)


def flags_of(cause: str, where: Situation) -> dict[str, list[str]]:
    return {
        o.change: o.setup.engine_args[len(where.setup.engine_args) :]
        for o in candidates({cause: 500}, 1000, where)
    }


def test_states_are_kept_by_flags_alone() -> None:
    plain = flags_of("not_retained", hybrid())
    assert next(iter(plain)) == "--prefix-cache-retention-interval 1088 --max-num-batched-tokens 1088"
    assert not any("checkpoint" in change for change in plain), "it acts with drafts only"
    (ends,) = [f for c, f in flags_of("partial_block", hybrid()).items() if "match-unit" in c]
    assert ends == ["--prefix-match-unit", "32"]
    finer = hybrid("--prefix-match-unit", "32")
    assert not any("match-unit" in change for change in flags_of("partial_block", finer))


def test_an_interval_of_states_is_whole_blocks_where_hits_are_finer() -> None:
    """vLLM refuses an interval that is no multiple of the block; hits end at multiples of the unit."""
    finer = replace(hybrid("--prefix-match-unit", "32"), unit=32)
    (first, *_) = flags_of("not_retained", finer).values()
    assert first == ["--prefix-cache-retention-interval", "1088", "--max-num-batched-tokens", "1088"]


@pytest.mark.parametrize("cause", ["eagle_drop", "not_retained"])
def test_with_drafts_states_are_kept_where_prompts_part_or_drafts_are_left_out(cause: str) -> None:
    where = hybrid(*MTP)
    found = flags_of(cause, where)
    parted = next(change for change in found if "checkpoint" in change)
    assert found[parted] == ["--prefix-match-unit", "32", "--enable-mamba-shared-prefix-checkpoint"]
    given = flags_of(cause, hybrid(*MTP, "--prefix-match-unit", "16"))
    assert ["--enable-mamba-shared-prefix-checkpoint"] in given.values()
    off = next(o for o in candidates({cause: 500}, 1000, where) if o.change == "no --speculative-config")
    assert off.setup.engine_args == [] and "no drafts" in off.cost


def told(**more: object) -> Replayed:
    flag = Remedy(
        change="2x", core="stock", flags={"num-gpu-blocks-override": "200"}, gain_tokens=100, hit_tokens=100
    )
    order = Remedy(change="two_class", core="kvtune", core_settings={"policy": "two_class"}, gain_tokens=300)
    other = Remedy(change="--core kvtune", core="kvtune", gain_tokens=0)
    return msgspec.structs.replace(
        Replayed(query_tokens=1000, other=other, remedies=[order, flag], untried=3), **more
    )


def test_flags_are_listed_first_for_a_run_without_kvtune() -> None:
    assert [one.change for one in helping(told())] == ["2x", "two_class"]
    assert needs(helping(told())[0]) == FLAGS_ONLY
    with_core = told(other=Remedy(change="--core stock", core="stock"))
    assert [one.change for one in helping(with_core)] == ["two_class", "2x"]


def test_what_was_not_tried_is_counted() -> None:
    assert more_tries(told()) == "3 more may help and were not tried (--tries 5)"
    assert more_tries(told(untried=0)) == ""
    run = rounds_run().with_extra(replayed=told())
    assert summary(RunAnalysis(run))["replayed"]["untried"] == 3


def test_each_remedy_has_a_command_for_the_server_and_one_for_kvtune() -> None:
    run = replace_header(rounds_run(), model="org/m")
    engine = msgspec.structs.replace(run.header.engine, args=["--block-size", "32"], device="cuda")
    run = replace_header(run, engine=engine)
    flag, order = helping(told())
    assert served_with(run, flag) == "vllm serve org/m --block-size 32 --num-gpu-blocks-override 200"
    assert served_with(run, order) == "kvtune serve org/m --set core.policy=two_class -- --block-size 32"
    (first, _) = summary(RunAnalysis(run.with_extra(replayed=told())))["replayed"]["remedies"]
    assert first["needs"] == FLAGS_ONLY and first["serve"].startswith("vllm serve org/m")
    assert first["command"].startswith("kvtune profile org/m")


def test_host_memory_on_a_cpu_is_served_by_kvtune() -> None:
    """Stock vLLM refuses it there; kvtune's plugin, beside it, does not."""
    served = Invocation(model="org/m", core="stock", flags=["--kv-offloading-size", "1"])
    assert served.serve("cuda").startswith("vllm serve org/m --kv-offloading-size")
    assert shlex.split(served.serve("cpu"))[:5] == ["kvtune", "serve", "org/m", "--core", "stock"]
    change = next(o for o in candidates({"evicted": 500}, 1000, at(cpu=True)) if "offloading" in o.change)
    assert "on a CPU kvtune's plugin must be installed" in change.cost


def test_a_servers_own_pool_is_not_made_a_flag() -> None:
    run = replace_header(rounds_run(), source="server", model="served-name", core=CoreInfo(name="stock"))
    engine = msgspec.structs.replace(run.header.engine, args=["--num-gpu-blocks-override", "500"], device="")
    run = replace_header(run, engine=engine)
    retention = Remedy(change="r", core="stock", flags={"prefix-cache-retention-interval": "512"})
    assert served_with(run, retention) == f"vllm serve {MODEL} --prefix-cache-retention-interval 512"
    larger = Remedy(change="2x", core="stock", flags={"num-gpu-blocks-override": "1000"})
    assert served_with(run, larger) == f"vllm serve {MODEL} --num-gpu-blocks-override 1000"
    assert "--num-gpu-blocks-override 500" in of_run(run).line("profile")


@pytest.mark.parametrize(
    ("sequences", "chunk", "least"), [(256, 8192, 1024), (1024, 8192, 1024), (None, 0, 16)]
)
def test_no_remedy_makes_steps_that_a_server_cannot_serve_with(
    sequences: int | None, chunk: int, least: int
) -> None:
    """States of short convolutions: a block has 16 tokens, and a chunk of one block would keep every state."""
    where = at(states=True, window=0, unit=16, sequences=sequences, chunk=chunk, retention=None)
    misses = {"not_retained": 500, "evicted": 300, "partial_block": 100}
    asked = [option.setup.engine_args for option in candidates(misses, 1000, where)]
    chunks = [
        int(flags[flags.index("--max-num-batched-tokens") + 1])
        for flags in asked
        if "--max-num-batched-tokens" in flags
    ]
    assert chunks and min(chunks) == least
    of_retention = [option for option in candidates(misses, 1000, where) if "interval" in option.change]
    assert not chunk or all(f"(now {chunk:,})" in option.cost for option in of_retention)
