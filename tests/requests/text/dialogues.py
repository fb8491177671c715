"""Dialogues of an agent with tools, as bodies of two APIs, and random edits of 24 sorts that break their prefix."""

from __future__ import annotations

import copy
import json
import random
import unicodedata
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtune.requests.text.edits import edits
from tests.requests.text.logs import rules

Body = dict[str, Any]
NAMES = (
    "find_order",
    "get_flight",
    "book_seat",
    "cancel",
    "send_mail",
    "list_files",
    "read_page",
    "weather_of",
)
PEOPLE = ("Alice Moreau", "Bob Stone", "Carla Diaz", "Dmitri Volkov", "Erin O'Hara")
MONTHS = ("January", "February", "March", "April", "June", "July", "October", "November", "December")


def dialogue(draw: random.Random) -> Body:
    """An OpenAI body: a system prompt in sections, tools, and turns of which some have calls, results and reasoning."""
    seed = draw.randrange(1 << 30)
    lines = [
        "You are the assistant of a travel shop.",
        f"Time: {clock(draw)}",
        f"Today is {date(draw)}.",
        f"Request id: {token(draw)}",
        f"trace {uuid.UUID(int=draw.getrandbits(128))}",
        f"user: {draw.choice(PEOPLE)}",
        f"You may answer {draw.randrange(9, 99)} more questions.",
        f"x-anthropic-billing-header: cc_version=2.1.{draw.randrange(99)}; cch={draw.getrandbits(20):05x};",
        "Be polite to a guest in the café of Zoë, whatever she says.",
        f"Settings: {json.dumps({'city': 'Rome', 'units': 'metric', 'seats': 4, 'class': 'first'})}",
    ]
    body: list[str] = [rules(seed + n, 2).replace(". Rule", ".\nRule") for n in range(4)]
    shots = [
        "\n".join((f"Example {n}:", f"Q: {rules(seed + 10 + n, 1)}", f"A: {rules(seed + 20 + n, 1)}"))
        for n in range(1, 4)
    ]
    system = "\n".join([*lines, *body, "", *shots, "", *(rules(seed + 30 + n, 1) for n in range(4))])
    tools: list[Body] = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": rules(seed + 40 + n, 2),
                "parameters": {
                    "type": "object",
                    "properties": {"of": {"type": "string"}, "limit": {"type": "integer"}},
                },
            },
        }
        for n, name in enumerate(draw.sample(NAMES, 5))
    ]
    messages: list[Body] = [{"role": "system", "content": system}]
    for n in range(draw.randrange(5, 12)):
        parts = (
            [f"<document>\n{rules(seed + 100 + 10 * n + at, 3)}\n</document>" for at in range(3)]
            if n == 1
            else []
        )
        messages.append(
            {"role": "user", "content": "\n".join([*parts, f"Asked {n}: {rules(seed + 200 + n, 2)}"])}
        )
        arguments = json.dumps({"of": rules(seed + 300 + n, 1), "limit": n + 5})
        function = {"name": tools[n % 5]["function"]["name"], "arguments": arguments}
        call = {"id": f"call_{n}", "type": "function", "function": function}
        thought = f"Thought {n}: {rules(seed + 400 + n, 2)}"
        messages.append(
            {"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": [call]}
        )
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": rules(seed + 500 + n, 9)})
        messages.append({"role": "assistant", "content": f"Told {n}: {rules(seed + 600 + n, 3)}"})
    return {"model": "m", "messages": messages, "tools": tools}


def clock(draw: random.Random) -> str:
    day = f"2026-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
    return f"{day}T{draw.randrange(24):02}:{draw.randrange(60):02}:{draw.randrange(60):02}Z"


def date(draw: random.Random) -> str:
    return draw.choice(
        (
            f"{draw.choice(MONTHS)} {draw.randrange(1, 29)}, 2026",
            f"{draw.randrange(1, 29)} {draw.choice(MONTHS)} 2026",
        )
    )


def token(draw: random.Random) -> str:
    return f"req_{draw.getrandbits(40):010x}"


Change = Callable[[Body, random.Random], None]


def _lines(start: str, number: int, make: Callable[[str, random.Random], list[str]]) -> Change:
    """Change line `number` of those of the system prompt that begin so."""

    def change(body: Body, draw: random.Random) -> None:
        lines = body["messages"][0]["content"].split("\n")
        at = [n for n, line in enumerate(lines) if line.startswith(start)][number]
        lines[at : at + 1] = make(lines[at], draw)
        body["messages"][0]["content"] = "\n".join(lines)

    return change


def _line(start: str, make: Callable[[str, random.Random], str]) -> Change:
    return _lines(start, 0, lambda line, draw: [make(line, draw)])


def _rule(number: int, make: Callable[[str], list[str]]) -> Change:
    return _lines("Rule ", number, lambda line, _: make(line))


def _other(make: Callable[[random.Random], str]) -> Callable[[str, random.Random], str]:
    def changed(line: str, draw: random.Random) -> str:
        while (made := make(draw)) == line:
            pass
        return made

    return changed


def _shuffled(items: list[Any], draw: random.Random) -> list[Any]:
    while (made := draw.sample(items, len(items))) == items:
        pass
    return made


def _tools(body: Body, draw: random.Random) -> None:
    body["tools"] = _shuffled(body["tools"], draw)


def _tool_changed(body: Body, draw: random.Random) -> None:
    body["tools"][2]["function"]["description"] += f" At most {draw.randrange(100, 999)} at once."


def _tool_removed(body: Body, draw: random.Random) -> None:
    del body["tools"][draw.randrange(1, 4)]


def _examples(body: Body, draw: random.Random) -> None:
    text = body["messages"][0]["content"]
    start, end = text.index("Example 1:"), text.rindex("\n\n")
    shots = ["Example " + shot for shot in text[start:end].rstrip("\n").split("Example ")[1:]]
    shots = [shot.rstrip("\n") for shot in shots]
    body["messages"][0]["content"] = text[:start] + "\n".join(_shuffled(shots, draw)) + text[end:]


def _keys(line: str, draw: random.Random) -> str:
    head, _, given = line.partition(": ")
    return f"{head}: {json.dumps(dict(_shuffled(list(json.loads(given).items()), draw)))}"


def _of(role: str, body: Body, low: int, high: int | None = None) -> list[int]:
    found = [n for n, message in enumerate(body["messages"]) if message["role"] == role]
    return found[low:high]


def _documents(body: Body, draw: random.Random) -> None:
    at = next(n for n, one in enumerate(body["messages"]) if "<document>" in str(one["content"]))
    parts = body["messages"][at]["content"].split("\n</document>\n")
    body["messages"][at]["content"] = "\n</document>\n".join([*_shuffled(parts[:3], draw), parts[3]])


def _reasoning(body: Body, draw: random.Random) -> None:
    at = draw.choice([n for n, one in enumerate(body["messages"]) if one.get("reasoning_content")])
    del body["messages"][at]["reasoning_content"]


def _cleared(body: Body, draw: random.Random) -> None:
    body["messages"][draw.choice(_of("tool", body, 1, -1))]["content"] = "[Old tool result content cleared]"


def _call(body: Body, draw: random.Random) -> None:
    at = draw.choice([n for n, one in enumerate(body["messages"]) if one.get("tool_calls")])
    function = body["messages"][at]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(
        json.loads(function["arguments"]), sort_keys=True, separators=(",", ":")
    )


def _turn_removed(body: Body, draw: random.Random) -> None:
    at = draw.choice(_of("user", body, 2, -1))
    del body["messages"][at : at + draw.choice((1, 4))]


def _turn_added(body: Body, draw: random.Random) -> None:
    at = draw.choice(_of("user", body, 2, -1))
    body["messages"].insert(
        at, {"role": "user", "content": f"By the way: {rules(draw.randrange(1 << 30), 2)}"}
    )


def _reminder(body: Body, draw: random.Random) -> None:
    at = draw.choice(_of("user", body, 2, -1))
    text = f"<system-reminder>\n{rules(draw.randrange(1 << 30), 1)}\n</system-reminder>"
    body["messages"][at]["content"] += f"\n{text}"


def _compaction(body: Body, draw: random.Random) -> None:
    end = draw.choice(_of("user", body, 3, -1))
    text = f"This session is continued from a previous conversation. Summary: {rules(draw.randrange(1 << 30), 2)}"
    body["messages"][1:end] = [{"role": "user", "content": text}]


HEADER = "x-anthropic-billing-header"
CHANGES: dict[str, Change] = {
    "time": _line("Time:", _other(lambda draw: f"Time: {clock(draw)}")),
    "date": _line("Today is", _other(lambda draw: f"Today is {date(draw)}.")),
    "id": _line("Request id", _other(lambda draw: f"Request id: {token(draw)}")),
    "uuid": _line("trace", lambda _, draw: f"trace {uuid.UUID(int=draw.getrandbits(128))}"),
    "user": _line("user:", _other(lambda draw: f"user: {draw.choice(PEOPLE)}")),
    "counter": _line(
        "You may", _other(lambda draw: f"You may answer {draw.randrange(9, 99)} more questions.")
    ),
    "header": _line(
        HEADER, _other(lambda draw: f"{HEADER}: cc_version=2.1.7; cch={draw.getrandbits(20):05x};")
    ),
    "unicode": _line("Be polite", lambda line, _: unicodedata.normalize("NFD", line)),
    "keys": _line("Settings", _keys),
    "whitespace": _rule(1, lambda line: [f"{line} "]),
    "line_added": _rule(3, lambda line: [line, "Say nothing about trains, or ships, or long walks."]),
    "line_removed": _rule(5, lambda line: []),
    "examples": _examples,
    "tools": _tools,
    "tool_changed": _tool_changed,
    "tool_removed": _tool_removed,
    "documents": _documents,
    "reasoning": _reasoning,
    "cleared": _cleared,
    "tool_call_rewritten": _call,
    "turn_removed": _turn_removed,
    "turn_added": _turn_added,
    "reminder": _reminder,
    "compaction": _compaction,
}
"""Sorts of edits, by the kind that each is named."""
OF_TURNS = (
    "turn_removed",
    "turn_added",
    "reminder",
    "compaction",
    "documents",
    "reasoning",
    "cleared",
    "tool_call_rewritten",
)
OF_TOOLS = ("tools", "tool_changed", "tool_removed")


def anthropic(body: Body) -> Body:
    """The same as a body of Anthropic's messages."""
    messages: list[Body] = []
    for one in body["messages"][1:]:
        role = "user" if one["role"] == "tool" else one["role"]
        parts: list[Body] = []
        if one.get("reasoning_content"):
            parts.append({"type": "thinking", "thinking": one["reasoning_content"]})
        if one["role"] == "tool":
            parts.append(
                {"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]}
            )
        elif one["content"] is not None:
            parts.append({"type": "text", "text": one["content"]})
        for call in one.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            parts.append(
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
            )
        messages.append({"role": role, "content": parts})
    tools = [{**tool["function"], "input_schema": tool["function"]["parameters"]} for tool in body["tools"]]
    system = [{"type": "text", "text": body["messages"][0]["content"]}]
    return {"model": "m", "system": system, "messages": messages, "tools": tools}


def pair(seed: int, most: int = 3) -> tuple[Body, Body, list[str]]:
    """Two consecutive turns, the second with 1 to `most` edits: at most one of the tools and one of the turns."""
    draw = random.Random(seed)
    old = dialogue(draw)
    chosen: list[str] = []
    count = draw.randint(1, most)
    for kind in draw.sample(list(CHANGES), len(CHANGES)):
        groups = [group for group in (OF_TURNS, OF_TOOLS) if kind in group]
        if len(chosen) < count and not any(set(group) & set(chosen) for group in groups):
            chosen.append(kind)
    new = copy.deepcopy(old)
    for kind in chosen:
        CHANGES[kind](new, draw)
    new["messages"] += [
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks. More?"},
    ]
    if (
        seed % 2 and "tool_call_rewritten" not in chosen
    ):  # Anthropic's calls are objects: only their keys' order can differ
        return anthropic(old), anthropic(new), chosen
    return old, new, chosen


def judged(first: int, pairs: int, most: int = 3) -> tuple[int, Counter[str], Counter[str], Counter[str]]:
    """Return how many pairs are right, and the edits by kind: made, missed, and named without being there."""
    right = 0
    made, missed, wrong = Counter[str](), Counter[str](), Counter[str]()
    for seed in range(first, first + pairs):
        old, new, chosen = pair(seed, most)
        named = Counter(one.kind for one in edits(old, new))
        right += named == Counter(chosen)
        made.update(chosen)
        missed.update(Counter(chosen) - named)
        wrong.update(named - Counter(chosen))
    return right, made, missed, wrong
