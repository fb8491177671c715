from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.requests.loads.spec import build, session_load
from kvtune.requests.types import Span

SYSTEM = list(range(1000, 1040))
A = [*SYSTEM, *range(100, 160)]
A2 = [*A, 7, 8, 9, *range(160, 200)]
B = [*SYSTEM, *range(500, 560)]


def logged(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(prompt: list[int], t0: float, t1: float | None, answer: list[int] | None = None) -> dict[str, Any]:
    told = {} if t1 is None else {"t1": t1}
    return {"prompt": prompt, "answer": answer or [], "max_tokens": 3, "t0": t0, **told}


def test_a_prompt_that_grows_is_the_next_turn_of_its_session(tmp_path: Path) -> None:
    file = logged(tmp_path, row(A, 10, 12, [7, 8, 9]), row(B, 11, 13, [5]), row(A2, 15, 16, [4]))
    one, other = session_load(f"requests:path={file}").sessions
    first, second = one.nodes
    assert (second.after, second.think_s, second.parent, second.common) == ((0,), 3.0, 0, 103)
    assert first.head == (Span(0, 0, 40),) == other.nodes[0].head, "what both sessions begin with"
    assert (one.start_s, other.start_s) == (0.0, 1.0)


def test_an_edited_turn_continues_from_the_turn_before_it(tmp_path: Path) -> None:
    edited = [*A, 7, 8, 9, 160, 161, *range(300, 340)]
    file = logged(tmp_path, row(A, 10, 12, [7, 8, 9]), row(A2, 15, 16, [4]), row(edited, 18, 19))
    (session,) = session_load(f"requests:path={file}").sessions
    assert (session.nodes[2].parent, session.nodes[2].common, session.nodes[2].after) == (1, 105, (1,))


def test_a_repeated_prompt_begins_another_session(tmp_path: Path) -> None:
    file = logged(tmp_path, row(A, 10, 12, [7]), row(A, 15, 16, [7]))
    one, other = session_load(f"requests:path={file}").sessions
    assert len(one.nodes) == len(other.nodes) == 1
    assert one.nodes[0].head == other.nodes[0].head == (Span(0, 0, 100),)


def test_requests_in_flight_at_once_run_beside_each_other_and_are_joined(tmp_path: Path) -> None:
    file = logged(
        tmp_path,
        row(A, 10, 12, [7]),
        row([*A, 7, 1], 13, 20),
        row([*A, 7, 2], 14, 18),
        row([*A, 7, 1, 3, 4], 21, 22),
    )
    (session,) = session_load(f"requests:path={file}").sessions
    assert [node.after for node in session.nodes] == [(), (0,), (0,), (1, 2)]
    assert session.nodes[3].think_s == 1.0


def test_salts_share_nothing(tmp_path: Path) -> None:
    one, other = row(A, 10, 12, [7, 8, 9]), row(A2, 15, 16)
    file = logged(tmp_path, {**one, "cache_salt": "x"}, {**other, "cache_salt": "y"})
    assert [len(session.nodes) for session in session_load(f"requests:path={file}").sessions] == [1, 1]


def test_what_the_log_does_not_say_is_said(tmp_path: Path) -> None:
    load = session_load(f"requests:path={logged(tmp_path, row(A, 10, None), row(A2, 15, None))}")
    assert load.sessions[0].nodes[1].think_s == 5.0
    assert "when answers ended" in load.note and "2 of 2 answers have no token ids" in load.note


def test_slots_play_the_sessions_of_a_log(tmp_path: Path) -> None:
    file = logged(tmp_path, row(A, 10, 12, [7, 8, 9]), row(B, 11, 13, [5]), row(A2, 15, 16, [4]))
    work = build(f"requests:path={file},sessions=2,hours=0.001")
    assert {request.session for request in work.requests} >= {0, 1}
    assert len(build(f"requests:path={file}").requests) == 3, "without sessions= it is sent as it was"


def test_sessions_of_a_trace_continue_where_the_ids_go_on(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [9, 10]},
        {"timestamp": 3000, "input_length": 1700, "output_length": 7, "hash_ids": [0, 1, 3, 4]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = session_load(f"trace:path={file}")
    one, other = load.sessions
    assert (one.nodes[1].common, one.nodes[1].think_s, one.nodes[1].after) == (1105, 3.0, (0,))
    assert len(other.nodes) == 1
    assert "512 tokens" in load.note
    assert len(build(f"trace:path={file},sessions=2,hours=0.01").requests) > 3


def test_a_trace_without_ids_has_no_sessions(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,m,20,5,25,x\n")
    with pytest.raises(UsageError, match="no hash ids"):
        build(f"trace:path={file},sessions=2")
    with pytest.raises(UsageError, match="'zipf' has no sessions"):
        session_load("zipf")
