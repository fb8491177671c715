from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base.errors import EXIT_USAGE, UsageError
from kvtune.requests.loads.identity import work_hash
from kvtune.requests.loads.spec import DEFAULT_SPEC, WORKLOADS, build
from kvtune.requests.loads.tokens import prompt_ids
from kvtune.requests.types import STREAM_ANSWER, Draft, Request, Span

BUILDABLE = [name for name in WORKLOADS if name not in ("trace", "requests")]


@pytest.mark.parametrize("name", BUILDABLE)
def test_every_workload_builds_from_its_defaults_and_is_reproducible(name: str) -> None:
    one, two = build(name), build(name)
    assert one.requests == two.requests
    assert one.hash == two.hash
    assert one.longest <= (200_000 if name == "agents" else 40_000)  # an agent's context is long
    assert set(one.params) == {key.name for key in WORKLOADS[name].keys} - {"seed"}
    assert len({r.id for r in one.requests}) == len(one.requests)


@pytest.mark.parametrize("name", BUILDABLE)
def test_the_signature_in_the_help_is_the_workload(name: str) -> None:
    assert build(WORKLOADS[name].signature).hash == build(name).hash


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_and_key_has_a_line_of_help(name: str) -> None:
    assert WORKLOADS[name].name == name
    for text in (WORKLOADS[name].help, *(key.help for key in WORKLOADS[name].keys)):
        assert text
        assert len(text) < 100
        assert "\n" not in text


def test_the_registry_imports_nothing_heavy() -> None:
    code = "import sys, kvtune.requests.loads.spec; sys.exit(bool({'numpy', 'msgspec'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_seed_presets_have_their_published_shapes() -> None:
    for name, prompt, output in (
        ("seed-decode", 48, 2000),
        ("seed-decode-short", 48, 500),
        ("seed-prefill", 2000, 48),
    ):
        work = build(f"{name}:requests=3")
        assert [(r.prompt_tokens, r.output_tokens) for r in work.requests] == [(prompt, output)] * 3
    assert build("seed-prefixes").requests[0].prompt[0] == Span(0, 0, 28_000)


def test_rounds_resend_the_same_prefixes() -> None:
    work = build("rounds:prefixes=15,prefix=4000,suffix=64,output=16,rounds=3")
    assert len(work.requests) == 45
    assert work.barrier
    assert work.concurrency == 1
    assert {r.prompt_tokens for r in work.requests} == {4064}
    assert [r.round for r in work.requests] == [0] * 15 + [1] * 15 + [2] * 15
    assert [r.prompt[0] for r in work.requests[15:30]] == [r.prompt[0] for r in work.requests[:15]]
    suffixes = {r.prompt[1].stream for r in work.requests}
    assert len(suffixes) == 45
    assert not suffixes & {r.prompt[0].stream for r in work.requests}


def test_default_spec_builds_small() -> None:
    assert build(DEFAULT_SPEC).prompt_tokens < 100_000


def test_numbers_may_have_suffixes_and_spaces_around() -> None:
    work = build("rounds: prefixes=2, prefix=28k , suffix=1.5k")
    assert work.params["prefix"] == 28_000
    assert work.params["suffix"] == 1500


def test_zipf_draws_the_first_prefixes_most_often() -> None:
    picks = [r.prompt[0].stream for r in build("zipf:prefixes=20,requests=2000,s=1").requests]
    weight = sum(1 / k for k in range(1, 21))
    assert 0.8 < picks.count(0) * weight / 2000 < 1.2
    assert 0.5 < picks.count(19) * weight * 20 / 2000 < 1.6
    even = [r.prompt[0].stream for r in build("zipf:prefixes=4,requests=4000,s=0").requests]
    assert all(800 < even.count(p) < 1200 for p in range(4))


def test_mix_keeps_its_share() -> None:
    work = build("mix:requests=1000,share=0.25,prefixes=3,cold=77")
    cold = [r for r in work.requests if r.kind == "cold"]
    assert 200 < len(cold) < 300
    assert {r.prompt_tokens for r in cold} == {77}
    assert len({r.prompt[0].stream for r in cold}) == len(cold)
    assert {r.prompt[0].stream for r in work.requests if r.kind == "hot"} == {0, 1, 2}
    assert not [r for r in build("mix:share=0").requests if r.kind == "cold"]


def test_chat_repeats_the_conversation_with_the_answer() -> None:
    work = build("chat:sessions=2,turns=3,system=10,first=5,user=4,output=7")
    second, third = work.requests[2], work.requests[4]
    assert second.after == (0,)
    assert third.after == (2,)
    assert second.prompt == (*work.requests[0].prompt, Span(STREAM_ANSWER + 0, 0, 7), Span(3, 0, 4))
    assert third.prompt[: len(second.prompt)] == second.prompt
    assert third.prompt[-2] == Span(STREAM_ANSWER + 2, 0, 7)
    assert [r.prompt[0] for r in work.requests] == [Span(0, 0, 10)] * 6
    assert work.requests[0].prompt[1].stream != work.requests[1].prompt[1].stream
    # The engine's answer is in the next prompt.
    assert prompt_ids(second.prompt, 0, 1000, {0: [900 + i for i in range(7)]})[15:22] == list(
        range(900, 907)
    )


def test_chats_can_begin_behind_cold_prompts() -> None:
    work = build("chat:sessions=2,turns=2,before=3,cold=100,concurrency=2")
    cold, chats = work.requests[:3], work.requests[3:]
    assert [request.prompt_tokens for request in cold] == [100, 100, 100]
    streams = [span.stream for request in cold for span in request.prompt]
    assert not {span.stream for request in chats for span in request.prompt} & set(streams)
    assert [request.after for request in chats] == [(2,), (2,), (3,), (4,)]
    assert chats[2].prompt[-2].stream == STREAM_ANSWER + 3, "the answer of its first turn"
    assert (
        build("chat:sessions=2,turns=2,concurrency=2,before=0").hash
        == build("chat:sessions=2,turns=2,concurrency=2").hash
    )


def test_chat_with_fixed_answers_needs_no_engine() -> None:
    work = build("chat:sessions=2,turns=3,answers=fixed")
    streams = [span.stream for r in work.requests for span in r.prompt]
    assert max(streams) < STREAM_ANSWER
    last_streams = [r.prompt[-1].stream for r in work.requests]
    assert len(set(last_streams)) == len(last_streams)
    assert work.requests[4].prompt[2].stream not in last_streams
    assert work.hash != build("chat:sessions=2,turns=3").hash


@pytest.mark.parametrize("name", ["decode", "prefill", "zipf", "mix", "chat"])
def test_a_rate_makes_poisson_arrivals(name: str) -> None:
    work = build(f"{name}:rate=50,{'sessions' if name == 'chat' else 'requests'}=400")
    times = [r.arrival_s for r in work.requests if r.arrival_s is not None]
    assert len(times) == 400
    assert times[0] == 0.0
    assert times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert 0.8 < mean * 50 < 1.2
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert 0.75 < spread / mean < 1.3  # exponential: as wide as its mean
    assert work.concurrency is None


def test_concurrency_can_bound_arrivals() -> None:
    assert build("zipf:rate=5,concurrency=3").concurrency == 3
    assert build("decode").concurrency is None
    assert build("decode:concurrency=4").concurrency == 4
    assert build("decode:concurrency=4").requests[0].arrival_s is None


def test_the_seed_changes_the_work() -> None:
    assert build("decode", seed=1).hash != build("decode", seed=2).hash
    assert build("decode:seed=2", seed=1).hash == build("decode", seed=2).hash
    assert build("decode:seed=2").seed == 2
    assert [r.prompt for r in build("zipf", seed=1).requests] != [
        r.prompt for r in build("zipf", seed=2).requests
    ]
    assert build("decode:seed=9007199254740993").seed == 9007199254740993


def test_equal_work_has_an_equal_hash_whatever_it_is_called() -> None:
    assert build("decode:prompt=2000,output=48,requests=5").hash == build("seed-prefill:requests=5").hash
    assert build("decode:requests=5").hash != build("decode:requests=5,output=201").hash
    assert build("decode:requests=5").hash != build("decode:requests=5,concurrency=5").hash
    assert build("decode:requests=5").hash != build("decode:requests=5,rate=3").hash


def test_the_golden_hash_never_changes() -> None:
    assert build("rounds:prefixes=3,rounds=2").hash == "20b53216c6d2a960acb56ae0b69c8f6b"
    assert build("zipf:requests=50,rate=9", seed=3).hash == "46f12db5e0ae5d2a1be8ecd7d37aea1e"
    assert build("chat:sessions=3,turns=3").hash == "586bd0139ecc0b34e1d80d88f0d0e390"


def test_all_requests_that_another_waits_for_are_in_the_hash() -> None:
    def joined(*after: int) -> str:
        first = [Request(str(i), (Span(i, 0, 4),), 1) for i in range(3)]
        return work_hash(Draft([*first, Request("3", (Span(3, 0, 4),), 1, after=after)]), 0)

    assert len({joined(0), joined(0, 1), joined(0, 2), joined(0, 1, 2)}) == 4


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("", ["unknown workload", "rounds", "seed-decode"]),
        ("round", ["unknown workload 'round'", "did you mean rounds?"]),
        ("rounds:prefixs=3", ["rounds", "'prefixs'", "prefixes, prefix, suffix"]),
        ("decode:sessions=3", ["'sessions'", "requests"]),
        ("decode:requests", ["'requests'", "key=value"]),
        ("decode:requests=x", ["requests=x", "not a number"]),
        ("decode:requests=", ["requests=", "not a number"]),
        ("decode:requests=nan", ["requests=nan", "not a number"]),
        ("decode:requests=1.5", ["requests=1.5", "whole"]),
        ("decode:requests=0", ["requests=0", "below 1"]),
        ("decode:requests=-3", ["requests=-3", "below 1"]),
        ("decode:output=0", ["output=0", "below 1"]),
        ("decode:requests=90m", ["requests", "5,000,000"]),
        ("decode:prompt=1e99", ["prompt=1e99", "above"]),
        ("rounds:prefixes=1m,rounds=100", ["prefixes x rounds", "5,000,000"]),
        ("decode:requests=3,requests=4", ["requests=", "twice"]),
        ("mix:share=1.1", ["share=1.1", "above 1"]),
        ("zipf:rate=-1", ["rate=-1", "below 0"]),
        ("chat:answers=made-up", ["answers=made-up", "engine, fixed"]),
        ("trace", ["needs path=", "trace:path=FILE"]),
        ("trace:path=", ["needs path="]),
        ("trace:path=x,speed=0", ["speed=0", "below"]),
        ("trace:path=x,format=csv", ["format=csv", "mooncake"]),
        ("trace:path=x,from=5,to=4", ["to=4", "from=5"]),
    ],
)
def test_bad_specs_name_what_is_wrong_and_what_to_do(spec: str, names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        build(spec)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.hint
    for name in names:
        assert name in f"{caught.value.message} | {caught.value.hint}"


@given(st.text(max_size=40))
def test_a_bad_spec_raises_only_usage_errors(text: str) -> None:
    for spec in (text, f"rounds:{text}", f"decode:requests={text}"):
        with contextlib.suppress(UsageError):
            build(spec)
