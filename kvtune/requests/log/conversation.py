"""Turns a body of the chat, responses or messages API into a chat template's input. Pure.

The input (messages, tools, flags) is the one that vLLM makes: arguments of tool calls become objects, and fields that
no template gets are left out. A part that is not text is a UsageError that names the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtune.base.bounded import decode_json
from kvtune.base.errors import UsageError
from kvtune.requests.log import anthropic
from kvtune.requests.log.bodies import (
    CHAT,
    LOG_IDS,
    MESSAGES,
    Body,
    known_only,
    names_in,
    refuse_elsewhere,
    shown,
)

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of content parts that are text -> the field with the text."""
IN_MESSAGE = names_in(
    "role content name tool_calls tool_call_id reasoning reasoning_content task tools "
    "id type status phase refusal annotations cache_control provider_specific_fields"
)
"""Fields of a message or an item: those that a template gets, and those that vLLM leaves out."""
IN_PART = ("type", "cache_control", "annotations", "citations", "logprobs", "prompt_cache_breakpoint")
"""Fields of a part beside its text, none of which a template reads."""

REASONING = ("reasoning", "reasoning_content")
"""What a turn's reasoning is called: by vLLM, and by clients and templates that are older. A template gets both."""
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat template's input. Each message's `content` is a list of text parts. `flags`: the template's variables."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    flags: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Server:
    """What a server does to bodies of /v1/messages by itself: see `anthropic.as_chat`."""

    merge: bool = False
    disabled: str = anthropic.EFFORT_IF_DISABLED


def as_chat(body: Body, server: Server = Server()) -> Mapping[str, Any]:
    """Return the fields for /v1/chat/completions that render to the same text. `body.is_chat` must hold.

    A message's `reasoning_content` becomes `reasoning`.
    """
    refuse_elsewhere(body)
    if body.api == MESSAGES:
        return anthropic.as_chat(body, merge=server.merge, disabled=server.disabled).fields
    given = body.fields
    if body.api == CHAT:
        if not isinstance(given.get("messages"), list):
            raise UsageError("has no `messages`", "a body of /v1/chat/completions has a list of them")
        return {**given, "messages": [_with_reasoning(message) for message in given["messages"]]}
    if not isinstance(given.get("input"), (str, list)):
        raise UsageError("has no `input`", "a body of /v1/responses has text or a list of items")
    reasoning, partial = given.get("reasoning"), _is_partial(given["input"])
    return {
        **given,
        "messages": _of_items(given),
        "tools": _flat(given.get("tools")),
        "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        "add_generation_prompt": not partial,
        "continue_final_message": partial,
    }


def template_flags(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables, except the two that decide how the prompt ends (see `conversation`)."""
    given, effort = chat.get("chat_template_kwargs"), chat.get("reasoning_effort")
    flags = {"documents": chat.get("documents"), "reasoning_effort": effort}
    given_flags = {name: value for name, value in flags.items() if value is not None}
    thinking = {"enable_thinking": effort != "none"} if effort is not None else {}
    return {**thinking, **(given if isinstance(given, dict) else {}), **given_flags}


def conversation(body: Body, server: Server = Server()) -> Conversation:
    """Return the template's input for a body. `body.is_chat` must hold."""
    chat = as_chat(body, server)
    flags = template_flags(chat) | {"add_generation_prompt": chat.get("add_generation_prompt", True)}
    if chat.get("continue_final_message") is not None:
        flags["continue_final_message"] = chat["continue_final_message"]
    return Conversation([_message(message) for message in chat["messages"]], _tools(chat.get("tools")), flags)


def _with_reasoning(message: Any) -> Any:
    """Return a message whose reasoning has vLLM's name alone."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    given = next(message[name] for name in REASONING if message.get(name) is not None)
    return {name: value for name, value in message.items() if name not in REASONING} | {"reasoning": given}


def _message(given: object) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise UsageError("has a message without a role", 'a message is {"role": .., "content": ..}')
    role = given["role"]
    known_only(given, IN_MESSAGE, f"a {shown(role)} message")
    message: Message = {"role": role, "content": _parts(given.get("content"), role)}
    calls, reasoning = given.get("tool_calls"), given.get("reasoning")
    if role == "assistant" and isinstance(calls, list) and calls:
        message["tool_calls"] = [_call(call) for call in calls]
    if role == "assistant" and reasoning is not None:
        message |= dict.fromkeys(REASONING, reasoning)
    if role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    if role == "developer":
        message["tools"] = given.get("tools")
    return message | {name: given[name] for name in ("name", "task") if isinstance(given.get(name), str)}


def _parts(content: object, role: str) -> list[dict[str, str]]:
    if content is None:
        return []
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise UsageError(f"has a {shown(role)} message whose content is no text", LOG_IDS)
    texts = []
    for part in parts:
        text = part
        if isinstance(part, dict):
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in TEXTS:
                named = shown(kind if isinstance(kind, str) else next(iter(part), "nothing"))
                raise UsageError(
                    f"has {named} in a {shown(role)} message: only text can be rendered", LOG_IDS
                )
            known_only(part, (*IN_PART, TEXTS[kind]), f"{kind} of a {shown(role)} message")
            text = part.get(TEXTS[kind])
            if text is None:
                continue
        if not isinstance(text, str):
            raise UsageError(f"has a part in a {shown(role)} message that is no text", LOG_IDS)
        if role != "system" or not text.startswith(anthropic.BILLING):
            texts.append(text)
        elif rest := text.partition("\n")[2]:  # /v1/chat/completions leaves out the line alone
            texts.append(rest)
    return [{"type": "text", "text": text} for text in texts]


def _call(given: object) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        raise UsageError("has a tool call that names no function", LOG_IDS)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments)
        except ValueError:
            arguments = {}
    return {**given, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tools(given: object) -> list[dict[str, Any]] | None:
    """Return the tools, each with the fields of vLLM's class of a tool, in the order of that class."""
    if not isinstance(given, list):
        return None
    tools = []
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise UsageError("has a tool that is no function", LOG_IDS)
        fields = {name: function.get(name) for name in ("name", "description", "parameters")}
        fields |= {
            name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None
        }
        tools.append({"type": "function", "function": fields})
    return tools


def _flat(tools: object) -> list[dict[str, Any]] | None:
    """Return the responses API's tools in the chat API's form: functions only, as the model sees no other tools."""
    functions = [t for t in tools if isinstance(t, dict)] if isinstance(tools, list) else []
    return [
        {"type": "function", "function": tool} for tool in functions if tool.get("type") == "function"
    ] or None


def _of_items(body: Mapping[str, Any]) -> list[Message]:
    instructions, given = body.get("instructions"), body["input"]
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        message = _of_item(item)
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        # Several items (reasoning, text, calls) may make up one turn of the assistant.
        if message["role"] != "assistant" or not last:
            messages.append(message)
        elif "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        elif all(last.get(name) is None for name in message if name != "role"):
            last.update(message)
        else:
            messages.append(message)
    return messages


def _of_item(item: object) -> Message:
    if not isinstance(item, dict):
        raise UsageError("has an input item that is no object", LOG_IDS)
    kind, content = item.get("type", "message"), item.get("content")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning" and not item.get("encrypted_content"):
        thoughts = content or item.get("summary") or [{}]
        text = (
            thoughts[0].get("text") if isinstance(thoughts, list) and isinstance(thoughts[0], dict) else None
        )
        return {"role": "assistant", "reasoning": text or ""}
    if kind == "message" and isinstance(item.get("role"), str):
        if item["role"] == "assistant":
            return {"role": "assistant", "content": content[:1] if isinstance(content, list) else content}
        return item
    raise UsageError(f"has an input item of type {shown(kind)}, which cannot be rendered", LOG_IDS)


def _is_partial(given: object) -> bool:
    last = given[-1] if isinstance(given, list) and given else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in ("in_progress", "incomplete")
    )
