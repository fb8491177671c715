"""What answers of the four APIs report, plain and streamed; a wrong answer reports nothing and raises nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtune.servers.tap.answers import EVENTS, Answer, read_answer

CHAT = {"prompt_tokens": 50, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}}
RESPONSES = {"input_tokens": 50, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 32}}
MESSAGES = {
    "input_tokens": 2,
    "output_tokens": 5,
    "cache_read_input_tokens": 32,
    "cache_creation_input_tokens": 16,
}
PLAIN: dict[str, Any] = {
    "chat": {"usage": CHAT},
    "responses": {"object": "response", "usage": RESPONSES},
    "messages": {"type": "message", "usage": MESSAGES},
}
STREAMED: dict[str, list[Any]] = {
    "chat": [{"choices": [{"delta": {}}]}, {"choices": [], "usage": CHAT}],
    "responses": [{"type": "response.created", "response": {}}, {"response": {"usage": RESPONSES}}],
    "messages": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 0}}},
        {"type": "message_delta", "usage": MESSAGES},
    ],
}


def stream(*events: Any) -> bytes:
    return (
        b"".join(b"event: x\ndata: %s\n\n" % json.dumps(event).encode() for event in events)
        + b"data: [DONE]\n\n"
    )


@pytest.mark.parametrize("api", PLAIN)
def test_tokens_and_hits_are_read_plain_and_streamed(api: str) -> None:
    expected = Answer(50, 5, 32, (), [])
    assert read_answer(json.dumps(PLAIN[api]).encode(), "application/json") == expected
    assert read_answer(stream(*STREAMED[api]), f"{EVENTS}; charset=utf-8") == expected


def test_anthropics_input_tokens_are_the_whole_prompt_where_the_server_reports_no_hits() -> None:
    usage = {"usage": {"input_tokens": 50, "output_tokens": 5, "cache_read_input_tokens": None}}
    assert read_answer(json.dumps(usage).encode(), "application/json") == Answer(50, 5, -1, (), [])


def test_token_ids_are_read_where_the_client_asked_for_them() -> None:
    plain = {
        "prompt_token_ids": [1, 2],
        "choices": [{"index": 0, "token_ids": [3]}, {"index": 1, "token_ids": [4]}],
    }
    read = read_answer(json.dumps(plain).encode(), "application/json", choices=2)
    assert (read.prompts, read.answer) == (([1, 2],), [3])
    parts = [
        {"prompt_token_ids": [1, 2], "choices": []},
        *({"choices": [{"index": 0, "token_ids": [n]}]} for n in (3, 4)),
    ]
    read = read_answer(stream(*parts), EVENTS)
    assert (read.prompts, read.answer) == (([1, 2],), [3, 4])
    several = {"choices": [{"index": n, "prompt_token_ids": [n // 2], "token_ids": [9]} for n in range(4)]}
    assert read_answer(json.dumps(several).encode(), "application/json", choices=2).prompts == ([0], [1])


def test_an_error_is_read_in_each_form() -> None:
    for error in ({"error": {"message": "no"}}, {"error": "no"}, {"object": "error", "message": "no"}):
        assert read_answer(json.dumps(error).encode(), "application/json").error == "no"
