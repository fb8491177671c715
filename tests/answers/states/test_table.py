"""The table of states: exact replays of a hybrid's choices, the winner confirmed, or none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvtune.answers.states.document import document
from kvtune.answers.states.table import States, states_of, visits_of
from kvtune.base.errors import KvtuneError
from kvtune.data.platforms import DEVICES
from kvtune.data.show.markdown import markdown
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.prefix_tree import joined
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Span
from tests.simulator import SHARED, run

H100 = DEVICES["h100"]
MTP = '{"method":"mtp","num_speculative_tokens":1}'
FLAGS = ["--kv-cache-memory-bytes", "400000000", "--max-model-len", "16384", "--max-num-seqs", "64"]
ROUNDS = "rounds:prefixes=3,prefix=3000,suffix=700,output=4,rounds=3"


def table(spec: str, *flags: str, model: str = "tiny-qwen3next") -> States | None:
    setup = Setup(model=model, engine_args=[*FLAGS, *flags], platform=H100).sized()
    with SHARED.simulators(model, H100) as simulators:
        return states_of(setup, build(spec, seed=1), simulators.outcomes)


def test_a_beginning_is_the_same_however_its_spans_are_cut() -> None:
    whole, cut = (Span(1, 0, 300), Span(2, 0, 50)), (Span(1, 0, 100), Span(1, 100, 200), Span(3, 0, 9))
    assert [*joined(whole, 250)] == [*joined(cut, 250)] == [Span(1, 0, 250)]
    assert [*joined(whole, 320)] != [*joined(cut, 320)]


def test_visits_count_the_prompts_with_the_same_beginning() -> None:
    load = build("rounds:prefixes=2,prefix=100,suffix=10,output=1,rounds=3")
    assert visits_of(load, 100) == [1, 1, 2, 2, 3, 3]
    assert visits_of(load, 105) == [1] * 6, "the suffixes differ"
    assert visits_of(load, 200) == [0] * 6, "shorter prompts have no beginning of that length"


@pytest.mark.vllm
def test_an_interval_wins_where_prefixes_are_shared_and_is_confirmed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "sweep",
        "tiny-qwen3next",
        "--states",
        "-w",
        ROUNDS,
        "--like-device",
        "h100",
        "--seed",
        "1",
        "--json",
    ]
    assert run([*words, "--", *FLAGS, "--speculative-config", MTP], lab=SHARED) == 0
    states = msgspec.json.decode(capsys.readouterr().out, type=States)
    assert states.drafts and states.serve.startswith("kvtune serve")
    now, best = states.rows[0], states.best
    assert now.visits[1] == 0 < now.visits[2], (
        "stock keeps a state where prompts were seen to part, from then on"
    )
    assert best.visits[1] > 0 and "--prefix-cache-retention-interval" in best.flags
    assert len(states.confirmed) == 2 and "--prefix-cache-retention-interval" in states.serve
    assert all(
        row.state_bytes and row.fit and row.tail_tokens is not None for row in states.rows if not row.why_not
    )
    off = next(row for row in states.rows if row.flags == ["no --speculative-config"])
    assert off.hit_tokens is not None and off is not best
    inert = {row.flags[0]: row.why_not for row in states.rows if row.why_not}
    assert {"--mamba-cache-mode", "--mamba-block-size"} <= inert.keys()
    shown = " ".join(markdown(document(states)).split())
    assert "confirmed with 2 other seeds" in shown and "the attention block" in shown


@pytest.mark.vllm
@pytest.mark.full
def test_where_nothing_brings_a_point_there_is_no_winner() -> None:
    states = table("prefill:requests=3,prompt=2000,output=2")
    assert states is not None and states.winner is None and "no winner" in states.why
    assert "--prefix-match-unit" not in states.serve


@pytest.mark.vllm
@pytest.mark.full
def test_prompts_sent_again_win_by_finer_ends() -> None:
    states = table("rounds:prefixes=3,prefix=2150,suffix=0,output=4,rounds=3")
    assert states is not None and "--prefix-match-unit" in states.best.flags
    assert (states.best.tail_tokens or 0) < (states.rows[0].tail_tokens or 0)


@pytest.mark.vllm
def test_a_model_without_states_has_no_table() -> None:
    assert table(ROUNDS, model="tiny-llama") is None
    with pytest.raises(KvtuneError):
        table(ROUNDS, "--mamba-cache-mode", "sideways")


@pytest.mark.vllm
def test_sweep_refuses_a_model_without_states(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["sweep", "tiny-llama", "--states", "-w", ROUNDS, "--like-device", "h100", "--", *FLAGS]
    assert run(plain, lab=SHARED) == 2
    assert "keeps no recurrent states" in capsys.readouterr().err
    assert run(["sweep", "tiny-llama", "--states", "--on", "engine"], lab=SHARED) == 2


@pytest.mark.vllm
@pytest.mark.full
def test_the_cores_states_bring_the_third_visits_hits_to_the_second() -> None:
    setup = Setup(model="tiny-qwen3next", engine_args=FLAGS, platform=H100, core="kvtune").sized()
    with SHARED.simulators("tiny-qwen3next", H100) as simulators:
        states = states_of(setup, build(ROUNDS, seed=1), simulators.outcomes)
    assert states is not None
    kept = [row for row in states.rows if "core.keep_states=true" in row.flags]
    now = states.rows[0]
    assert kept and all(row.visits[2] >= now.visits[2] and not row.why_not for row in kept)
    assert now.visits[1] == 0 and max(row.visits[1] for row in kept) > 0
    assert states.winner is not None and len(states.confirmed) == 2


@pytest.mark.vllm
@pytest.mark.full
def test_the_loads_own_slack_wins_without_shorter_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens come after the shared 2,000. Blocks of 256 tokens: as on a CPU that keeps bfloat16 states."""
    monkeypatch.setenv("KVTUNE_AVX512_BF16", "0")
    core: dict[str, Any] = {"core": "kvtune", "core_settings": {"keep_states": True}}
    setup = Setup(model="tiny-qwen3next", **core).sized()
    with SHARED.simulators("tiny-qwen3next") as simulators:
        load = build("rounds:prefixes=4,prefix=2000,suffix=64,output=16,rounds=3")
        states = states_of(setup, load, simulators.outcomes)
    assert states is not None and states.block_tokens == 256
    assert [row.visits[1] // 4 for row in (states.rows[0], states.best)] == [1_536, 1_792]
    assert states.best.flags == ["--set", "core.slack=64"] and len(states.confirmed) == 2
