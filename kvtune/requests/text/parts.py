"""Cuts a prompt into parts: system text, each tool, and each message's text, reasoning, calls and results. Pure.

A prompt is a request's body (Anthropic's messages, OpenAI's chat, completions and responses), or its rendered text, in
which the marks of chat templates tell the roles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, cast

from kvtune.base.bounded import Scan

What = Literal["text", "reasoning", "call", "result", "tool", "flag"]
FLAGS = ("reasoning_effort", "thinking", "output_config", "chat_template_kwargs")
"""Fields of a body that a chat template writes into the prompt."""
LONGEST_ODD = 2000
"""Characters of a part that is no text, such as an image, that are compared."""


@dataclass(frozen=True, slots=True)
class Part:
    """`place`: where it is, e.g. "messages[3]". `start`: in a rendered prompt; `line`: in its message."""

    place: str
    role: str
    what: What
    text: str
    start: int = 0
    line: int = 1


def of_body(body: Mapping[str, Any]) -> list[Part]:
    """Return the parts in the order in which chat templates write them: flags, system, tools, messages."""
    flags = [Part(name, "flag", "flag", _json(body[name])) for name in FLAGS if body.get(name) is not None]
    system = [
        Part(f"system[{number}]", "system", what, text)
        for number, (what, text) in enumerate(_texts(body.get("system") or body.get("instructions")))
    ]
    tools = [_tool(tool) for tool in _list(body.get("tools")) if isinstance(tool, dict)]
    messages: list[Part] = []
    for number, message in enumerate(_messages(body)):
        messages += _message(number, message)
    leading = 0
    while leading < len(messages) and messages[leading].role in ("system", "developer"):
        leading += 1
    return [*flags, *system, *messages[:leading], *tools, *messages[leading:]]


def _messages(body: Mapping[str, Any]) -> Sequence[Any]:
    for name in ("messages", "input"):
        if isinstance(body.get(name), list):
            return _list(body[name])
    given = body.get("input") or body.get("prompt") or ""
    if isinstance(given, list):
        given = "\n".join(line for line in given if isinstance(line, str))
    return [{"role": "user", "content": given}] if isinstance(given, str) and given else []


def _message(number: int, message: Any) -> list[Part]:
    if not isinstance(message, dict):
        return []
    kind, role = str(message.get("type") or ""), message.get("role")
    role = str(role or {"function_call": "assistant", "reasoning": "assistant"}.get(kind) or "tool")
    texts: list[tuple[What, str]] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        texts.append(("reasoning", reasoning))
    content = message.get("content") if message.get("content") is not None else message.get("output")
    if kind == "reasoning":
        texts += [("reasoning", text) for _, text in _texts(content or message.get("summary"))]
    else:
        texts += [("result" if role == "tool" else what, text) for what, text in _texts(content)]
    for call in _list(message.get("tool_calls")):
        function = call.get("function") if isinstance(call, dict) else None
        texts += [("call", _call(function, "arguments"))] if isinstance(function, dict) else []
    if kind == "function_call":
        texts.append(("call", _call(message, "arguments")))
    several = len(texts) > 1
    parts = [
        Part(f"messages[{number}]" + (f".{nth}" if several else ""), role, what, text)
        for nth, (what, text) in enumerate(texts)
    ]
    return [thought for part in parts for thought in (_thoughts(part) if role == "assistant" else [part])]


def _thoughts(part: Part) -> Iterator[Part]:
    """Yield the parts of an answer whose reasoning stands in its text, as a client sends it back."""
    start = part.text.find(_THINK)
    end = part.text.find(_ENDS["reasoning"], start)
    if part.what != "text" or start < 0 or end < 0:
        yield part
        return
    end += len(_ENDS["reasoning"])
    end += len(part.text[end:]) - len(part.text[end:].lstrip())
    yield from [_cut(part, 0, start)] if start else []
    yield replace(_cut(part, start, end), what="reasoning")
    yield from _thoughts(_cut(part, end, len(part.text))) if end < len(part.text) else []


_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHT = ("thinking", "reasoning", "reasoning_text", "summary_text")


def _texts(content: object) -> Iterator[tuple[What, str]]:
    if isinstance(content, str):
        yield "text", content
    for part in _list(content):
        if isinstance(part, str):
            yield "text", part
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if kind in _TEXT or (kind is None and isinstance(part.get("text"), str)):
            yield "text", str(part.get(_TEXT.get(str(kind), "text")) or "")
        elif kind in _THOUGHT:
            yield "reasoning", str(part.get("thinking") or part.get("text") or "")
        elif kind == "tool_use":
            yield "call", _call(part, "input")
        elif kind == "tool_result":
            yield "result", "\n".join(text for _, text in _texts(part.get("content")))
        else:
            yield "text", _json(part)[:LONGEST_ODD]


def _tool(tool: Mapping[str, Any]) -> Part:
    function = tool.get("function")
    function_fields = function if isinstance(function, dict) else tool
    return Part(
        f"tool {function_fields.get('name') or function_fields.get('type')}",
        "tool",
        "tool",
        _json(function_fields),
    )


def _call(call: Mapping[str, Any], arguments: str) -> str:
    given = call.get(arguments)
    return f"{call.get('name')} {given if isinstance(given, str) else _json(given)}"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


_ROLE = re.compile(
    r"<(?:\|im_start\|>(?P<chatml>\w+)\n?|\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>(?:\n\n)?|"
    r"start_of_turn>(?P<gemma>\w+)\n?|\|start\|>(?P<harmony>\w[\w.]*)(?P<head>[^<]{0,99}(?:<\|(?:channel|constrain)\|>[^<]{0,99})*)<\|message\|>|"
    r"\|im_(?P<kimi>user|assistant|system)\|>(?:[^<]{0,99}<\|im_middle\|>)?|"
    r"\|(?P<bar>system|user|assistant|tool|observation|developer)\|>\n?|"
    r"｜(?P<deepseek>User|Assistant|System)｜>|</?SYS>>)|"
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS)\]"
)
"""The mark of chat templates with which a message begins. All marks begin with one of two characters, which `re` looks
for first; of Mistral's the mark itself is the role."""
_PLAIN = re.compile(r"^(?P<plain>system|developer|tools|user|assistant|tool)\n", re.MULTILINE)
"""Roles in the plain form of messages, which is compared without a tokenizer."""
_ROLES = {
    "model": "assistant",
    "observation": "tool",
    "ipython": "tool",
    "environment": "tool",
    "[INST]": "user",
    "[/INST]": "assistant",
    "[SYSTEM_PROMPT]": "system",
    "[/SYSTEM_PROMPT]": "user",
    "<<SYS>>": "system",
    "<</SYS>>": "user",
    "[AVAILABLE_TOOLS]": "system",
    "[/AVAILABLE_TOOLS]": "user",
    "[TOOL_RESULTS]": "tool",
    "[/TOOL_RESULTS]": "assistant",
    "[TOOL_CALLS]": "assistant",
}
_INSIDE = re.compile(
    r"<(?:(?P<reasoning>think>\n?)|(?P<call>tool_call>\n?)|(?P<result>tool_response>\n?))|"
    r"\{(?<=^\{)(?P<tool>)(?=[^\n]{0,400}\"(?:name|function)\"|\s*\n\s*\"(?:type|name|function)\")",
    re.MULTILINE,
)
"""What is marked inside of a message. A tool is a JSON object at the start of a line."""
_THINK = "<think>"
_ENDS = {"reasoning": "</think>", "call": "</tool_call>", "result": "</tool_response>"}
_TOOL_FIELDS = ("parameters", "description", "input_schema")
_MARKS = re.compile(r"(?:\s|</?[\w|｜▁]{1,40}>)*")


def of_text(text: str) -> list[Part]:
    """Return the parts of a rendered prompt, in order; the marks between them belong to the template."""
    marks = list(_ROLE.finditer(text)) or list(_PLAIN.finditer(text))
    parts: list[Part] = []
    if not marks or marks[0].start():
        end = marks[0].start() if marks else len(text)
        parts += _inside(Part("prompt", "prompt", "text", text[:end]))
    number = 0
    for marker, following in zip_longest(marks, marks[1:]):
        end = following.start() if following else len(text)
        role, what = _role_of(marker)
        place = (
            "tools" if role == "tools" else f"messages[{number}]"
        )  # the plain form has tools before the messages
        number += role != "tools"
        part = Part(place, role, what, text[marker.end() : end], marker.end())
        parts += _inside(part) if what == "text" else [part]
    return parts


def _role_of(marker: re.Match[str]) -> tuple[str, What]:
    named = marker.groupdict()
    head = named.pop("head", None) or ""
    role_name = next((group for group in named.values() if group), None) or marker[0]
    role = _ROLES.get(role_name, role_name.lower().partition(".")[0])
    if "analysis" in head:
        return role, "reasoning"
    if "to=" in head and role == "assistant":
        return role, "call"
    return ("tool", "result") if role in ("tool", "functions") else (role, "text")


def _inside(part: Part) -> Iterator[Part]:
    """Yield the parts of a message: text, and what the template marks inside of it."""
    text, place, scan = part.text, 0, Scan(part.text)
    for match in _INSIDE.finditer(text):
        what, start = cast("What", match.lastgroup), match.start()
        if start < place:
            continue
        name, end = part.place, -1
        if what == "tool":
            name, end = _tool_at(scan, start)
        else:
            end = text.find(_ENDS[what], match.end())
            end = len(text) if end < 0 else end + len(_ENDS[what])
            while what == "reasoning" and text[end : end + 1].isspace():
                end += 1
        if end < 0:
            continue
        yield from _told(_cut(part, place, start))
        yield replace(_cut(part, start, end), what=what, place=name)
        place = end
    yield from [_cut(part, place, len(text))] if not place else _told(_cut(part, place, len(text)))


def _told(part: Part) -> Iterator[Part]:
    """Yield the part, unless it has only marks of a template."""
    if not _MARKS.fullmatch(part.text):
        yield part


def _cut(part: Part, start: int, end: int) -> Part:
    line = part.line + part.text.count("\n", 0, start)
    return replace(part, text=part.text[start:end], start=part.start + start, line=line)


def _tool_at(scan: Scan, start: int) -> tuple[str, int]:
    """Return the place and the end of the tool that begins here; -1: no tool begins here."""
    try:
        value, end = scan.value_at(start)
    except ValueError:
        return "", -1
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not any(name in function for name in _TOOL_FIELDS):
        return "", -1
    return f"tool {function.get('name')}", end
