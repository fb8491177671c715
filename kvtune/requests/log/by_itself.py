"""What a server does to a prompt by itself, as notes: today's date, a moved reminder, a default system prompt, a flag.

No client's body shows it, and yet it may be what breaks a prefix.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import cached_property
from typing import Any

from kvtune.base.errors import UsageError
from kvtune.requests.log.anthropic import moved
from kvtune.requests.log.bodies import (
    DATE,
    DEFAULT_SYSTEM,
    MESSAGES,
    REASONING,
    REMINDER,
    RESPONSES,
    Body,
    Note,
    shown,
)

DATED = "strftime_now"
"""The function by which a template writes today's date."""
FLAGS = ("reasoning_effort", "enable_thinking", "thinking")
ASKED = {"role": "user", "content": "ZQ7"}
GIVEN = {"role": "system", "content": "XK4"}
LEAST_WORDS = 3


def clock(sent: float) -> Callable[[str], str]:
    """Return a template's `strftime_now` for a request that was sent at this time, in this machine's time zone."""
    return datetime.datetime.fromtimestamp(sent).strftime


class ByItself:
    """`template`: the chat template, or "". `merge`: the server moves system messages in front.

    `text_of`: renders messages; UsageError if they are refused. `dated`: who writes the date, if not the template.
    """

    def __init__(
        self, template: str, merge: bool, text_of: Callable[[list[dict[str, Any]]], str], dated: str = ""
    ) -> None:
        self._template = template
        self._merge = merge
        self._text_of = text_of
        self._dated = dated or ("the chat template" if DATED in template else "")

    def notes(self, body: Body) -> tuple[Note, ...]:
        """Return what the server did to the prompt of this body of a chat."""
        notes = [Note(DATE, self._dated)] if self._dated else []
        if self._merge and body.api == MESSAGES:
            notes += [Note(REMINDER, f"messages[{number}]") for number in moved(body)]
        if not _has_system(body) and self._has_default:
            notes.append(Note(DEFAULT_SYSTEM, "the chat template"))
        return (*notes, *(Note(REASONING, flag) for flag in self._flags(body)))

    def _flags(self, body: Body) -> list[str]:
        given = {**(body.fields.get("chat_template_kwargs") or {})}
        for name in ("reasoning", "output_config"):
            held = body.fields.get(name)
            given |= (
                {"reasoning_effort": held["effort"]} if isinstance(held, dict) and held.get("effort") else {}
            )
        given |= {name: body.fields[name] for name in FLAGS[:1] if body.fields.get(name) is not None}
        thinking = body.fields.get("thinking")
        if isinstance(thinking, dict) and thinking.get("type") == "disabled":
            given["reasoning_effort"] = "none"
        return [f"{name}={shown(given[name])}" for name in FLAGS if name in given]

    @cached_property
    def _has_default(self) -> bool:
        """Whether a prompt without a system message has text that one with a system message lacks."""
        try:
            bare, given = (
                self._text_of(messages).partition("ZQ7")[0] for messages in ([ASKED], [GIVEN, ASKED])
            )
        except UsageError:
            return False
        start = _agreeing(bare, given)
        end = _agreeing(bare[start:][::-1], given[start:][::-1])
        return len(bare[start : len(bare) - end].split()) >= LEAST_WORDS


def _agreeing(first: str, other: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),
    )


def _has_system(body: Body) -> bool:
    if body.fields.get("system") or body.fields.get("instructions"):
        return True
    messages = body.fields.get("input" if body.api == RESPONSES else "messages")
    roles = (
        [message.get("role") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    return any(role in ("system", "developer") for role in roles)
