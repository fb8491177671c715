"""The whole account with a bench that answers at once: the estimate of another pool stands for the replays."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from msgspec import structs, to_builtins

from kvtune.answers.capacity import document as text
from kvtune.answers.capacity.document import given
from kvtune.answers.capacity.question import hours_of
from kvtune.answers.capacity.result import Capacity
from kvtune.base.errors import UsageError
from kvtune.cli.app import run
from kvtune.cli.capacity import _cost, _share, _times
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


def test_a_share_has_a_range_over_seeds_and_replays_at_both_ends(plain: Capacity) -> None:
    asked = next(one for one in plain.answers if one.keep == 0.9)
    assert len(asked.sessions.by_seed) == 8 and asked.sessions.low < asked.sessions.high
    assert asked.limit == "pool" and not asked.needs_times
    replayed = {point.sessions for point in plain.curve if point.by == "replay"}
    ends = {asked.sessions.low, asked.sessions.high}
    assert ends <= replayed
    assert all(len(point.seeds) == 3 for point in plain.curve if point.sessions in ends)
    assert [one.keep for one in plain.answers] == [0.95, 0.9, 0.75, 0.5]
    lows = [one.sessions.low for one in plain.answers]
    assert lows == sorted(lows)


@pytest.mark.full
def test_one_seed_is_searched_first_and_each_round_says_how_many_replays_it_makes(recorded: str) -> None:
    said: list[str] = []
    told = found(recorded, share=0.7, remedies=False, phase=said.append)
    rounds = [text for text in said if text.startswith("replaying") and " made" not in text]
    assert rounds[0] == "replaying: 1 replay, about 6 follow" and rounds[-1] == "replaying: 6 replays"
    replayed = [point for point in told.curve if point.by == "replay"]
    assert sum(int(text.split()[1]) for text in rounds) == told.replays < 3 * len(replayed)
    (searched,) = (p for p in told.curve if p.by == "replay" and len(p.seeds) == 1 and p.seeds[0].seed == 0)
    assert searched.sessions != told.answers[1].sessions.low


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


def test_below_three_quarters_only_replays_are_shown(plain: Capacity) -> None:
    for point in plain.curve:
        assert point.by == "replay" or point.kept.low >= 0.75


def test_without_step_times_the_cliff_is_a_marked_range(plain: Capacity) -> None:
    assert (
        plain.cost.source == plain.cost.by == "plausible"
        and plain.collapse is not None
        and not plain.collapse.trusted
    )
    assert plain.collapse.sessions.high > 2 * plain.collapse.sessions.low
    assert any("23x" in one.why for one in plain.cannot_say)


def test_a_cost_of_bench_forward_says_what_it_leaves_out(recorded: str) -> None:
    cost, by, note = _times(f"forward={Path(__file__).parents[2] / 'data' / 'bench_forward.json'}")
    assert cost is not None
    on = Setup(model="m", device=Simulated(cost=cost))
    told = found(
        recorded, cost_source="--cost", cost_by=by, cost_note=note, setup=on, sessions=2, remedies=False
    )
    assert told.cost.by == "forward" and not told.cost.trusted and 0 < (told.cost.error_share or 0) < 0.02
    assert any("sampling" in one.why and "name the model" in one.why for one in told.cannot_say)
    assert any("of `bench forward`" in line for _, line in given(told))
    Draft202012Validator(schema_of("capacity")).validate(to_builtins(told))


@pytest.mark.full
def test_a_trusted_cost_gives_the_cliff_of_its_device(recorded: str) -> None:
    cost = StepCost(
        step_us=15_000.0, prefill_token_us=70.0, decode_us=60.0, kv_token_us=0.0, fitted=True, source="run"
    )
    told = found(
        recorded, cost_source="like run", setup=Setup(model="m", device=Simulated(cost=cost)), remedies=False
    )
    assert told.collapse is not None and told.collapse.trusted
    assert told.collapse.sessions.high < 40
    assert not any("full" in one.what for one in told.cannot_say)
    assert not told.remedies


@pytest.mark.full
def test_limits_of_latency_are_met_by_fewer_sessions_than_fill_the_device(recorded: str) -> None:
    cost = StepCost(step_us=15_000.0, prefill_token_us=70.0, decode_us=60.0, kv_token_us=0.0, fitted=True)
    on = Setup(model="m", device=Simulated(cost=cost))
    tight, loose = (
        found(recorded, cost_source="like run", setup=on, remedies=False, slo={"ttft": most, "tpot": 100.0})
        for most in (1500.0, 20_000.0)
    )
    assert tight.slo is not None and loose.slo is not None and tight.collapse is not None
    assert tight.slo.trusted and tight.slo.limits == {"ttft": 1500.0, "tpot": 100.0}
    assert sum(tight.slo.sessions.by_seed) < sum(loose.slo.sessions.by_seed)
    assert tight.slo.sessions.low <= tight.collapse.sessions.high
    assert "within ttft=1500,tpot=100" in text.headline(tight)
    replayed = {point.sessions for point in tight.curve if point.by == "replay"}
    assert {max(1, tight.slo.sessions.low), max(1, tight.slo.sessions.high)} <= replayed
    within = {
        point.sessions: all(seed.kept >= 0.9 and (seed.met or 0.0) >= 0.9 for seed in point.seeds)
        for point in tight.curve
        if point.by == "replay"
    }
    fewest = min(n for n, holds in within.items() if not holds)
    assert tight.held == max((n for n in within if n < fewest), default=0), "limits of latency hold, too"
    Draft202012Validator(schema_of("capacity")).validate(to_builtins(tight))


def test_more_sessions_fit_where_longer_pauses_count(plain: Capacity) -> None:
    means = [sum(one.sessions.by_seed) for one in plain.cuts]
    assert [one.max_think for one in plain.cuts] == [60, 600, 1800, 7200]
    assert means == sorted(means) and means[-1] > 1.5 * means[0]
    assert all(one.turns_a_minute > 1 for one in plain.cuts)


def test_remedies_are_replayed_and_searched_and_a_small_tier_is_refused_by_arithmetic(
    plain: Capacity,
) -> None:
    by_name = {one.name.split(" of ")[0].split(" up to")[0]: one for one in plain.remedies}
    fp8, more = by_name["fp8 KV"], by_name["pool x1.25"]
    assert (
        fp8.at is not None and fp8.base is not None and fp8.sessions is not None and more.sessions is not None
    )
    assert fp8.at.kept.mean > fp8.base.kept.mean and fp8.sessions.low > more.sessions.low
    assert fp8.flags == ["--kv-cache-dtype", "fp8"] and "accuracy" in fp8.note
    tier = by_name["host tier"]
    assert tier.base is not None and tier.at is not None
    assert tier.base.seeds[0].requests < fp8.base.seeds[0].requests, "half as long, and so is its base"
    small = next(one for one in plain.remedies if "up to" in one.name)
    assert small.at is None and "less than the" in small.why_not
    for remedy in plain.remedies:
        assert remedy.at is None or remedy.at.sessions == fp8.base.sessions
        assert (remedy.at is None) == bool(remedy.why_not)
    assert "full attention" in by_name["windows kept every 1,024 tokens"].why_not


@pytest.mark.full
def test_a_remedy_that_cannot_be_replayed_says_why(recorded: str) -> None:
    told = found(recorded, fails="--kv-offloading-size")
    (tier,) = (one for one in told.remedies if one.name.startswith("host tier of"))
    assert tier.why_not == "no --kv-offloading-size here" and tier.at is None


@pytest.mark.full
def test_an_estimate_that_is_off_is_fitted_to_the_replays(recorded: str, plain: Capacity) -> None:
    told = found(recorded, share=0.7, remedies=False)
    assert told.fitted == pytest.approx(0.7, abs=0.08)
    asked, before = (next(a for a in one.answers if a.keep == 0.9) for one in (told, plain))
    assert asked.sessions.high < before.sessions.high
    assert not any("range" in one.what for one in told.cannot_say)


@pytest.mark.full
def test_an_estimate_is_not_fitted_to_a_seed_that_has_fallen_off_the_cliff(recorded: str) -> None:
    """Two seeds keep what the estimate says; the first keeps little, and the mean is over three quarters."""
    assert found(recorded, remedies=False, less=0.3).fitted == 1.0


def test_a_number_of_ones_own_is_replayed_alone(recorded: str) -> None:
    told = found(recorded, sessions=5, remedies=False)
    assert [point.sessions for point in told.curve if point.by == "replay"] == [5]
    assert not told.cuts


@pytest.mark.full
def test_what_holds_is_the_most_with_which_every_replayed_seed_keeps_the_hits(
    recorded: str, plain: Capacity
) -> None:
    replayed = {point.sessions: point for point in plain.curve if point.by == "replay"}
    kept = [
        n
        for n, point in sorted(replayed.items())
        if min(seed.kept for seed in point.seeds) >= 0.9 and len(point.seeds) == 3
    ]
    assert plain.held == max(kept, default=0) and plain.recipe == ""
    strict = found(recorded, remedies=False, less=0.2)
    asked = found(recorded, remedies=False, less=0.2, holds=True)
    least, fewest = (
        min(point.sessions for point in one.curve if point.by == "replay") for one in (strict, asked)
    )
    assert strict.held == asked.held == 0, "one of the seeds never keeps them"
    assert fewest == 1 < least, "for a recipe, fewer and fewer are replayed"
    alone = found(recorded, sessions=60, remedies=False, holds=True)
    assert alone.held == 0 and [p.sessions for p in alone.curve if p.by == "replay"] == [60]


@pytest.mark.full
def test_tokens_computed_twice_are_told_by_cause_and_a_watermark_is_tried_against_them(
    recorded: str, plain: Capacity, capsys: pytest.CaptureFixture[str]
) -> None:
    told = found(recorded, twice=True)
    (free,) = (one for one in told.remedies if "kept free" in one.name)
    assert free.flags == ["--watermark", "0.05"]
    assert "-> 0.0 %" in text.said_of(free)
    print_document(text.document(told))
    said = " ".join(capsys.readouterr().out.split())
    assert "seeds: 50, 5.0" in said
    replayed = next(point for point in told.curve if point.by == "replay")
    assert text.CURVE[4].head == "computed twice" and text.point_row(replayed, told)[4] == "5.0 %"
    assert not any("kept free" in one.name for one in plain.remedies), "nothing was preempted"
    assert list(text.preempted(plain)) == ["No replay preempted a request: no token was computed twice."]
    estimates = [seed for point in told.curve if point.by == "estimate" for seed in point.seeds]
    assert estimates and all(seed.computed_twice is None and seed.twice == 0 for seed in estimates)


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
    assert first.startswith(f"{asked.sessions.low} to {asked.sessions.high} sessions at")
    assert "saturates at" in first and "*" in first and "with fp8 KV" in text.headline(plain)
    cuts = next(part for part in text.document(plain).sections if part.id == "cuts").tables[0]
    assert all(row[2].text.endswith("*") for row in cuts.rows)
    for words in (
        "Where pauses are cut",
        "turns a minute",
        "What cannot be said",
        "accuracy was not judged",
        "no change",
        "3 replays",
    ):
        assert words in said


def test_the_page_has_the_curve_both_regions_and_what_moves_them(plain: Capacity) -> None:
    page = document_page(text.document(plain))
    asked = next(one for one in plain.answers if one.keep == 0.9)
    assert f"{asked.sessions.low} to {asked.sessions.high} sessions at once" in page
    for words in ("the device is full", "ends by the pool", "fp8 KV", "exact replays", "What cannot be said"):
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
    assert "'zipf' has no" in capsys.readouterr().err
    assert run(["capacity", "tiny-llama", "-w", f"trace:path={tmp_path}"]) == 2
    assert run(["capacity", "tiny-llama", "-w", "agents", "--cost", "token=1", "--like", "x.kvrun"]) == 2
