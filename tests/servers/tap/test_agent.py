"""An agent's loop through the judge: each break of its prefix is named, and turns that only grow have none.

Written from public descriptions of coding agents: a system text with a header line, tools, turns with tool calls and
their results, a reminder between the turns, a compaction.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtune.requests.log.logged import Logged
from kvtune.servers.tap.judging import Judging, Request
from kvtune.servers.tap.lines import as_text
from kvtune.servers.tap.messages import Settings
from tests.servers.tap.stand_in import ids_of, vllm

RULES = "\n".join(
    f"- Rule {number}: keep changes small, run the tests, name each file." for number in range(60)
)
FILE = "\n".join(f"{number}: def function_{number}(): return {number * number}" for number in range(40))


def body() -> dict[str, Any]:
    names = ("read", "write", "run", "search")
    schema = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {
        "model": "m",
        "max_tokens": 100,
        "system": [
            {"type": "text", "text": f"cc_version=2.1.40; cch=00c3e;\nYou are a coding agent.\n{RULES}"}
        ],
        "tools": [
            {
                "name": name,
                "description": f"{name} a file, or more of them, and say what came",
                "input_schema": schema,
            }
            for name in names
        ],
        "messages": [{"role": "user", "content": "Mend the test that fails in tests/test_store.py"}],
    }


def grown(before: dict[str, Any], number: int) -> dict[str, Any]:
    """The next turn: the model called a tool, and its result came."""
    after = copy.deepcopy(before)
    call = {
        "type": "tool_use",
        "id": f"call_{number}",
        "name": "read",
        "input": {"path": f"src/file_{number}.py"},
    }
    result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": f"file {number}\n{FILE}"}
    after["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return after


@pytest.fixture
def judging() -> Iterator[Judging]:
    with vllm() as server:
        made = Judging(Settings(server.url, {}, False, "kvtune-t-", "", False, False), print)
        made.server_state = server  # type: ignore[attr-defined]
        yield made
        made.close()


def ask(judging: Judging, sent: dict[str, Any], number: int) -> Request:
    ids = ids_of(sent)
    row = Logged(f"kvtune-t-{number}", ids, t0=float(number), output_tokens=-1, kind="claude-code")
    one = Request(number, "/v1/messages", sent, row)
    judging.opened(one)
    one.reported = len(ids)
    one.row = replace(row, t1=number + 0.5, hit=judging.server_state.hit(ids))  # type: ignore[attr-defined]
    judging.ended(one)
    judging.closed(one)
    return one


def kinds(judged: Request) -> list[str]:
    return [] if judged.differs is None else [edit.kind for edit in judged.differs.edits]


def test_turns_that_only_grow_differ_in_nothing_and_are_one_session(judging: Judging) -> None:
    sent = body()
    for number in range(10):
        judged = ask(judging, sent, number)
        assert kinds(judged) == [] and judged.group == "s1"
        assert number == 0 or judged.tally.hit_tokens > 0.6 * judged.tokens
        assert sum(judged.tally.misses.values()) == judged.tally.missed
        sent = grown(sent, number)


def test_each_break_of_the_prefix_is_named_with_its_place(judging: Judging) -> None:
    sent = body()
    for number in range(4):
        ask(judging, sent, number)
        sent = grown(sent, number)

    sent["system"][0]["text"] = sent["system"][0]["text"].replace("cch=00c3e", "cch=7f1a2")
    judged = ask(judging, sent, 10)
    assert kinds(judged) == ["header"] and judged.group == "s1"
    assert judged.tally.misses["diverged"] > 0.6 * judged.tokens
    shown = list(as_text(judged))
    assert "in system[0] line 1" in shown[1] and "00c3e" in shown[1] and "7f1a2" in shown[1]

    sent = grown(sent, 11)
    sent["tools"] = [sent["tools"][at] for at in (2, 0, 1, 3)]
    assert kinds(ask(judging, sent, 11)) == ["tools"]

    sent = grown(sent, 12)
    sent["messages"][2]["content"][0]["content"] = "[Old tool result content cleared]"
    judged = ask(judging, sent, 12)
    assert len(kinds(judged)) == 1 and judged.group == "s1"

    compacted = copy.deepcopy(sent)
    summary = (
        "This session is continued from a previous conversation that ran out of context. Summary: the test "
    )
    compacted["messages"] = [{"role": "user", "content": summary + "was mended, and the files were read."}]
    judged = ask(judging, compacted, 13)
    assert "compaction" in kinds(judged) and judged.group == "s1"
    assert judged.tally.hit_tokens > 0.3 * judged.tokens, "system text and tools are the same"


def test_after_a_restart_of_the_server_nothing_was_seen_before(judging: Judging) -> None:
    server = judging.server_state  # type: ignore[attr-defined]
    ask(judging, body(), 0)
    server.started = 100.0
    server.seen.clear()
    judged = ask(judging, body(), 1)
    assert (judged.tally.hit_tokens, judged.tally.misses) == (0, {"cold": judged.tokens})
    server.seen.clear()
    lost = ask(judging, body(), 2)
    assert "not_cached" in lost.tally.misses, "it was not restarted: the cache has lost what it had"


def test_another_session_of_the_same_agent_is_another_session(judging: Judging) -> None:
    ask(judging, body(), 0)
    other = body()
    other["messages"][0]["content"] = "Write the changelog"
    judged = ask(judging, other, 1)
    assert judged.group == "s2" and kinds(judged) == []
    assert json.dumps(judged.tally.misses)


def test_the_causes_are_those_of_the_nearest_prompt_whatever_the_line_compares_with(judging: Judging) -> None:
    """The session's last request has another order of tools, the one before it has these in this order."""
    sent = body()
    ask(judging, sent, 0)
    reordered = copy.deepcopy(sent)
    reordered["tools"].reverse()
    ask(judging, reordered, 1)
    changed = copy.deepcopy(sent)
    changed["tools"][3]["description"] += " of the whole repository"
    judged = ask(judging, changed, 2)
    differs = judged.differs
    assert differs is not None and differs.number == 1 and kinds(judged) == ["tools", "tool_changed"]
    nearest, own = ids_of(sent), ids_of(changed)
    first = next(at for at, (a, b) in enumerate(zip(nearest, own, strict=False)) if a != b)
    ends = next(at for at, (a, b) in enumerate(zip(nearest[::-1], own[::-1], strict=False)) if a != b)
    assert differs.token < first, "it is compared with another one"
    # All that follows the changed description stands in the first request, too.
    assert judged.tally.misses["diverged"] == ends and judged.tally.misses["cold"] == len(own) - ends - first
    assert differs.after >= ends and "mended, up to" in "".join(as_text(judged))


def test_reasoning_that_the_template_drops_is_named(judging: Judging) -> None:
    """The bodies are the same there: the server renders an earlier turn without its reasoning."""
    sent = body()
    call = {"type": "tool_use", "id": "c", "name": "read", "input": {"path": "a"}}
    thought = {"type": "thinking", "thinking": RULES[:600]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": FILE}
    sent["messages"] += [
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [result]},
    ]
    ask(judging, sent, 0)
    after = copy.deepcopy(sent)
    after["messages"] += [
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "Then mend it"},
    ]
    rendered = copy.deepcopy(after)
    del rendered["messages"][1]["content"][0]
    ids = ids_of(rendered)
    row = Logged("kvtune-t-1", ids, t0=1.0, output_tokens=-1, kind="claude-code")
    one = Request(1, "/v1/messages", after, row)
    judging.opened(one)
    one.reported = len(ids)
    one.row = replace(row, t1=1.5, hit=judging.server_state.hit(ids))  # type: ignore[attr-defined]
    judging.ended(one)
    judging.closed(one)
    judged = one
    assert kinds(judged) == ["reasoning"] and judged.tally.misses["diverged"] > len(FILE)
    assert "Send each turn back as it was answered" in "".join(as_text(judged))


def test_what_a_tap_that_joined_late_cannot_know_is_unknown() -> None:
    with vllm() as server:
        ids = ids_of(body())
        for _ in range(2):
            server.hit(ids)  # before the tap was there
        made = Judging(Settings(server.url, {}, False, "kvtune-t-", "", False, False), print)
        made.server_state = server  # type: ignore[attr-defined]
        try:
            late = ask(made, body(), 0)
            assert late.tally.hit_tokens > 0 and set(late.tally.misses) == {"unknown"}
            server.started = 100.0
            server.seen.clear()
            assert set(ask(made, body(), 1).tally.misses) == {"cold"}, "a new server's prompts are all known"
        finally:
            made.close()


WORDS = ("cache", "block", "prompt", "token", "window", "state", "pool", "engine", "step", "time")


def application(seed: int, lines: int = 30) -> str:
    """A system text of words that all applications use, in an own order."""
    draw = random.Random(seed)
    said = "\n".join(f"- {' '.join(draw.choices(WORDS, k=9))}." for _ in range(lines))
    return f"You are an assistant.\n{said}"


def chat(system: str, *said: str) -> dict[str, Any]:
    roles = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return {"messages": [{"role": "system", "content": system}, *roles]}


QUESTION = "What do you know of the town in which my aunt lives? " * 20


def test_another_application_is_no_change_of_a_prompt(judging: Judging) -> None:
    """However much of the question both have; of a prompt of the same application the change is named."""
    ask(judging, chat(application(1), QUESTION), 0)
    other = ask(judging, chat(application(2), QUESTION), 1)
    assert other.group == "s2" and other.differs is not None and other.differs.after > 500
    said = list(as_text(other))
    assert any("of its tokens are also in #0, after other text" in line for line in said)
    assert not any("mend" in line for line in said)
    stamped = ask(judging, chat(f"Today is 2026-11-29.\n{application(2)}", QUESTION + "And now?"), 2)
    assert stamped.group == "s3" and kinds(stamped) and "mend" in "".join(as_text(stamped))


@pytest.mark.parametrize("answers", [0, 1])
def test_applications_that_end_with_the_same_message_are_sessions_of_their_own(
    judging: Judging, answers: int
) -> None:
    """Also after each one's first answer; a system text that changes in a session is another version of it."""
    said = ("hello", "Hi!", "and you?")[: 2 * answers + 1]
    groups = []
    for turn in range(0, 2 * answers + 1, 2):
        for number in range(40):
            sent = chat(f"It is 1{turn}:0{number % 10}:21.\n{application(number)}", *said[: turn + 1])
            groups.append(ask(judging, sent, len(groups)).group)
    assert groups[:40] == [f"s{number}" for number in range(1, 41)]
    assert groups[40:] in ([], groups[:40])
