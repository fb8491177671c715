"""The whole command against a toy server: noise is no fault, a fault is found and placed, what is sent is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.cli.app import run
from tests.answers.check.fake import BLOCK, Hit, Toy, serving

LEVELS = (0.0, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
FAST = (0.0, 0.01, 0.3)


def check(toy: Toy, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    with serving(toy) as url:
        code = run(["check", url, "--yes", "--json", "--tokens", "4", *words])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return code, json.loads(printed.out)


def full(levels: tuple[float, ...]) -> list[Any]:
    """Ten seeds of each level; one in every test run, of some."""
    cases = [(level, seed) for seed in range(10) for level in LEVELS]
    return [
        pytest.param(*case, marks=[] if case[0] in levels and not case[1] else pytest.mark.full)
        for case in cases
    ]


@pytest.mark.parametrize(("noise", "seed"), full(FAST))
def test_noise_is_no_fault(noise: float, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = check(
        Toy(noise, seed=seed), capsys, "--prompts", "8" if noise in FAST and not seed else "32"
    )
    assert all(each["wrong"] == 0 for each in answer["paths"]), answer["paths"]
    shown = {each["name"]: each["hits"] / each["asked"] for each in answer["paths"] if each["hits"]}
    assert shown == dict.fromkeys(("whole", "inside", "shortest", "junction", "turn"), 1.0)
    assert (answer["verdict"], code) in (("as cold", 0), ("cannot tell", 3))
    if answer["cold"]["asked"] == 64:
        assert code == 0 or noise >= 0.03


@pytest.mark.full
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.05])
def test_a_fault_is_seen_as_often_as_is_said(noise: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of another text in one of ten hits: over the paths of thirty runs of other prompts."""
    seen, said = [], []
    for seed in range(30):
        toy = Toy(noise, seed=seed, lasts=False)
        toy.wrong = lambda hit, toy=toy: toy.draw.random() < 0.1
        _, answer = check(toy, capsys, "--prompts", "12", "--seed", str(seed))
        shown = [each for each in answer["paths"] if each["hits"]]
        seen += [each["wrong"] > 0 for each in shown]
        said += [each["seen_with"] for each in shown]
    assert abs(sum(seen) / len(seen) - sum(said) / len(said)) < 0.15, (seen, said)


PLACED: dict[str, Callable[[Hit], bool]] = {
    "short hits": lambda hit: hit.cached <= BLOCK,
    "long hits": lambda hit: hit.cached > 1000,
    "a remainder": lambda hit: hit.prompt % BLOCK < 4,
}
NAMED = {
    "short hits": "all where the path is the shortest hit",
    "long hits": "all where the path is a prompt of several chunks",
    "a remainder": "all where prompt mod 16 at most 3",
}


@pytest.mark.parametrize("fault", PLACED)
def test_each_wrong_hit_is_told_with_what_may_decide_it(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = check(Toy(1e-3, PLACED[fault], longest=4096), capsys, "--prompts", "12")
    assert (code, answer["verdict"]) == (1, "differs")
    told = [Hit(each["cached"], 0, len(each["ids"]), 0) for each in answer["differ"]]
    assert len(told) == sum(each["wrong"] for each in answer["paths"]) > 3
    assert all(map(PLACED[fault], told))
    assert answer["common"] == NAMED[fault]


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.full] if s else []) for s in range(20)])
def test_noise_that_is_too_rare_for_cold_answers_to_show_it_is_no_fault(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before hits were asked for again, nine of twenty of these checks cried wolf."""
    rare = (0.003, 0.01)[seed % 2]
    code, answer = check(Toy(1e-3, seed=seed, rare=rare), capsys, "--prompts", "32" if seed else "12")
    assert code in (0, 3), answer["paths"]


def test_a_fault_that_is_gone_when_a_hit_is_asked_for_again_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, answer = check(Toy(1e-3, lambda hit: hit.number % 2 == 0, lasts=False), capsys, "--prompts", "16")
    assert code == 1 and not any(row["repeats"] for row in answer["differ"])
    code, answer = check(Toy(1e-3, lambda hit: hit.number == 10, lasts=False), capsys, "--prompts", "16")
    assert (code, answer["verdict"], len(answer["differ"])) == (3, "cannot tell", 1)


def test_a_server_that_refuses_salts_is_told_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(Toy):
        def complete(self, body: dict[str, Any]) -> dict[str, Any]:
            raise ValueError("cache_salt")

    with serving(Refusing()) as url:
        code = run(["check", url, "--yes", "--prompts", "2"])
    said = capsys.readouterr().err
    assert code == 1 and "answers 400" in said and "or cache_salt" in said


def test_a_server_whose_hits_are_all_wrong_has_clean_cold_answers(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = check(Toy(1e-3, lambda hit: True, longest=4096), capsys, "--prompts", "4")
    shown = [each for each in answer["paths"] if each["hits"]]
    assert code == 1 and len(shown) == 6 and answer["cold"]["nats"] < 0.01
    assert all(each["wrong"] == each["hits"] for each in shown)


def test_one_wrong_hit_in_twenty_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy(1e-3, lambda hit: hit.number % 20 == 0)
    code, answer = check(toy, capsys, "--prompts", "12")
    assert code == 1 and 2 <= sum(each["wrong"] for each in answer["paths"]) <= 6


def test_a_salt_that_is_ignored_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy(salted=False)
    with serving(toy) as url:
        code = run(["check", url, "--yes", "--prompts", "2", "--tokens", "2"])
    assert code == 1 and "cache_salt is ignored" in capsys.readouterr().out
    assert len(toy.bodies) == 6  # no path is asked for: nothing would be cold beside it


def test_the_answer_is_a_terminal_s_and_markdown_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = tmp_path / "check.html"
    toy = Toy(wrong=lambda hit: hit.cached <= BLOCK)
    with serving(toy) as url:
        words = ["check", url, "--yes", "--prompts", "4", "--tokens", "2"]
        assert run([*words, "--page", str(page)]) == 1
        shown = capsys.readouterr().out
        assert run([*words, "--md"]) == 1
    assert shown.startswith(
        "4 of 20 hits differ from the cold answer, all where the path is the shortest hit; "
    )
    assert "the shortest hit: 4 of 4\n" in shown and "Not shown: at a window's edge" in shown
    assert "Until it is mended: --no-enable-prefix-caching." in shown
    assert "| the shortest hit | differs | 4 of 4 | 4 |" in capsys.readouterr().out
    assert "the shortest hit" in page.read_text()


def test_a_prompt_ends_where_a_number_that_it_said_would_follow(capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy(reads=True)
    check(toy, capsys, "--prompts", "2")
    first, second = ([*body["prompt"][0]] for body in (toy.bodies[0], toy.bodies[1]))
    assert len(first) >= 400 and first != second
    for ids, far in ((first, True), (second, False)):
        question = ids[-5:]  # "the code of NAME is"
        places = [start for start in range(len(ids) - 5) if ids[start : start + 5] == question]
        assert len(places) == 1 and (places[0] < 40) == far and places[0] + 40 > (0 if far else len(ids) - 40)


def test_counters_tell_hits_where_answers_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = check(Toy(details=False), capsys, "--prompts", "2")
    assert [each["hits"] for each in answer["paths"] if each["asked"]] == [2] * 5 and code == 3


def test_a_tier_is_told_alone_and_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    """Local hits and the tier alone are clean, the mixed ones are not: seen in public."""
    toy = Toy(1e-3, lambda hit: 0 < hit.loaded < hit.cached, tier=set())
    code, answer = check(toy, capsys, "--prompts", "8", "--fill")
    shown = {each["name"]: (each["wrong"], each["hits"]) for each in answer["paths"] if each["hits"]}
    assert code == 1 and shown["mixed"] == (8, 8) and shown["tier"] == shown["whole"] == (0, 8)
    assert {each["path"] for each in answer["differ"]} == {"mixed"}
    _, answer = check(Toy(tier=set(), empties=False), capsys, "--prompts", "8", "--fill")
    shown = {each["name"]: each["hits"] for each in answer["paths"]}
    assert 0 < shown["tier"] < 8  # of the others, a part was local


@pytest.mark.parametrize("change", ["text", "no logprobs", "no choice", "other tokens", "huge"])
def test_an_answer_that_no_vllm_gives_is_refused(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(Toy):
        def complete(self, body: dict[str, Any]) -> dict[str, Any]:
            answer = super().complete(body)
            choice = answer["choices"][0]
            logprobs = choice["logprobs"]
            if change == "text":
                logprobs["tokens"] = ["a"] * len(logprobs["tokens"])
            elif change == "no logprobs":
                choice["logprobs"] = None
            elif change == "no choice":
                answer["choices"] = answer["choices"][1:]
            elif change == "other tokens":
                logprobs["top_logprobs"] = [{} for _ in logprobs["tokens"]]
            else:
                logprobs["top_logprobs"] = [dict.fromkeys(top, 1e308) for top in logprobs["top_logprobs"]]
            return answer

    with serving(Other()) as url:
        code = run(["check", url, "--yes", "--prompts", "2", "--tokens", "2"])
    printed = capsys.readouterr()
    if change == "huge":  # all alike: nothing can be told
        assert code == 3 and "cannot tell" in printed.out
    else:
        assert code == 1 and "Traceback" not in printed.err and "next:" in printed.err


def test_nothing_is_sent_before_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy()
    with serving(toy) as url:
        assert run(["check", url, "--prompts", "2"]) == 2
        said = capsys.readouterr().err
        assert not toy.bodies and "--yes" in said
        assert run(["check", url, "--prompts", "2", "--yes", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert f"{len(toy.bodies)} requests" in said and answer["requests"] == len(toy.bodies)
    tokens = sum(len(ids) for body in toy.bodies for ids in body["prompt"])
    assert f"{tokens:,} prompt tokens" in said and "minutes" not in said  # it has answered nobody
    with serving(Toy(queries=2000, hits=1000)) as url:
        assert run(["check", url, "--prompts", "2"]) == 2
    minutes = (tokens * 10 / 1000 + len(toy.bodies) * 16 * 20 / 1000) / 60
    assert f", {minutes:.1f} minutes at its pace until now, and" in capsys.readouterr().err


def test_the_same_prompts_are_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    toy = Toy(wrong=lambda hit: hit.cached <= BLOCK)
    code, first = check(toy, capsys, "--prompts", "6", "--seed", "3")
    assert code == 1
    code, answer = check(again := Toy(wrong=toy.wrong, seed=2), capsys, "--prompts", "6", "--seed", "3")
    assert code == 1
    assert [each["wrong"] for each in answer["paths"]] == [each["wrong"] for each in first["paths"]]
    assert {str(body["prompt"]) for body in again.bodies} == {str(body["prompt"]) for body in toy.bodies}
    assert not {body["cache_salt"] for body in again.bodies} & {body["cache_salt"] for body in toy.bodies}
    for each in answer["differ"]:  # what an issue can quote
        assert len(each["ids"]) > 300 and each["answer"]["tokens"] != [] != each["cold"]["tokens"]
        assert each["ids"] in [body["prompt"][0] for body in again.bodies]
    check(other := Toy(), capsys, "--prompts", "6", "--seed", "4")
    assert other.bodies[0]["prompt"] != toy.bodies[0]["prompt"]


def test_what_a_tier_kept_over_a_restart_is_asked_for_under_the_salts_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy, file = Toy(1e-3, tier=set()), tmp_path / "a.json"
    _, first = check(toy, capsys, "--prompts", "4", "--fill")
    file.write_text(json.dumps(first))
    again = Toy(1e-3, lambda hit: hit.loaded > 0, tier=toy.tier)
    code, answer = check(again, capsys, "--replay", str(file))
    shown = {each["name"]: (each["wrong"], each["hits"]) for each in answer["paths"] if each["hits"]}
    assert code == 1 and shown["kept"] == (4, 4) and shown["whole"] == (0, 4)
    assert answer["common"] == "all where the hit is from a tier" and answer["prompts"] == first["prompts"]
    file.write_text(json.dumps(first | {"salts": []}))
    with serving(Toy()) as url:
        assert run(["check", url, "--yes", "--replay", str(file)]) == 2
