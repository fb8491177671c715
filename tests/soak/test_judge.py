"""What a soak calls wrong, on answers and censuses made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.soak import inside, judge, recorded
from tests.tools.soak.client import Answer
from tests.tools.soak.trouble import Ask

ASK = Ask(number=7, at_s=0.0, stem=0, shared=0, own=4, output=3)


def answer(*tokens: int, **changes: object) -> Answer:
    made = Answer("answered", 200, "", [list(tokens)], ["abc"], [["length"]], usage=len(tokens), ends=1)
    return replace(made, **changes)  # type: ignore[arg-type]


def texts(findings: list[judge.Finding]) -> list[str]:
    return [finding.text for finding in findings]


def test_a_whole_answer_is_right() -> None:
    assert judge.complete(ASK, answer(1, 2, 3)) == []
    assert judge.differs(ASK, answer(1, 2, 3), answer(1, 2, 3)) == []
    assert judge.parted(ASK, answer(1, 2, 3), answer(1, 2, 3)) is None


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (Answer(), "never answered"),
        (answer(1, 2, 3, ended="broken", error="reset"), "broken off: reset"),
        (answer(1, 2, 3, ends=2), "ended 2 times"),
        (answer(1, 2, 3, finish=[["length", "length"]]), "its choices [2]"),
        (answer(1, 2, 3, usage=4), "usage says 4 tokens, 3 came"),
        (answer(1, 2), "2 of 3 tokens"),
    ],
)
def test_what_is_wrong_with_an_answer_in_itself(wrong: Answer, text: str) -> None:
    (found, *_) = texts(judge.complete(ASK, wrong))
    assert text in found


def test_sigterm_before_the_first_token_leaves_a_stream_without_choices() -> None:
    nothing = answer(tokens=[], texts=[], finish=[])
    assert judge.complete(ASK, nothing, stopped=True) == []
    assert len(judge.complete(ASK, nothing)) == 2, "while the server runs, an empty answer is wrong"
    assert len(judge.complete(replace(ASK, client="whole"), nothing, stopped=True)) == 1
    one_of_three = answer(tokens=[[], [4], []], finish=[[], ["abort"], []], usage=1)
    assert judge.complete(replace(ASK, special="choices"), one_of_three, stopped=True) == []
    assert len(judge.complete(ASK, answer(1, 2), stopped=True)) == 1, "ended by length, too short"
    unended = answer(1, 2, finish=[[]])
    assert len(judge.complete(ASK, unended, stopped=True)) == 2


def test_an_answer_with_three_choices_or_with_logprobs() -> None:
    three = answer(tokens=[[1], [2], [3]], finish=[["length"]] * 3, usage=3)
    assert judge.complete(replace(ASK, special="choices"), three) == []
    assert len(judge.complete(replace(ASK, special="choices"), answer(1, 2, 3))) == 1
    assert judge.complete(replace(ASK, special="logprobs"), answer(1, 2, 3, logprobs=3)) == []
    assert len(judge.complete(replace(ASK, special="logprobs"), answer(1, 2, 3, logprobs=2))) == 1


def test_answers_part_at_the_first_other_token_and_may_end_early_if_the_client_left() -> None:
    assert judge.parted(ASK, answer(1, 2, 3), answer(1, 5, 3)) == judge.Parted(7, (1,), 2, 5)
    assert judge.parted(ASK, answer(1, ended="left"), answer(1, 2, ended="left")) is None


def test_an_error_is_stocks_error() -> None:
    refused = Answer("refused", 400, "too long")
    assert judge.differs(ASK, refused, Answer("refused", 400, "too long")) == []
    assert len(judge.differs(ASK, Answer("refused", 500, "too long"), refused)) == 1
    assert len(judge.differs(ASK, Answer("refused", 400, "another text"), refused)) == 1
    assert len(judge.differs(ASK, answer(1, 2, 3), refused)) == 1
    assert judge.differs(ASK, answer(1, 2, 3), Answer("left")) == [], "its client left as it ended"


def test_equal_tokens_with_another_text_or_reason_differ() -> None:
    assert len(judge.differs(ASK, answer(1, 2, 3), answer(1, 2, 3, texts=["abd"]))) == 1
    assert len(judge.differs(ASK, answer(1, 2, 3), answer(1, 2, 3, finish=[["stop"]]))) == 1
    assert len(judge.differs(ASK, answer(1, 2), answer(1, 2, 3))) == 1


FRONT = dict.fromkeys(judge.FRONT_ZERO, 0) | dict.fromkeys(judge.SLACK, 10)
ENGINE = dict.fromkeys(judge.ENGINE_ZERO, 0) | dict.fromkeys(judge.SLACK, 10)
WORKER = {"worker_requests": 1}


def test_nothing_is_left_behind() -> None:
    assert judge.left_behind(FRONT, ENGINE, WORKER) == []
    for name in judge.FRONT_ZERO:
        assert len(judge.left_behind({**FRONT, name: 1}, ENGINE, WORKER)) == 1
    for name in judge.ENGINE_ZERO:
        assert len(judge.left_behind(FRONT, {**ENGINE, name: 1}, WORKER)) == 1
    assert len(judge.left_behind(FRONT, ENGINE, {"worker_requests": 2})) == 1


def test_more_handles_than_at_first_are_a_leak_beyond_the_slack() -> None:
    now = {**FRONT, "handles": 10 + judge.SLACK["handles"]}
    assert judge.more_than_at_first("API server", FRONT, now) == []
    now["handles"] += 1
    (found,) = judge.more_than_at_first("API server", FRONT, now)
    assert found.kind == "leak" and "handles" in found.text


def test_a_slope_is_growth_only_beyond_its_interval_and_a_kib() -> None:
    requests = list(range(0, 4000, 100))
    flat = [1_000_000 + 5000 * (at % 3) for at in range(40)]
    found = judge.slope(requests, flat)
    assert found is not None and not found.grows and found.low <= 0 <= found.high
    leaking = [value + 2000 * each for value, each in zip(flat, requests, strict=True)]
    found = judge.slope(requests, leaking)
    assert found is not None and found.grows and found.low > 1900
    slowly = judge.slope(requests, [value + 500 * each for value, each in zip(flat, requests, strict=True)])
    assert slowly is not None and slowly.low > 0 and not slowly.grows, "half a KiB a request is allowed"
    assert judge.slope(requests[:14], flat[:14]) is None, "too few"


def test_memory_that_grows_is_a_process_own_not_a_files() -> None:
    status = "VmRSS:\t  701824 kB\nRssAnon:\t  470272 kB\nRssFile:\t  231412 kB\nRssShmem:\t     140 kB\n"
    assert inside.own_memory(status) == 1024 * (470272 + 140)
    assert 1 << 20 < inside.own_memory(Path("/proc/self/status").read_text()) < 1 << 40


def test_the_p99_at_the_end_beside_the_start() -> None:
    same = [[0.01 + 0.001 * (at % 7) for at in range(50)] for _ in range(40)]
    ratio = judge.p99_ratio(same)
    assert ratio is not None and ratio[1] <= 1.0 <= ratio[2]
    slower = [[gap * (1 + at / 20) for gap in each] for at, each in enumerate(same)]
    ratio = judge.p99_ratio(slower)
    assert ratio is not None and ratio[1] > 1.5
    assert judge.p99_ratio([[], *slower[:12]]) is not None and judge.p99_ratio(same[:11]) is None, "too few"


def test_each_answered_request_is_recorded_once_and_at_most_each_that_left() -> None:
    lines = [(4, 3), (4, 3), (9, 5), (9, 1)]
    assert recorded.wrong(lines, [(4, 3), (4, 3), (9, 5)], [], 1) == ""
    assert "1 more recorded" in recorded.wrong(lines, [(4, 3), (4, 3), (9, 5)], [], 0)
    assert "1 answered requests are not recorded" in recorded.wrong(lines, [(4, 3)] * 3, [], 9)
    assert recorded.wrong([(9, 5)], [], [(9, 4)], 0) == "", "EngineCore had made one more"
    assert "not recorded" in recorded.wrong([(9, 3)], [], [(9, 4)], 9)


def test_a_trace_that_is_torn_is_not_readable(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 1, "input_length": 4, "output_length": 3, "hash_ids": []})
    trace = tmp_path / "trace.jsonl"
    assert recorded.read(trace) == []
    trace.write_text(line + "\n")
    assert recorded.read(trace) == [(4, 3)]
    trace.write_text(line + "\n" + line[:20])
    with pytest.raises(ValueError, match=r"delimiter|Expecting|Unterminated"):
        recorded.read(trace)
