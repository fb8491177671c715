"""The whole account with a bench that answers at once: a given curve stands for the replays."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from msgspec import structs, to_builtins

from kvtune.answers.capacity import document as text
from kvtune.answers.capacity.question import hours_of
from kvtune.answers.capacity.result import Capacity
from kvtune.base.errors import UsageError
from kvtune.cli.app import run
from kvtune.cli.capacity import _cost, _share
from kvtune.cli.schema import schema_of
from kvtune.data.show.page import document_page
from kvtune.data.show.screen import print_document
from kvtune.lab.device.cost import StepCost
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.requests.loads.spec import session_load
from tests.capacities import ENGINE, found
from tests.recorded_sessions import unpacked


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"trace:path={unpacked(tmp_path_factory.mktemp('sessions'))},hours=0.2,max_think=160"


@pytest.fixture(scope="module")
def plain(recorded: str) -> Capacity:
    return found(recorded)


def test_the_whole_answer_holds_to_its_schema(plain: Capacity) -> None:
    Draft202012Validator(schema_of("capacity")).validate(to_builtins(plain))


def test_a_share_has_a_range_over_seeds_and_the_curve_the_replays_that_were_made(plain: Capacity) -> None:
    (asked,) = plain.answers
    assert asked.keep == 0.9 and asked.limit == "pool"
    assert 5 <= len(asked.sessions.by_seed) <= 16 and asked.sessions.low < asked.sessions.high
    assert (
        asked.sessions.low <= min(asked.sessions.by_seed) <= max(asked.sessions.by_seed) < asked.sessions.high
    )
    replayed = [(point.sessions, seed.seed) for point in plain.curve for seed in point.seeds]
    assert len(replayed) == len(set(replayed)), "each is made once"
    assert len(replayed) + sum(one.at is not None for one in plain.remedies) == plain.replays
    assert any(abs(seed.kept - 0.9) <= 0.02 for point in plain.curve for seed in point.seeds)


def test_more_of_the_hits_are_kept_by_fewer_sessions(recorded: str, plain: Capacity) -> None:
    more = found(recorded, keep=0.95, remedies=False)
    assert [one.keep for one in more.answers] == [0.95]
    assert max(more.answers[0].sessions.by_seed) < min(plain.answers[0].sessions.by_seed)


def test_what_ends_the_sessions_is_said(recorded: str) -> None:
    assert found(recorded, remedies=False, waiting=0.8).answers[0].limit == "device"
    few = structs.replace(ENGINE, settings={**ENGINE.settings, "max_num_seqs": 4})
    assert found(recorded, remedies=False, waiting=0.8, info=few).answers[0].limit == "max_num_seqs"
    none = found(recorded, remedies=False, curve=lambda sessions, seed: 0.5)
    assert none.answers[0].limit == "one request" and none.answers[0].sessions.high == 0
    everything = found(recorded, remedies=False, curve=lambda sessions, seed: 0.99)
    assert everything.answers[0].limit == "none" and "over" in text.headline(everything)
    assert any(one.what == "the largest number" for one in everything.cannot_say)


def test_each_line_says_how_many_replays_are_made_run_and_follow(recorded: str) -> None:
    said: list[str] = []
    told = found(recorded, remedies=False, phase=said.append)
    lines = [text for text in said if text.startswith("replays")]
    assert lines[0].startswith("replays: 2 running, about ") and "made" not in lines[0]
    assert lines[-1].startswith(f"replays: {told.replays - 1} made, 1 running")


def test_a_load_without_hours_is_played_as_long_as_its_pauses_and_sessions_ask(recorded: str) -> None:
    """Recorded agents pause for minutes; a log of a minute is not played for half an hour."""
    spec = recorded.replace(",hours=0.2", "")
    assert hours_of(session_load(spec.replace("=160", "=600")), 10**6) >= 0.5
    short = spec.replace("max_think=160", "max_think=1,speed=4")
    load = session_load(short)
    lengths = sorted(sum(load.turn_s(session)) for session in load.sessions)
    told = found(short, sessions=2, remedies=False)
    assert told.hours == pytest.approx(max(0.25 * 3, 1.5 * lengths[len(lengths) // 2]) / 3600, rel=0.1)
    assert told.hours < 0.2 and not any("pauses" in one.what for one in told.cannot_say)
    few = hours_of(load, 10**7)  # a large pool holds many sessions, which send the requests in less time
    assert 0.75 <= 3600 * few < 3600 * told.hours
    assert found(f"{short},hours=0.3", sessions=2, remedies=False).hours == 0.3


def test_without_step_times_what_depends_on_them_is_marked(recorded: str, plain: Capacity) -> None:
    assert plain.cost.source == plain.cost.by == "plausible" and not plain.cost.trusted
    assert any("the time of a step" in one.why for one in plain.cannot_say)
    assert text.point_row(plain.curve[0], plain)[-4].endswith("*")
    cost = StepCost(
        step_us=15_000.0, prefill_token_us=70.0, decode_us=60.0, kv_token_us=0.0, fitted=True, source="run"
    )
    told = found(
        recorded, cost_source="like run", setup=Setup(model="m", device=Simulated(cost=cost)), remedies=False
    )
    assert told.cost.trusted and not told.remedies
    assert not any("full" in one.what for one in told.cannot_say)
    assert not text.point_row(told.curve[0], told)[-4].endswith("*")


def test_limits_of_latency_are_the_same_search_with_another_line(recorded: str) -> None:
    """The bench meets the limits in nine of ten requests up to 5 sessions; 12 keep their hits."""
    cost = StepCost(step_us=15_000.0, prefill_token_us=70.0, decode_us=60.0, kv_token_us=0.0, fitted=True)
    on = Setup(model="m", device=Simulated(cost=cost))
    slo = {"ttft": 1500.0, "tpot": 100.0}
    tight = found(recorded, cost_source="like run", setup=on, remedies=False, slo=slo)
    assert tight.slo is not None and tight.slo.trusted and tight.slo.limits == slo
    assert set(tight.slo.sessions.by_seed) == {5} and tight.slo.sessions.low <= 5 < tight.slo.sessions.high
    assert tight.slo.sessions.high < tight.answers[0].sessions.low
    assert "within ttft=1500,tpot=100" in text.headline(tight)
    assert any(point.sessions == 5 for point in tight.curve)
    Draft202012Validator(schema_of("capacity")).validate(to_builtins(tight))


def test_remedies_are_replayed_at_the_answer_and_a_small_tier_is_refused_by_arithmetic(
    plain: Capacity,
) -> None:
    by_name = {one.name.split(" of ")[0].split(" up to")[0]: one for one in plain.remedies}
    fp8, more = by_name["fp8 KV"], by_name["pool x1.25"]
    assert fp8.at is not None and fp8.base is not None and more.at is not None
    assert fp8.at.kept.mean > more.at.kept.mean > fp8.base.kept.mean
    assert fp8.flags == ["--kv-cache-dtype", "fp8"] and "accuracy" in fp8.note
    tier = by_name["host tier"]
    assert tier.base is not None and tier.at is not None and tier.more_memory
    small = next(one for one in plain.remedies if "up to" in one.name)
    assert small.at is None and "less than the pool" in small.why_not
    numbers = plain.answers[0].sessions.by_seed
    for remedy in plain.remedies:
        assert remedy.at is None or remedy.at.sessions == fp8.base.sessions
        assert (remedy.at is None) == bool(remedy.why_not)
    assert min(numbers) - 4 <= fp8.base.sessions <= max(numbers) + 4
    assert fp8.base.sessions in {point.sessions for point in plain.curve}, "the base costs no replay"
    assert "full attention" in by_name["windows kept every 1,024 tokens"].why_not
    assert "prompts wait in 0 %" in by_name["steps"].why_not


def test_what_can_bring_nothing_is_not_replayed(recorded: str) -> None:
    """Few sessions keep everything; where prompts wait, how steps are filled is tried."""
    idle = found(recorded, sessions=1, curve=lambda sessions, seed: 1.0)
    assert all(one.at is None for one in idle.remedies)
    assert "kept already" in next(one for one in idle.remedies if one.name == "fp8 KV").why_not
    busy = found(recorded, waiting=0.4)
    assert next(one for one in busy.remedies if one.name.startswith("steps of")).at is not None


@pytest.mark.full
def test_a_remedy_that_cannot_be_replayed_says_why(recorded: str) -> None:
    told = found(recorded, fails="--kv-offloading-size")
    (tier,) = (one for one in told.remedies if one.name.startswith("host tier of"))
    assert tier.why_not == "no --kv-offloading-size here" and tier.at is None


def test_a_number_of_ones_own_is_replayed_alone(recorded: str) -> None:
    told = found(recorded, sessions=5, remedies=False)
    assert [point.sessions for point in told.curve if point.by == "replay"] == [5]
    assert not told.answers and len(told.curve[0].seeds) == 3
    assert text.headline(told).startswith("5 sessions keep 97–98 % of the hits that are possible")


@pytest.mark.full
def test_tokens_computed_twice_are_told_by_cause_and_a_watermark_is_tried_against_them(
    recorded: str, plain: Capacity, capsys: pytest.CaptureFixture[str]
) -> None:
    told = found(recorded, twice=True)
    (free,) = (one for one in told.remedies if "kept free" in one.name)
    assert free.flags == ["--watermark", "0.05"]
    assert text.said_of(free).endswith("computed twice 5.0 % -> 0.0 % of all tokens")
    print_document(text.document(told))
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "mean of the seeds: 50, 5.0 % of all (kept, then evicted 40, seen, but not a whole block 10)" in said
    )
    replayed = next(point for point in told.curve if point.by == "replay")
    assert text.CURVE[4].head == "computed twice" and text.point_row(replayed, told)[4] == "5.0 %"
    assert not any("kept free" in one.name for one in plain.remedies), "nothing was preempted"
    assert list(text.preempted(plain)) == ["No replay preempted a request: no token was computed twice."]


@pytest.mark.full
def test_sessions_that_do_not_fit_the_pool_are_left_out_and_said(recorded: str) -> None:
    told = found(recorded, info=structs.replace(ENGINE, num_blocks=3_000), remedies=False)
    assert told.load.left_out_requests > 300
    with pytest.raises(UsageError, match="no session's first request fits"):
        found(recorded, info=structs.replace(ENGINE, num_blocks=100), remedies=False)


def test_the_terminal_says_the_answer_first(plain: Capacity, capsys: pytest.CaptureFixture[str]) -> None:
    print_document(text.document(plain))
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    asked = next(one for one in plain.answers if one.keep == 0.9)
    assert first.startswith(
        f"{asked.sessions.low} to {asked.sessions.high} sessions at once (hits stay above 90 %"
    )
    assert f"{len(asked.sessions.by_seed)} seeds" in first and "with fp8 KV" in text.headline(plain)
    base = next(remedy.base for remedy in plain.remedies if remedy.base is not None)
    lead = next(part.lead for part in text.document(plain).sections if part.id == "remedies")
    assert lead.startswith(f"Each was replayed with {base.sessions} sessions, with one seed and a quarter")
    for words in (
        "turns a minute",
        "What cannot be said",
        "accuracy was not judged",
        "no change",
        " replays",
    ):
        assert words in said


def test_the_page_has_the_curve_where_it_ends_and_what_moves_it(plain: Capacity) -> None:
    page = document_page(text.document(plain))
    asked = next(one for one in plain.answers if one.keep == 0.9)
    assert f"{asked.sessions.low} to {asked.sessions.high} sessions at once" in page
    for words in (
        "where the device is full",
        "ends by the pool",
        "fp8 KV",
        "exact replays",
        "What cannot be said",
    ):
        assert words in page
    assert "https://" not in page.split("<script")[0]
    later = structs.replace(plain, elapsed_s=1.0)
    assert text.document(plain).identity == text.document(later).identity


def test_wrong_values_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (_share("90%"), _share("90"), _share("0.9"), _share("99.5 %")) == (0.9, 0.9, 0.9, 0.995)
    for wrong in ("0", "100%", "x", "-5", "nan"):
        with pytest.raises(UsageError, match="--keep"):
            _share(wrong)
    assert _cost("token=0.07,step=15").prefill_token_us == pytest.approx(70.0)
    for wrong in ("token=0.07", "toke=1,step=2", "token=x,step=1", "token=-1,step=1", "token=nan,step=1"):
        with pytest.raises(UsageError, match="--cost"):
            _cost(wrong)
    assert run(["capacity", "tiny-llama"]) == 2
    assert run(["capacity", "tiny-llama", "-w", "agents", "--slo", "ttft=100"]) == 2
    assert run(["capacity", "tiny-llama", "-w", "zipf"]) == 2
    assert "'zipf' has no sessions" in capsys.readouterr().err
    assert run(["capacity", "tiny-llama", "-w", f"trace:path={tmp_path}"]) == 2
    assert run(["capacity", "tiny-llama", "-w", "agents", "--cost", "token=1", "--like", "x.kvrun"]) == 2
