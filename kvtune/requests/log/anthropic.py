"""Turns a body of /v1/messages into one of /v1/chat/completions, as vLLM does before it renders it. Pure.

What vLLM's own conversion leaves out is left out here, too. A block that is not text, and a tool that only Anthropic's
servers have, is a UsageError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtune.base.errors import UsageError
from kvtune.requests.log.bodies import CHAT, LOG_IDS, NAME_API, Body, known_only, shown

BILLING = "x-anthropic-billing-header"
"""A system block that begins with this is left out: it changes with each request."""
EFFORT_IF_DISABLED = "none"
TEXT_BLOCK = ("type", "text", "cache_control", "citations")
KNOWN_IN_BLOCKS = {
    "text": TEXT_BLOCK,
    "thinking": ("type", "thinking", "signature", "cache_control"),
    "redacted_thinking": ("type", "data", "cache_control"),
    "tool_use": ("type", "id", "name", "input", "caller", "cache_control"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
    "tool_addition": ("type", "tool", "cache_control"),
    "tool_removal": ("type", "tool", "cache_control"),
}
"""Types of blocks -> their fields. vLLM ignores `cache_control`, `citations`, `signature`, `is_error` and `caller`."""
IN_TOOL = ("name", "description", "input_schema", "strict", "defer_loading", "type", "cache_control")
"""Fields of a tool. `type` is that of a tool of the client's, "custom"."""

Message = dict[str, Any]


def as_chat(body: Body, *, merge: bool = False, disabled: str = EFFORT_IF_DISABLED) -> Body:
    """Return the body for the chat API. `merge`: system messages between the others move into the first one.

    `disabled`: the reasoning effort that stands for disabled thinking.
    """
    fields = body.fields
    messages: list[Message] = []
    system = [*_texts(fields.get("system"))]
    if merge:
        system += [
            text for message in _given(fields) if message["role"] == "system" for text in _inline(message)
        ]
    if system:
        messages.append({"role": "system", "content": "".join(system)})
    for message in _given(fields):
        if message["role"] != "system":
            messages += _converted(message)
        elif not merge:
            messages += [{"role": "system", "content": text} for text in _inline(message)]
    chat: dict[str, Any] = {"messages": messages, "tools": _tools(fields)}
    thinking, config = fields.get("thinking"), fields.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        chat["reasoning_effort"] = disabled
    if (flags := fields.get("chat_template_kwargs")) is not None:
        chat["chat_template_kwargs"] = flags
    return Body(CHAT, chat)


def moved(body: Body) -> tuple[int, ...]:
    """Return which messages are system messages between the others: their numbers in the client's body."""
    return tuple(
        number
        for number, message in enumerate(_given(body.fields))
        if message["role"] == "system" and _inline(message)
    )


def _given(fields: Mapping[str, Any]) -> list[Message]:
    given = fields.get("messages")
    for message in given if isinstance(given, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError("has a message without a role", 'a message is {"role": .., "content": ..}')
        if message["role"] not in ("user", "assistant", "system"):
            raise UsageError(
                f"has a {shown(message['role'])} message in a body of /v1/messages",
                NAME_API,
            )
        known_only(message, ("role", "content", "id"), f"a {message['role']} message")
    return given if isinstance(given, list) else []


def _texts(system: object) -> list[str]:
    """Return the texts of a system prompt, without the blocks that vLLM leaves out."""
    if isinstance(system, str):
        return [system] if system else []
    return [text for text in _of_blocks(system, "system") if not text.startswith(BILLING)]


def _inline(message: Message) -> list[str]:
    """Return the text of a system message between the others; nothing if vLLM leaves it out."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else _of_blocks(content, "system")
    text = "".join(text for text in texts if not text.startswith(BILLING))
    return [text] if text else []


def _of_blocks(content: object, role: str) -> list[str]:
    texts = []
    for block in _blocks(content, role):
        if block["type"] == "text":
            texts += [block["text"]] if block.get("text") else []
        elif block["type"] not in ("tool_addition", "tool_removal"):
            raise UsageError(
                f"has {shown(block['type'])} in a {role} message: only text can be rendered", LOG_IDS
            )
    return texts


def _blocks(content: object, role: str) -> list[dict[str, Any]]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise UsageError(f"has a {role} message whose content is no text", LOG_IDS)
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise UsageError(f"has a part in a {role} message that is no text", LOG_IDS)
        if kind not in KNOWN_IN_BLOCKS:
            raise UsageError(f"has {shown(kind)} in a {role} message: only text can be rendered", LOG_IDS)
        known_only(block, KNOWN_IN_BLOCKS[kind], f"{kind} of a {role} message")
        if kind in ("text", "thinking") and not isinstance(block.get(kind), (str, type(None))):
            raise UsageError(f"has a part in a {role} message that is no text", LOG_IDS)
    return content


def _converted(message: Message) -> list[Message]:
    """Return the messages that vLLM makes of one: results of tools first."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    parts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in _blocks(content, role):
        kind = block["type"]
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "thinking" and block.get("thinking") is not None:
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            called = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id") or "call", "type": "function", "function": called})
        elif kind == "tool_result" and role == "user":
            text, call = _result(block.get("content")), block.get("tool_use_id") or ""
            results.append({"role": "tool", "tool_call_id": call, "content": text})
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
    made: Message = {"role": role}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if parts:
        made["content"] = parts[0]["text"] if len(parts) == 1 else parts
    return results if role == "user" and not parts else [*results, made]


def _result(content: object) -> str:
    """Return the text of a tool's result: that of its blocks, a line each."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text", ""), str):
            raise UsageError(f"has {shown(kind)} in a tool's result: only text can be rendered", LOG_IDS)
        known_only(block, TEXT_BLOCK, "a tool's result")
        texts.append(block.get("text", ""))
    return "\n".join(texts)


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools at the end of the conversation, which may add some and remove some."""
    given = fields.get("tools")
    changes = [
        block
        for message in _given(fields)
        if isinstance(message.get("content"), list)
        for block in _blocks(message["content"], message["role"])
        if block["type"] in ("tool_addition", "tool_removal")
    ]
    if given is None and not changes:
        return None
    listed = [_tool(tool) for tool in given or ()]
    tools = {tool["name"]: tool for tool in listed}
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict) or change.get("type") not in ("tool_reference", "tool_definition"):
            raise UsageError(f"has a {block['type']} that names no tool", LOG_IDS)
        if change["type"] == "tool_definition":
            tool = _tool(change.get("definition"))
            tools[name := tool["name"]] = tool
        else:
            name = str(change.get("name"))
            if name not in tools:
                raise UsageError(
                    f"has a {block['type']} of {shown(name)}, which is none of its tools", LOG_IDS
                )
            if block["type"] == "tool_addition":
                tools[name] = {key: value for key, value in tools[name].items() if key != "defer_loading"}
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    kept = [tool for name, tool in tools.items() if name not in removed] if changes else listed
    return [{"type": "function", "function": tool} for tool in kept]


def _tool(given: object) -> dict[str, Any]:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise UsageError("has a tool without a name", LOG_IDS)
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise UsageError(
            f"has the tool {shown(given['name'])} without an input_schema: vLLM has no tools of the server",
            "vLLM refuses it, too: leave it out",
        )
    known_only(given, IN_TOOL, f"the tool {shown(given['name'])}")
    function = {"name": given["name"], "description": given.get("description")}
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return function | {key: given[key] for key in ("strict", "defer_loading") if given.get(key) is not None}
