"""Eight logs with a text that breaks the prefix, each a pattern that users report, and two that have none."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Body = dict[str, Any]
QUESTIONS = (
    "What is the capital of France?",
    "How do I reverse a list in Python?",
    "Summarize the second chapter.",
    "Which planet is the largest?",
    "Why is the sky blue?",
    "Translate good morning into Dutch.",
)
CITIES = ("Paris", "Berlin", "Madrid", "Rome", "Vienna", "Oslo")


@dataclass(frozen=True)
class Pattern:
    """A log, and what of it is found: one group, or none where `kind` is "". `before`: the text before what differs.

    `least`: tokens after a difference that each of its requests has at least.
    """

    name: str
    template: str
    bodies: list[Body]
    kind: str
    before: str = ""
    requests: int = 0
    least: int = 1200


def rules(seed: int, sentences: int = 30) -> str:
    """A system prompt of sentences that do not repeat each other."""
    draw = random.Random(seed)
    parts = (
        "ba",
        "ke",
        "li",
        "mo",
        "nu",
        "ra",
        "se",
        "ti",
        "vo",
        "zu",
        "den",
        "far",
        "gol",
        "pim",
        "tor",
        "wex",
    )
    words = lambda: " ".join("".join(draw.choices(parts, k=draw.randint(1, 3))) for _ in range(9))  # noqa: E731
    return " ".join(f"Rule {n}: {words()}." for n in range(sentences))


def chat(*messages: tuple[str, str], **more: Any) -> Body:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def tool(name: str, seed: int) -> Body:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": rules(seed, 3),
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }


def time_in_header() -> Pattern:
    bodies = [
        chat(
            ("system", f"You are a helpful assistant.\nTime: 2026-09-11T08:{minute:02}:00Z\n{rules(1)}"),
            ("user", asked),
        )
        for minute, asked in zip((10, 21, 32, 43, 54, 55), QUESTIONS, strict=True)
    ]
    return Pattern("time in the header", "chatml", bodies, "time", "Time: ", 5)


def uuid_in_system() -> Pattern:
    draw = random.Random(2)
    bodies = []
    for asked in QUESTIONS:
        digits = f"{draw.getrandbits(128):032x}"
        name = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        bodies.append(chat(("system", f"Request {name}. {rules(2)}"), ("user", asked)))
    return Pattern("uuid in the system prompt", "llama3", bodies, "uuid", "Request ", 5)


def tools_reordered() -> Pattern:
    draw = random.Random(3)
    bodies = []
    for asked in QUESTIONS:
        tools = [tool(f"get_{city.lower()}_weather", n) for n, city in enumerate(CITIES)]
        draw.shuffle(tools)
        bodies.append(chat(("system", "You are a helpful assistant."), ("user", asked), tools=tools))
    return Pattern("tools in another order", "chatml", bodies, "tools", "<tools>", 5, 900)


def keys_reordered() -> Pattern:
    draw = random.Random(4)
    bodies = []
    for asked in QUESTIONS:
        profile = [("city", "Paris"), ("language", "Dutch"), ("units", "metric"), ("currency", "euro")]
        draw.shuffle(profile)
        text = f"Profile: {json.dumps(dict(profile))}\n{rules(4)}"
        bodies.append(chat(("system", text), ("user", asked)))
    return Pattern("JSON keys in another order", "gemma", bodies, "keys", 'Profile: {"', 5)


def whitespace() -> Pattern:
    bodies = [
        chat(("system", f"You are a helpful assistant.{gap}{rules(5)}"), ("user", asked))
        for gap, asked in zip(("\n", "\n\n", "\n", "\n\n", " \n", "\n"), QUESTIONS, strict=True)
    ]
    return Pattern("white space", "chatml", bodies, "whitespace", "assistant.", 2)


def reasoning_stripped() -> Pattern:
    """An agent's turns keep their reasoning until the user asks again; then the template drops it."""
    bodies = []
    for n, asked in enumerate(QUESTIONS):
        turns: list[Body] = [
            {"role": "system", "content": rules(60 + n, 6)},
            {"role": "user", "content": asked},
        ]
        turns.append({"role": "assistant", "content": "Let me look.", "reasoning_content": rules(160 + n, 3)})
        turns.append({"role": "tool", "content": rules(260 + n, 8)})
        bodies.append({"messages": list(turns)})
        turns.append({"role": "assistant", "content": "Here it is."})
        turns.append({"role": "user", "content": "Thank you. And now?"})
        bodies.append({"messages": list(turns)})
    return Pattern("reasoning stripped", "chatml", bodies, "reasoning", "assistant\n", 6, 400)


def effort_flag() -> Pattern:
    efforts = ("low", "high", "low", "medium", "high", "medium")
    bodies = [
        chat(("system", rules(7)), ("user", asked), reasoning_effort=effort)
        for effort, asked in zip(efforts, QUESTIONS, strict=True)
    ]
    return Pattern("effort flag in the template", "harmony", bodies, "flag", "Reasoning: ", 2)


def user_in_front() -> Pattern:
    names = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank")
    bodies = [
        chat(("system", f"User: {name}\n{rules(8)}"), ("user", asked))
        for name, asked in zip(names, QUESTIONS, strict=True)
    ]
    return Pattern("user's name in front", "llama3", bodies, "user", "User: ", 5)


def clean_questions() -> Pattern:
    bodies = [chat(("system", rules(9)), ("user", asked)) for asked in QUESTIONS]
    return Pattern("one system prompt, other questions", "chatml", bodies, "")


def clean_conversations() -> Pattern:
    bodies = []
    for n in range(3):
        turns: list[tuple[str, str]] = [("system", rules(10))]
        for turn, asked in enumerate(QUESTIONS):
            turns.append(("user", f"{asked} ({n})"))
            bodies.append(chat(*turns))
            turns.append(("assistant", rules(300 + 10 * n + turn, 4)))
    return Pattern("conversations that grow", "llama3", bodies, "")


BROKEN = (
    time_in_header,
    uuid_in_system,
    tools_reordered,
    keys_reordered,
    whitespace,
    reasoning_stripped,
    effort_flag,
    user_in_front,
)
CLEAN = (clean_questions, clean_conversations)


def write(pattern: Pattern, path: Path, t0: float = 1_764_100_000.0) -> Path:
    rows = [
        {
            "custom_id": f"r{n}",
            "t0": t0 + n,
            "t1": t0 + n + 0.5,
            "body": {"model": "m", "max_tokens": 8, **body},
        }
        for n, body in enumerate(pattern.bodies)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
