"""What bounds a server, by figures that a scheduler would show; and what a watch without events says of it."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest

from kvtune.data.layout.model_config import shape_at_hand
from kvtune.data.layout.models import builtin
from kvtune.servers.watch.metrics import Between, Scrape, read
from kvtune.servers.watch.possible import possible
from kvtune.servers.watch.regime import THRESHOLDS, Finding, Limits, Regime, finding
from tests.servers.watch.played import Answers, http
from tests.servers.watch.regimes import recorded
from tests.simulator import run

KNOWN = Limits(seats=8, step_tokens=512, longest=4096, groups=1)


def text(
    *,
    running: int = 0,
    waiting: int = 0,
    deferred: int = 0,
    use: float = 0.1,
    steps: int = 0,
    step_tokens: int = 8,
    answered: int = 0,
    preempted: int = 0,
    ended_s: float = 0.0,
    engine_share: float = 1.0,
    queries: int = 0,
    hits: int = 0,
    engines: int = 1,
    **labels: str,
) -> str:
    """A /metrics in vLLM's format. `ended_s`: the time of the requests that ended, of which the engine took a share."""
    cache = {"block_size": "32", "enable_prefix_caching": "True", "num_gpu_blocks": "1000"}
    cache |= {"kv_cache_max_concurrency": "7.8", **labels}
    prompts = answered * 100
    lines = ["process_start_time_seconds 1"]
    for engine in range(engines):
        of = f'engine="{engine}",model_name="tiny"'
        said = ",".join(f'{name}="{value}"' for name, value in cache.items())
        lines.append(f"vllm:cache_config_info{{{of},{said}}} 1.0")
        values = {
            "num_requests_running": running,
            "num_requests_waiting": waiting + deferred,
            f'num_requests_waiting_by_reason{{{of},reason="capacity"}}': waiting,
            f'num_requests_waiting_by_reason{{{of},reason="deferred"}}': deferred,
            "kv_cache_usage_perc": use,
            "iteration_tokens_total_count": steps,
            "iteration_tokens_total_sum": steps * step_tokens,
            "generation_tokens_total": steps * min(running, step_tokens),
            "prompt_tokens_total": prompts,
            "prefix_cache_queries_total": queries,
            "prefix_cache_hits_total": hits,
            "num_preemptions_total": preempted,
            "time_to_first_token_seconds_count": answered,
            "e2e_request_latency_seconds_count": answered,
            "e2e_request_latency_seconds_sum": ended_s,
            "request_queue_time_seconds_sum": ended_s * engine_share / 4,
            "request_inference_time_seconds_sum": ended_s * engine_share * 3 / 4,
            f'request_prompt_tokens_bucket{{{of},le="100.0"}}': answered // 2,
            f'request_prompt_tokens_bucket{{{of},le="500.0"}}': answered,
            f'request_prompt_tokens_bucket{{{of},le="+Inf"}}': answered,
            "request_prompt_tokens_count": answered,
            "request_prompt_tokens_sum": prompts,
        }
        for name, value in values.items():
            lines.append(f"vllm:{name}{'' if '{' in name else '{' + of + '}'} {value}")
    return "\n".join([*lines, ""])


def judged(*looks: dict[str, object], limits: Limits = KNOWN) -> Finding:
    scrapes = [read(text(**look), float(second)) for second, look in enumerate(looks)]  # type: ignore[arg-type]
    found = finding(scrapes, limits)
    assert found is not None
    return found


def in_turn(count: int = 5, **each: object) -> list[dict[str, object]]:
    """Looks of a server whose counters grow: 20 steps and 10 answers a second, 30 s of requests."""
    grown = ({"steps": 20 * n, "answered": 10 * n, "ended_s": 30.0 * n} for n in range(count))
    return [{**more, **each} for more in grown]


def test_one_look_says_nothing_and_silence_is_idle() -> None:
    assert finding([read(text(), 1.0)], KNOWN) is None
    assert judged({}, {}).regime == "idle"
    short = judged({}, {"steps": 5, "answered": 1, "ended_s": 0.05})
    assert short.regime == "idle" and "50 ms" in short.why
    assert judged({}, {"steps": 50, "answered": 1, "ended_s": 0.8}).regime == "cannot tell"


def test_all_seats_taken_and_others_waiting_are_seat_bound() -> None:
    found = judged(*in_turn(running=8, waiting=3))
    assert found.regime == "seat-bound" and "8 run" in found.why and found.refuted_by
    assert {fact.name: fact.value for fact in found.facts}["running"] == "8 of max_num_seqs 8"


def test_full_steps_are_compute_bound_only_if_they_are_long_and_the_pool_has_room() -> None:
    full = in_turn(running=4, waiting=3, step_tokens=500)
    assert judged(*full).regime == "compute-bound"
    assert "half" in next(
        t.shown for t in THRESHOLDS if t.decides.startswith("compute-bound: a step computes")
    )
    sparse = judged(*in_turn(running=4, waiting=3, step_tokens=100))
    assert sparse.regime == "cannot tell" and "not full" in sparse.why
    tight = judged(*(look | {"use": 0.95} for look in full), limits=replace(KNOWN, groups=0))
    assert tight.regime == "cannot tell" and "depends on its length" in tight.missing[0]
    quick = judged(*(look | {"steps": 1000 * n, "answered": 500 * n} for n, look in enumerate(full)))
    assert quick.regime == "cannot tell" and "device and host" in quick.missing[0]


def test_a_preemption_or_too_few_free_blocks_are_pool_bound() -> None:
    lost = judged(*({**look, "preempted": n} for n, look in enumerate(in_turn(running=8, waiting=3))))
    assert lost.regime == "pool-bound" and "preempted 4 times" in lost.why
    full = judged(*in_turn(running=4, waiting=3, use=0.999, step_tokens=150))
    assert full.regime == "pool-bound" and "fewer blocks are free" in full.why


def test_a_pool_that_admits_two_at_a_time_is_pool_bound_and_says_on_which_condition() -> None:
    """140 blocks, a request computes 45 % of them, and the server tells no max_num_seqs."""
    pool: dict[str, object] = {"running": 2, "waiting": 22, "step_tokens": 1000, "num_gpu_blocks": "140"}
    looks = in_turn(use=0.93, **pool)
    found = judged(*looks, limits=Limits(longest=4096))
    assert found.regime == "pool-bound" and "unless --max-num-seqs is 2" in found.why
    assert found.missing and "not in /metrics" in found.missing[0]
    roomy = judged(*in_turn(use=0.5, **pool), limits=Limits(longest=4096))
    assert roomy.regime == "cannot tell"


def test_time_outside_the_engine_is_host_bound() -> None:
    found = judged(*in_turn(running=4, engine_share=0.3))
    assert found.regime == "host-bound" and "70.0 %" in found.why and "--api-server-count" in found.refuted_by
    assert judged(*in_turn(running=4, engine_share=0.8)).regime == "cannot tell"


def test_what_is_not_known_is_named_and_nothing_is_guessed() -> None:
    unknown = Limits(longest=4096)
    busy = in_turn(3, running=8, waiting=3)
    found = judged(*busy, limits=unknown)
    assert found.regime == "cannot tell" and "--max-num-seqs" in found.missing[0]
    inferred = judged(*in_turn(running=8, waiting=3), limits=unknown)
    assert inferred.regime == "seat-bound" and inferred.missing[0].startswith("inferred")
    varied = judged(*in_turn(4, running=8, waiting=3), {**in_turn()[-1], "running": 5}, limits=unknown)
    assert varied.regime == "cannot tell"
    calm = judged(*in_turn(running=3))
    assert calm.regime == "cannot tell" and "no request waits" in calm.why
    later = judged(*in_turn(running=3, deferred=2))
    assert later.regime == "cannot tell" and "not for capacity" in later.why


def test_of_several_engines_only_what_holds_for_all_is_said() -> None:
    assert judged(*in_turn(running=8, waiting=3, engines=2)).regime == "seat-bound"
    uneven = judged(*in_turn(running=6, waiting=3, engines=2, step_tokens=500))
    assert uneven.regime == "cannot tell", "one engine may have 8 and the other 4"


@pytest.mark.parametrize(
    "gone", ["num_requests_running", "num_requests_waiting", "iteration_tokens_total_count"]
)
def test_a_series_that_is_missing_is_named(gone: str) -> None:
    lines = [line for line in text(running=8, waiting=3).split("\n") if not line.startswith(f"vllm:{gone}")]
    scrapes = [read("\n".join(lines), at) for at in (1.0, 2.0)]
    found = finding(scrapes, KNOWN)
    assert found is not None and found.regime == "cannot tell" and gone in found.missing[0]


def test_whatever_is_missing_the_finding_is_whole() -> None:
    """Each of vLLM's series away: no error, and a reason or what is missing."""
    for many, limits in itertools.product((1, 3), (KNOWN, Limits())):
        looks = in_turn(running=8, waiting=3, use=0.5, engines=many)
        whole = [text(**look) for look in looks]  # type: ignore[arg-type]
        names = {line.split("{")[0] for line in whole[0].split("\n") if line.startswith("vllm:")}
        for name in sorted(names):
            kept = [
                "\n".join(line for line in each.split("\n") if not line.startswith(name)) for each in whole
            ]
            found = finding([read(each, float(at)) for at, each in enumerate(kept)], limits)
            assert found is not None and found.why
            assert found.refuted_by or found.missing


def look(base: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["watch", base, "--once", "--seconds", "0.1", *words]) == 0
    return capsys.readouterr().out


def serving(**each: object) -> Answers:
    """A server whose counters grow with each look."""
    grown = iter(in_turn(1000, **each))
    answers = Answers("")
    answers.paths["/metrics"] = (200, lambda _: text(**next(grown)))
    card = {"id": "tiny", "root": str(builtin("tiny-gemma3")), "max_model_len": 4096}
    answers.paths["/v1/models"] = (200, json.dumps({"data": [card]}))
    return answers


def test_a_watch_without_events_says_what_binds_what_can_hit_and_what_tells_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = serving(running=8, waiting=3, prefix_cache_retention_interval="0")
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_num_scheduled_tokens": None}
    info = {"vllm_config": {"scheduler_config": limits, "model_config": {}}, "vllm_env": {}, "system_env": {}}
    answers.paths["/server_info?config_format=json"] = (200, json.dumps(info))
    with http(answers) as base:
        out = look(base, capsys)
        shown = json.loads(look(base, capsys, "--json"))
    words = " ".join(out.split())
    assert "seat-bound: requests wait while 8 run, which is max_num_seqs" in words
    assert "refuted by: a look with fewer running requests" in words
    assert "hits end at multiples of 32 tokens: a prompt of 32 or fewer cannot hit here" in words
    assert "keeps the windows of 512 tokens where a prompt ends only" in words
    assert f"kvtune tap {base}" in words and "--enable-prompt-tokens-details" in words
    assert f"vllm serve {builtin('tiny-gemma3')} --kv-events-config" in words
    assert shown["regime"]["regime"] == "seat-bound" and shown["possible"]["exact"]
    assert [step["command"].split()[:2] for step in shown["next"]] == [
        ["kvtune", "tap"],
        ["vllm", "serve"],
        ["kvtune", "watch"],
    ]


def test_limits_that_are_given_stand_before_those_that_the_server_tells(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = serving(running=8, waiting=3)
    with http(answers) as base:
        given = look(base, capsys, "--max-num-seqs", "8", "--max-num-batched-tokens", "512")
        paths = {path for _, path, _ in answers.seen}
        unknown = look(base, capsys)
    assert "seat-bound" in given and "/server_info?config_format=json" not in paths
    assert "seat-bound" not in unknown and "max_num_seqs" in unknown


def test_a_server_that_takes_long_to_describe_itself_holds_no_screen_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtune.servers.watch.facts.ASK_S", 0.05)
    answers = serving(running=8, waiting=3)
    answers.paths["/server_info?config_format=json"] = (200, lambda _: time.sleep(0.5) or "{}")  # type: ignore[func-returns-value]
    with http(answers) as base:
        assert "cannot tell" in look(base, capsys)
    assert sum("server_info" in path for _, path, _ in answers.seen) == 1


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"enable_prefix_caching": "False"}, "prefix caching is off"),
        ({"prefix_match_unit": "16"}, "a prompt of 16 or fewer cannot hit"),
        (
            {"mamba_cache_mode": "align", "prefix_cache_retention_interval": "0"},
            "recurrent states where a prompt",
        ),
        ({"block_size": "288"}, "50.0 % of the prompts since the server's start, or more, were as short"),
    ],
)
def test_what_can_hit_follows_from_the_labels(
    labels: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = serving(running=1, **labels)
    answers.paths["/v1/models"] = (200, '{"data": [{"id": "unknown/model", "root": "/no/folder"}]}')
    with http(answers) as base:
        out = " ".join(look(base, capsys).split())
    assert says in out


def test_a_folder_is_read_only_if_the_server_is_on_this_machine() -> None:
    folder = str(builtin("tiny-gemma3"))
    assert shape_at_hand(folder, True) is not None and shape_at_hand(folder, False) is None
    assert shape_at_hand("../../etc", True) is None and shape_at_hand("", True) is None
    assert shape_at_hand("tiny-qwen3next", False) is not None


def test_a_preemption_says_what_it_cost_at_most() -> None:
    first, last = (read(text(preempted=n), float(n)) for n in (0, 3))
    lines = possible(Between(first, last), None, 4096).lines
    assert "3 preemptions in the last 3 s: at most 12,288 tokens were computed again for it" in lines


STATES = {"mamba_cache_mode": "align", "prefix_cache_retention_interval": "0", "block_size": "544"}


@pytest.mark.parametrize(
    ("labels", "drafts", "says", "not_said"),
    [
        (STATES, False, "same multiple of a block, 544 tokens", "checkpoint"),
        (STATES, False, "--prefix-match-unit hits closer", "drafts"),
        (STATES, True, "--enable-mamba-shared-prefix-checkpoint with --prefix-match-unit", ""),
        ({**STATES, "prefix_match_unit": "32"}, False, "keeps more states", "--prefix-match-unit"),
        ({**STATES, "prefix_cache_retention_interval": "1088"}, False, "", "keeps more states"),
        ({"block_size": "16"}, False, "", "keeps more"),
    ],
)
def test_where_states_are_kept_at_ends_only_the_flags_that_keep_more_are_named(
    labels: dict[str, str], drafts: bool, says: str, not_said: str
) -> None:
    more = 'vllm:spec_decode_num_drafts_total{engine="0"} 7.0\n' if drafts else ""
    first, last = (read(text(**labels) + more, float(n)) for n in (0, 3))
    found = possible(Between(first, last), None, 4096)
    assert says in found.keeps_more and (not not_said or not_said not in found.keeps_more)
    assert bool(found.keeps_more) == (found.keeps_more in found.lines)


def test_scrapes_are_judged_as_they_come() -> None:
    looks: list[Scrape] = [
        read(text(**each), float(n)) for n, each in enumerate(in_turn(running=8, waiting=1))
    ]  # type: ignore[arg-type]
    whole = finding(looks, KNOWN)
    assert whole is not None and (whole.looks, whole.seconds) == (5, 4.0)


@pytest.mark.parametrize("number", range(30))
def test_what_is_said_of_a_real_server_is_true_or_it_cannot_tell(number: int) -> None:
    """Of 30 settings on real engines, with what a scheduler counted at the time (test_regime_truth.py)."""
    tried = recorded("regimes")[number]
    found = finding(tried.scrapes, tried.limits)
    assert found is not None and tried.truth.holds(found.regime)
    assert found.regime == tried.found, "the same as at the time"


EDGES = (
    ("host-bound", "of the requests' time was the API server's"),
    ("pool-bound", "and 2 of the mean length fill the pool"),
    ("pool-bound", "fill the pool: pool-bound, unless --max-num-seqs is 2"),
    ("cannot tell", "no step ended in 4 s"),
)


@pytest.mark.parametrize("number", range(len(EDGES)))
def test_a_regime_is_told_at_its_edge(number: int) -> None:
    """Of real servers: nothing runs at a look; looks show the state before a long step; no step ends."""
    tried, (regime, why) = recorded("edges")[number], EDGES[number]
    found = finding(tried.scrapes, tried.limits)
    assert found is not None and tried.truth.holds(found.regime)
    assert found.regime == tried.found == regime and why in found.why


def test_each_regime_is_named_in_one_of_the_recorded_settings() -> None:
    assert {tried.found for tried in recorded("regimes")} == {*get_args(Regime)}


def test_a_recorded_server_is_judged_over_http_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    tried = next(each for each in recorded("regimes") if each.found == "seat-bound" and each.limits.seats)
    texts = iter([text for _, text in tried.texts] * 20)
    answers = Answers("")
    answers.paths["/metrics"] = (200, lambda _: next(texts))
    with http(answers) as base:
        out = look(base, capsys, "--max-num-seqs", str(tried.limits.seats), "--max-num-batched-tokens", "512")
    assert "seat-bound: requests wait while" in out


def test_with_events_the_cause_names_the_flags() -> None:
    from kvtune.data.show.markdown import markdown
    from kvtune.servers.watch.document import document
    from kvtune.servers.watch.metrics import Between
    from kvtune.servers.watch.possible import possible
    from kvtune.servers.watch.snapshot import Events, Period, Snapshot, Times

    first, last = (read(text(**STATES), float(n)) for n in (0, 3))
    needed = [f.name for f in msgspec.structs.fields(Snapshot) if f.required]
    unknown: dict[str, Any] = dict.fromkeys(needed)

    def shown(lost: int) -> str:
        misses = {"not_retained": lost, "cold": 100 - lost}
        whole = Period(query_tokens=100, hit_tokens=0, misses=misses, seconds=3.0)
        given: dict[str, Any] = {
            "url": "http://a",
            "at": 1.0,
            "model": "m",
            "vllm": "0.32.0",
            "engines": 1,
            "restarts": 0,
            "query_tokens": 100,
            "hit_tokens": 0,
            "periods": {"total": whole},
            "events": Events("on", True),
            "first_token": Times(),
            "between_tokens": Times(),
            "waiting_by_reason": {},
            "notes": [],
            "prefixes": [],
            "texts": {},
            "divergences": [],
        }
        shot = Snapshot(**{**unknown, **given}, possible=possible(Between(first, last), None, 4096))
        return markdown(document(shot)).split("Where prompt tokens went")[1].split("##")[0]

    assert "no window or state was kept: --prefix-cache-retention-interval" in shown(60)
    assert "retention-interval" not in shown(0)
