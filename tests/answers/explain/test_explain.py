"""Explain in the CLI's process: sums of verdicts, remedies, text and JSON, what may be stored in a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.answers.changes import Change, Situation, situation
from kvtune.answers.explain.document import document
from kvtune.answers.explain.explanation import (
    Bench,
    Explanation,
    Tried,
    View,
    add_up,
    with_misses,
)
from kvtune.answers.explain.remedies import candidates, combined, floor_of
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.causes import REPLAYED
from kvtune.data.platforms import DEVICES
from kvtune.data.run.extras import Extras
from kvtune.data.run.types import TABLES, CoreInfo, EngineInfo, Header, HostInfo, Run, WorkloadInfo
from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.data.show.screen import document_lines
from kvtune.lab.lab import Lab
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.verdicts.causes import Boundaries
from kvtune.lab.sim.verdicts.listener import Fate, PromptVerdict
from kvtune.plugin.vllm.names import speculation_reads
from kvtune.reading.analysis.cache import prefix_cache
from kvtune.reading.analysis.replayed import helping
from kvtune.requests.loads.spec import build
from tests.answers.explain.replayed import explain
from tests.simulator import SHARED

GOLDEN = Path(__file__).parents[2] / "golden" / "explain.txt"
SPEC = "rounds:prefixes=1,prefix=100,suffix=0,output=2,rounds=3"


def run_of(hits: list[int], verdicts: list[PromptVerdict | None] | None = None, **header: Any) -> Run:
    """A run of three requests of 100 tokens, one a round."""
    workload = build(SPEC)
    info = WorkloadInfo(
        name="rounds", spec=SPEC, params={}, seed=0, hash=workload.hash, requests=len(workload.requests)
    )
    requests = {
        name: np.zeros(len(hits), dtype=kind if kind != "U" else "U8")
        for name, kind in TABLES["requests"].items()
    }
    requests["id"] = np.array([f"r{n}" for n in range(len(hits))])
    requests["kind"] = np.array(["prefix"] * len(hits))
    requests["round"] = np.arange(len(hits), dtype="i4")
    requests["prompt_tokens"][:] = 100
    requests["hit_tokens"][:] = hits
    extra = Extras(verdicts=msgspec.to_builtins(verdicts or []))
    fields: dict[str, Any] = {
        "kvtune": "0",
        "source": "sim",
        "started_at": "2026-01-01T00:00:00+00:00",
        "command": [],
        "model": "tiny-gemma3",
        "workload": info,
        "core": CoreInfo(name="stock"),
        "engine": EngineInfo(args=["--block-size", "32"], num_blocks=100, block_size=32),
        "python": "3.11",
        "host": HostInfo(),
        "extra": extra,
        **header,
    }
    return Run(Header(**fields), {"requests": requests})


def verdict(number: int, at: Boundaries, **more: Any) -> PromptVerdict:
    fields: dict[str, Any] = {"lagging": "", "unkept": "", "evicted": None, **more}
    return PromptVerdict(request_id=str(number), at_s=10.0 * number, boundaries=at, **fields)


COLD = verdict(0, Boundaries(100, 0, 0, 0, 0, 0, 0))
UNKEPT = verdict(
    1, Boundaries(100, 0, 0, 0, 96, 96, 100), unkept="sliding window 512", lagging="sliding window 512"
)
EVICTED = verdict(
    2,
    Boundaries(100, 32, 64, 96, 96, 96, 100),
    lagging="full attention",
    evicted=Fate(at_s=15.0, by="1", phase="prefill"),
)


def explained() -> tuple[Run, Explanation]:
    run = run_of([0, 0, 32])
    return run, add_up(run, run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))


def test_verdicts_are_summed_by_cause_class_and_group() -> None:
    _, explanation = explained()
    assert (explanation.prefix_cache.query_tokens, explanation.prefix_cache.hit_tokens) == (300, 32)
    assert {cause: tokens for cause, tokens in explanation.prefix_cache.misses.items() if tokens} == {
        "cold": 100,
        "not_retained": 96,
        "evicted": 32,
        "lagging_group": 32,
        "partial_block": 6,
        "last_token": 2,
    }
    assert sum(explanation.prefix_cache.misses.values()) == explanation.prefix_cache.missed
    assert list(explanation.by_class) == ["prefix, visit 1", "prefix, visit 2", "prefix, visit 3"]
    of_full = explanation.by_group["full attention"]
    assert {c: n for c, n in of_full.items() if n} == {"evicted": 32, "lagging_group": 32}
    assert explanation.by_group["sliding window 512"]["not_retained"] == 96
    (eviction,) = explanation.evictions
    assert (eviction.pressure, eviction.tokens, eviction.median_age_s) == (
        "prefill of prefix, visit 2",
        32,
        5.0,
    )
    assert not explanation.disagreements


def test_a_run_that_hit_otherwise_is_reported_not_scaled() -> None:
    explanation = add_up(run_of([0, 64, 32]), run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))
    (different,) = explanation.disagreements
    assert (different.request, different.run_hit_tokens, different.replayed_hit_tokens) == ("r1", 64, 0)
    assert (explanation.run_hit_tokens, explanation.prefix_cache.hit_tokens) == (96, 32)
    assert any(
        "differs from the run in 1 of 3" in line for line in document_lines(document(explanation, "a.kvrun"))
    )


def test_causes_of_the_requests_that_agree_are_stored_and_those_of_the_others_are_unknown() -> None:
    run = run_of([0, 64, 32])
    stored = with_misses(run, add_up(run, run_of([0, 0, 32], [COLD, UNKEPT, EVICTED])))
    misses = {cause: n for cause, n in stored.header.extra.misses.items() if n}
    assert misses == {
        "cold": 100,
        "evicted": 32,
        "lagging_group": 32,
        "last_token": 1,
        "partial_block": 3,
        "replay_differs": 36,
    }
    assert prefix_cache(stored, None).misses == stored.header.extra.misses


def test_causes_of_a_replay_that_differs_in_most_are_not_stored() -> None:
    run = run_of([32, 64, 0])
    explanation = add_up(run, run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))
    with pytest.raises(
        KvtuneError, match=r"differs from the run in 3 requests, which have 100\.0 % of its misses"
    ):
        with_misses(run, explanation)


def test_the_causes_of_a_servers_events_are_kept() -> None:
    run = run_of([0, 0, 32], source="server").with_extra(misses={"cold": 268})
    explanation = add_up(run, run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))
    assert with_misses(run, explanation).header.extra.misses == {"cold": 268}


def sent_only(run: Run, sent: int) -> Run:
    run.table("requests")["sent_s"][sent:] = np.nan
    return run


def test_a_partial_run_is_explained_by_what_it_sent() -> None:
    run = sent_only(run_of([0, 0, -1]), 2)
    explanation = add_up(run, run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))
    assert (explanation.prefix_cache.query_tokens, explanation.prefix_cache.hit_tokens) == (200, 0)
    assert (explanation.requests, explanation.not_admitted) == (2, 0)
    assert (
        Setup.of_run(run).simulated.requests == [0, 1]
        and Setup.of_run(run_of([0] * 3)).simulated.requests == []
    )
    assert sum(with_misses(run, explanation).header.extra.misses.values()) == 200


def test_a_request_that_was_in_flight_at_the_end_is_left_out_and_counted() -> None:
    run = run_of([0, 0, -1])
    explanation = add_up(run, run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))
    assert (explanation.prefix_cache.query_tokens, explanation.requests, explanation.not_admitted) == (
        200,
        2,
        1,
    )
    assert any(
        "Left out: 1 request that" in line for line in document_lines(document(explanation, "a.kvrun"))
    )
    assert sum(with_misses(run, explanation).header.extra.misses.values()) == 200


@pytest.mark.full
@pytest.mark.vllm
def test_a_partial_run_and_its_remedies_are_replayed_without_what_it_did_not_send() -> None:
    from tests.simulator import simulate

    spec = "rounds:prefixes=2,prefix=1500,suffix=64,output=2,rounds=4"
    settings = Setup(
        model="tiny-gemma3", engine_args=["--num-gpu-blocks-override", "200", "--max-model-len", "4096"]
    )
    whole = simulate(build(spec), settings)
    run = sent_only(whole, 5)
    run.table("requests")["hit_tokens"][5:] = -1
    explanation = explain(run, tries=2)
    assert (explanation.requests, explanation.prefix_cache.query_tokens) == (5, 5 * 1564)
    assert explanation.prefix_cache.hit_tokens == explanation.run_hit_tokens and not explanation.disagreements
    assert explanation.remedies and all(
        0 <= r.hit_tokens <= explanation.prefix_cache.query_tokens for r in explanation.remedies
    )


@pytest.mark.vllm
def test_under_eagle_the_setting_that_keeps_the_dropped_block_is_named(tmp_path: Path) -> None:
    from kvtune.data.layout.models import config
    from tests.simulator import simulate

    draft = {**config("tiny-llama"), "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(draft))
    # From vLLM 0.33 on, a block is dropped only where hashes do not look ahead.
    drafter = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2}
    if speculation_reads("disable_lookahead_block_hashes"):
        drafter["disable_lookahead_block_hashes"] = True
    flags = ["--max-model-len", "2048", "--num-gpu-blocks-override", "60"]
    settings = Setup(model="tiny-llama", engine_args=[*flags, "--speculative-config", json.dumps(drafter)])
    run = simulate(build("rounds:prefixes=2,prefix=512,suffix=100,output=2,rounds=3"), settings)
    explanation = explain(run, tries=2, trusted=True)
    assert explanation.prefix_cache.misses["eagle_drop"] > 0
    best = helping(explanation.replayed)[0]
    assert best.change.startswith("--speculative-config with disable_") and best.cost
    assert best.gain_tokens >= explanation.prefix_cache.misses["eagle_drop"]
    text = " ".join(" ".join(document_lines(document(explanation, "a.kvrun"), 240)).split())
    assert best.change in text and best.cost in text
    assert ("vLLM's block hashes look ahead" in text) is (
        not speculation_reads("disable_lookahead_block_hashes")
    )


class Backwards(Simulators):
    """Stands for simulators whose replays end in the opposite order."""

    def __init__(self, outcome: Run) -> None:
        self.outcome = outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, setups: Iterable[Setup], watch: object = None) -> Iterator[tuple[int, Run]]:
        yield from ((number, self.outcome) for number in reversed(range(len(list(setups)))))


class BackwardsLab(Lab):
    def __init__(self, outcome: Run) -> None:
        self.outcome = outcome

    def simulators(self, model: str = "", platform: object = None) -> Any:
        return Backwards(self.outcome)


def test_remedies_of_equal_gain_come_in_one_order_whichever_replay_ends_first() -> None:
    verdicts: list[PromptVerdict | None] = [COLD, UNKEPT, UNKEPT]
    run = run_of([0, 0, 0], verdicts)
    explanation = explain(run, lab=BackwardsLab(run))
    assert explanation.other is not None and explanation.other.change == "--core kvtune"
    assert [remedy.change for remedy in explanation.remedies][:2] == [
        "--prefix-cache-retention-interval 0 -> 32",
        "--prefix-cache-retention-interval 0 -> 128",
    ]


def test_a_run_that_sent_nothing_cannot_be_explained() -> None:

    with pytest.raises(UsageError, match="before a request was sent"):
        explain(sent_only(run_of([-1] * 3), 0))


boundaries = st.builds(Boundaries, st.just(100), *[st.integers(0, 120)] * 6, st.booleans())


@given(st.lists(boundaries, min_size=3, max_size=3))
def test_sums_are_exact_in_total_and_in_each_class(cut: list[Boundaries]) -> None:
    verdicts = [verdict(number, at) for number, at in enumerate(cut)]
    explanation = add_up(run_of([0] * 3), run_of([0] * 3, verdicts))
    assert sum(explanation.prefix_cache.misses.values()) == explanation.prefix_cache.missed
    assert explanation.prefix_cache.query_tokens == 300
    for counts in explanation.by_class.values():
        assert counts["hit"] + sum(counts[cause] for cause in REPLAYED) == counts["query"]
        assert min(counts.values()) >= 0


def tried(change: str, **fields: Any) -> Tried:
    return Tried(change=change, needs="vLLM flags only", command="", serve=f"vllm serve {change}", **fields)


def everything() -> Explanation:
    """An explanation with one of everything, of a run that hit otherwise."""
    made = add_up(run_of([0, 64, 32]), run_of([0, 0, 32], [COLD, UNKEPT, EVICTED]))
    pool = tried("2x the pool", cause="evicted", cost="memory", core="stock", hit_tokens=160, gain_tokens=128)
    return msgspec.structs.replace(
        made,
        other=tried("--core kvtune", core="kvtune", hit_tokens=34, gain_tokens=2),
        remedies=(
            pool,
            tried("a policy", cause="evicted", hit_tokens=32),
            tried("larger", cause="evicted", hit_tokens=50, gain_tokens=18),
            tried("bad", cause="evicted", error="no"),
        ),
        computed_twice={"r1": {"decoding": 7}, "r2": {"decoding": 1, "prompt": 2}},
        tier_hit_tokens=16,
        untried=5,
        speed="at the server's speed",
        notes=("without --trust-remote-code, which the file asks for: add what you trust",),
    )


def test_the_words_of_an_explanation() -> None:
    """`python -m tests.answers.explain.test_explain` writes the file anew."""
    assert GOLDEN.read_text().splitlines() == document_lines(document(everything(), "a.kvrun"))


def test_what_helps_comes_with_its_command_also_on_a_page_and_in_markdown() -> None:
    made = document(everything(), "a.kvrun")
    narrow = document_lines(made, 60)
    assert "  vllm serve 2x the pool" in narrow and max(map(len, narrow)) <= 60
    for text in (markdown(made), re.sub("<[^>]*>", "", document_page(made))):
        assert "vllm serve 2x the pool" in text and "+42.7 points of hits" in text
    useless = msgspec.structs.replace(everything(), remedies=everything().remedies[1:])
    text = "\n".join(document_lines(document(useless, "a.kvrun")))
    assert "None of the settings that were replayed helps." in text and "2x the pool" not in text


def test_the_json_is_the_explanation_and_a_run_file_keeps_no_command() -> None:
    printed = json.loads(msgspec.json.encode(everything()))
    assert printed["prefix_cache"]["misses"] == everything().prefix_cache.misses
    assert (printed["differing_requests"], printed["gap_tokens"]) == (1, -64)
    assert printed["remedies"][0]["gain_tokens"] == 128 and printed["remedies"][0]["serve"]
    assert b"vllm serve" not in msgspec.json.encode(everything().replayed)


def test_a_remedys_command_has_the_flags_that_may_be_repeated() -> None:
    run = run_of([0, 0, 32])
    setup = Setup(model="org/m", core="stock", engine_args=["--block-size", "32"])
    bench = Bench(cast(Any, None), run, View(), setup, "org/m")
    pool = Change("2x the pool", setup.with_flags(num_gpu_blocks_override=200), cause="evicted")
    remedy = bench.remedy(pool, run_of([0, 0, 64]), 32)
    assert remedy.serve == "vllm serve org/m --block-size 32 --num-gpu-blocks-override 200"
    assert remedy.command.startswith("kvtune profile org/m") and remedy.gain_tokens == 32
    assert bench.remedy(pool, KvtuneError("no"), 32).error == "no"


def at(**settings: Any) -> Situation:
    chosen = Setup(model="m", engine_args=["--max-num-seqs", "8"], **settings)
    return Situation(chosen, blocks=100, unit=128, retention=0, window=512, states=False)


def changes(misses: dict[str, int], where: Situation) -> list[str]:
    return [option.change for option in candidates(misses, 1000, where)]


def test_the_largest_cause_comes_first_and_small_ones_are_left_out() -> None:
    remedies = changes({"evicted": 300, "not_retained": 500, "partial_block": 2, "cold": 198}, at())
    assert remedies[0] == "--prefix-cache-retention-interval 0 -> 512"
    assert "--core kvtune" not in remedies, "the other core is replayed in any case"
    assert "2x the pool (100 -> 200 blocks)" in remedies
    assert len(remedies) == len(set(remedies))
    assert not any("blocks of" in change for change in remedies)
    assert changes({"cold": 900}, at()) == []
    assert changes({"last_token": 100}, at()) == changes({"partial_block": 100}, at())


def test_the_kvtune_cores_remedy_is_a_larger_slack() -> None:
    values = candidates({"not_retained": 500}, 1000, at(core="kvtune", core_settings={"slack": 64}))
    assert values[0].change == "core.slack 64 -> 128"
    assert values[0].setup.core_settings == {"slack": 128}
    assert values[0].setup.engine_args == ["--max-num-seqs", "8"]


@pytest.mark.parametrize("core", ["stock", "kvtune"])
def test_the_opt_in_orders_are_among_the_remedies_of_evictions(core: str) -> None:
    options = candidates({"evicted": 500, "not_retained": 300}, 1000, at(core=core))
    assert options[0].setup.core == core, "what needs no kvtune comes first for stock"
    tried = [option.setup.core_settings.get("policy") for option in options]
    assert "two_class" in tried and "chat" in tried
    by_order = {option.setup.core_settings.get("policy"): option for option in options}
    assert by_order["two_class"].setup.core_settings["reuse_bonus_s"] == 1e9
    assert by_order["chat"].setup.core == "kvtune" and by_order["chat"].change.endswith("-> chat")
    assert by_order["two_class"].change.startswith(
        "core.policy auto" if core == "kvtune" else "--core kvtune"
    )


def test_without_sliding_windows_there_are_no_chats_to_keep_apart() -> None:
    plain = replace(at(core="kvtune"), window=0)
    assert not any("chat" in change for change in changes({"evicted": 500}, plain))


@pytest.mark.vllm
def test_where_the_core_keeps_states_the_slack_of_the_load_wins() -> None:
    """After the shared 2,000 tokens come 64: with the default of 512 a state is kept too far before them."""
    flags = ["--max-model-len", "4096", "--num-gpu-blocks-override", "2000"]
    kept: dict[str, Any] = {"core": "kvtune", "core_settings": {"keep_states": True}}
    setup = Setup(model="tiny-qwen3next", engine_args=flags, platform=DEVICES["h100"], **kept).sized()
    load = build("rounds:prefixes=2,prefix=2000,suffix=64,output=4,rounds=3")
    with SHARED.simulators(setup.model, setup.platform) as simulators:
        explanation = explain(simulators.replay(setup.with_load(load)), tries=1)
    best = explanation.remedies[0]
    assert best.core_settings["slack"] == 64 and best.cause == "not_retained"
    assert best.gain_tokens == explanation.prefix_cache.misses["not_retained"] > 0
    assert "core.slack=64" in best.serve


def test_a_retention_interval_for_states_comes_with_chunks_of_its_size() -> None:
    states = replace(at(), states=True, window=0, unit=544)
    (option,) = [o for o in candidates({"not_retained": 500}, 1000, states) if "interval 544 " in o.change]
    assert option.setup.engine_args[-4:] == [
        "--prefix-cache-retention-interval",
        "544",
        "--max-num-batched-tokens",
        "544",
    ]
    assert changes({"partial_block": 500}, states) == [
        "--prefix-match-unit 32 (hits now end at multiples of 544)"
    ]


def test_with_states_the_shortest_hit_is_named_and_small_blocks_are_tried() -> None:
    engine = EngineInfo(
        device="cpu",
        num_blocks=10,
        groups=[
            {"kind": "MambaSpec", "block_size": 1280, "layers": 8, "page_bytes": 1000},
            {"kind": "FullAttentionSpec", "block_size": 1280, "layers": 8, "page_bytes": 1000},
        ],
    )
    assert "a block is 1,280 tokens" in floor_of(engine, packed=False) and "one attention layer" in floor_of(
        engine, False
    )
    assert "together hold" in floor_of(engine, packed=True)
    assert floor_of(EngineInfo(groups=[{"kind": "FullAttentionSpec", "block_size": 16}]), False) == ""
    result = Setup(
        model="m", engine_args=["--num-gpu-blocks-override", "10"], device=Simulated(specs={"version": 1})
    )
    here, elsewhere = (situation(result, engine, ran_on=device) for device in ("cpu", "cuda"))
    (packed,) = [o for o in candidates({"partial_block": 500}, 1000, here) if "core.packed" in o.change]
    assert (
        packed.setup.engine_args == ["--kv-cache-memory-bytes", "80000"] and not packed.setup.simulated.specs
    )
    assert packed.setup.core_settings == {"packed": True}
    assert not any("core.packed" in change for change in changes({"partial_block": 500}, elsewhere))


def test_blocks_are_no_smaller_than_the_devices_kernels_take() -> None:
    engine = EngineInfo(groups=[], device="cpu", block_size=32, num_blocks=10)
    result = Setup(model="m", engine_args=["--block-size", "32"])
    assert changes({"partial_block": 500}, situation(result, engine)) == []
    as_on_gpu = msgspec.structs.replace(result, platform=DEVICES["h100"])
    for setup, device in ((result, "cuda"), (as_on_gpu, "cpu")):
        gpu = msgspec.structs.replace(engine, device=device)
        assert changes({"partial_block": 500}, situation(setup, gpu)) == [
            "blocks of 32 -> 16 tokens (same memory)"
        ]


def test_combined_remedies_double_the_pool() -> None:
    where = at()
    options = candidates({"not_retained": 500, "evicted": 400}, 1000, where)
    both = combined(options, where)
    assert len(both) == 2
    assert all("2x the pool" in option.change for option in both)
    assert all(option.setup.engine_args[-2:] == ["--num-gpu-blocks-override", "200"] for option in both)
    in_bytes = replace(options[0], setup=where.setup.with_flags(kv_cache_memory_bytes=4096))
    assert combined([in_bytes], where) == [], "twice the blocks is not twice those bytes"


def test_the_replay_has_the_runs_flags_and_active_core() -> None:
    stock = Setup.of_run(run_of([0] * 3))
    assert (stock.core, stock.engine_args, stock.core_settings) == ("stock", ["--block-size", "32"], {})
    core = CoreInfo(name="kvtune", settings={"slack": 64}, active=True)
    assert Setup.of_run(run_of([0] * 3, core=core)).core_settings == {"slack": 64}
    refused = CoreInfo(name="kvtune", settings={"slack": 64}, active=False)
    assert Setup.of_run(run_of([0] * 3, core=refused)).core == "stock"


@pytest.mark.parametrize("drawn_before", [True, False])
def test_saved_causes_are_on_the_page_that_exists(
    drawn_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtune.answers.explain import explanation
    from kvtune.data.run.file import read_run, write_run
    from kvtune.data.run.signature import run_identity, signature
    from tests.simulator import run as cli

    run, made = explained()
    file, page = tmp_path / "a.kvrun", tmp_path / "a.html"
    write_run(run, file)
    if drawn_before:
        page.write_text(f"{signature(run_identity(run.header))}: drawn before")
    monkeypatch.setattr(explanation, "bench_of", lambda *_, **__: nullcontext())
    monkeypatch.setattr(explanation, "explained", lambda *_: made)
    assert cli(["explain", str(file), "--save"]) == 0
    said = capsys.readouterr().err
    assert read_run(file).header.extra.misses == made.prefix_cache.misses
    assert page.exists() is drawn_before
    if drawn_before:
        assert f"drew {page} again" in said and "no window or state was kept" in page.read_text()
    else:
        assert f"kvtune report {file}" in said


if __name__ == "__main__":
    GOLDEN.write_text("\n".join((*document_lines(document(everything(), "a.kvrun")), "")))
