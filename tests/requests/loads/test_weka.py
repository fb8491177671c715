from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.requests.loads.sessions import Node
from kvtune.requests.loads.spec import build
from kvtune.requests.loads.weka import files_of, session
from kvtune.requests.loads.weka import recorded as read
from kvtune.requests.types import Span
from tests.recorded_sessions import asked, written


def test_all_recorded_sessions_are_read(recorded: Path) -> None:
    sessions = read(files_of(recorded))
    assert len(sessions) == 31
    assert sum(len(one.nodes) for one in sessions) == 1015
    assert sum(node.tokens for one in sessions for node in one.nodes) == 59_614_536
    assert sum(node.sub for one in sessions for node in one.nodes) == 104


@pytest.mark.full
def test_what_a_prompt_shares_is_what_a_search_over_all_earlier_ids_finds(recorded: Path) -> None:
    """To the id: a prompt that continues an earlier one also has its last, unfinished block and its answer."""
    for file in sorted(recorded.glob("*.json"))[::3]:
        flat = [
            one for part in json.loads(file.read_bytes())["requests"] for one in part.get("requests", [part])
        ]
        agents = any("requests" in part for part in json.loads(file.read_bytes())["requests"])
        seen: set[tuple[int, ...]] = set()
        for one, node in zip(flat, session(file).nodes, strict=True) if not agents else ():
            ids = one["hash_ids"]
            longest = next((n for n in range(len(ids), 0, -1) if tuple(ids[:n]) in seen), 0)
            assert node.common // 64 >= longest
            assert node.common < 64 * longest + 64 + (
                0 if node.parent < 0 else session(file).nodes[node.parent].output
            )
            seen.update(tuple(ids[:n]) for n in range(1, len(ids) + 1))


def test_a_prompt_that_goes_on_holds_the_last_block_and_the_answer(tmp_path: Path) -> None:
    file = written(
        tmp_path, [asked(0, 200, range(3)), asked(9, 300, [0, 1, 2, 7], think_time=4.0, api_time=2)]
    )
    first, second = session(file).nodes
    assert first == Node(200, 10, head=(Span(64, 0, 64),))
    assert second == Node(300, 10, (0,), 4.0, 0, 210)


def test_a_compacted_prompt_shares_the_first_blocks_only(tmp_path: Path) -> None:
    file = written(tmp_path, [asked(0, 640, range(10)), asked(9, 200, [0, 50, 51])])
    assert session(file).nodes[1] == Node(200, 10, (0,), 9.0, 0, 64)


def agent(t: float, requests: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "subagent",
        "duration_ms": 20_000,
        "tool_tokens": 32,
        "requests": requests,
        **fields,
    }


def test_a_turn_waits_for_its_sub_agents_and_not_twice(tmp_path: Path) -> None:
    """`t` of a sub-agent is its end, and the next turn's think time holds the wait for it."""
    requests = [
        asked(0, 200, range(3), api_time=5.0),
        agent(26, [asked(0, 100, [20]), asked(3, 150, [20, 21], think_time=1.0)]),
        agent(31, [asked(0, 100, [30])], duration_ms=25_000),
        asked(33, 300, [0, 1, 2, 7], think_time=28.0),
    ]
    first, one, two, three, last = session(written(tmp_path, requests)).nodes
    assert (one.after, one.think_s, one.sub, one.parent) == ((0,), 1.0, True, -1)
    assert (two.after, two.think_s, two.common) == ((1,), 1.0, 110)
    assert (three.after, three.think_s) == ((0,), 1.0)
    assert (last.after, last.think_s, last.sub) == ((2, 3), 2.0, False)
    assert first.head and one.head and not three.head, (
        "ids tell that it begins in another way than the one before"
    )


def test_a_sub_agent_without_a_duration_is_not_waited_for(tmp_path: Path) -> None:
    requests = [
        asked(0, 200, range(3), api_time=5.0),
        agent(26, [asked(0, 100, [20])], duration_ms=None, status="async_launched"),
        asked(33, 300, [0, 1, 2, 7], think_time=28.0),
    ]
    _, one, last = session(written(tmp_path, requests)).nodes
    assert one.after == (0,) and last.after == (0,) and last.think_s == 28.0


def refused(spec: str, *named: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(spec)
    assert caught.value.hint
    for one in named:
        assert one in caught.value.message, caught.value.message


def test_a_missing_folder_and_keys_of_other_traces_are_refused(tmp_path: Path) -> None:
    refused(f"trace:format=weka,path={tmp_path / 'none'}", "none")
    written(tmp_path, [asked(0, 200, range(3))])
    for keys in ("from=3", "to=4", "sort=1"):
        refused(f"trace:path={tmp_path},{keys}", keys.partition("=")[0])


def test_sessions_that_do_not_fit_are_left_out_and_said(tmp_path: Path) -> None:
    written(tmp_path, [asked(0, 200, range(3)), asked(9, 300, [0, 1, 2, 7])])
    written(tmp_path, [asked(0, 400, range(6))], name="trace_2")
    work = build(f"trace:path={tmp_path},longest=250")
    assert [request.prompt_tokens for request in work.requests] == [200]
    assert "2 requests are left out" in work.note and "1 of 2 sessions whole" in work.note
