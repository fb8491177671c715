"""What a server does to prompts by itself: in a note of each prompt, and in the answer about the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.requests.log.bodies import DATE, DEFAULT_SYSTEM, REASONING, REMINDER, Rendered, body_of
from kvtune.requests.log.rendering import Rendering
from tests.simulator import run as kvtune
from tests.tokenizers import OneChild, make_tokenizer

pytest.importorskip("transformers")

ASKED = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "Be brief."}
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GUARD = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('x') }}{% endif %}"
ONCE = "{% for m in messages %}" + GUARD + "{% endfor %}"
DEFAULT = "{% if messages[0].role != 'system' %}<system>You are a very helpful assistant.{% endif %}"
DAY = 86_400.0


def rendered(by: Rendering, sent: float | None = None, **body: Any) -> tuple[str, list[tuple[str, str]]]:
    (one,) = by.render([body_of(body, sent=sent)])
    assert isinstance(one, Rendered)
    return by.text(one.ids), [tuple(note) for note in one.notes]


@pytest.mark.full
def test_a_date_is_that_of_the_day_on_which_the_request_was_sent(tmp_path: Path, child: OneChild) -> None:
    by = child.load(make_tokenizer(tmp_path / "dated", text="{{ strftime_now('%d %b %Y') }}" + TURNS))
    first, noted = rendered(by, 1.75e9, messages=[ASKED])
    next_day, _ = rendered(by, 1.75e9 + DAY, messages=[ASKED])
    again, _ = rendered(by, 1.75e9 + 1, messages=[ASKED])
    assert first == again != next_day and "2025" in first
    assert noted == [(DATE, "the chat template")]


def test_a_moved_reminder_a_default_system_prompt_and_a_flag_are_noted(
    tmp_path: Path, child: OneChild
) -> None:
    by = child.load(make_tokenizer(tmp_path / "once", text=DEFAULT + ONCE + TURNS))
    turns = [ASKED, {"role": "assistant", "content": "Yo"}, {"role": "system", "content": "5 left"}, ASKED]
    text, noted = rendered(by, system="Be brief.", messages=turns)
    assert text.startswith("<system>Be brief.5 left<user>") and noted == [(REMINDER, "messages[2]")]
    assert rendered(by, messages=[BRIEF, ASKED])[1] == []
    assert rendered(by, messages=[ASKED])[1] == [(DEFAULT_SYSTEM, "the chat template")]
    assert rendered(by, input="Hi", instructions="Be brief.", reasoning={"effort": "low"})[1] == [
        (REASONING, "reasoning_effort=low")
    ]
    plain = child.load(make_tokenizer(tmp_path / "plain", text=TURNS))
    assert rendered(plain, system="Be brief.", messages=turns)[1] == []
    assert rendered(plain, messages=[ASKED])[1] == []


@pytest.mark.full
def test_the_answer_names_what_rendered_and_what_the_server_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, log = make_tokenizer(tmp_path / "once", text=ONCE + TURNS), tmp_path / "log.jsonl"
    turns: list[dict[str, str]] = []
    with log.open("w") as file:
        for left in (9, 8, 7):
            turns += [ASKED, {"role": "system", "content": f"{left} tokens left"}]
            file.write(
                json.dumps({"url": "/v1/messages", "body": {"system": "Be brief.", "messages": turns}}) + "\n"
            )
    words = ["explain-log", f"{log},tokenizer={made}", "--bounds-only"]
    assert kvtune(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Its text was rendered by the chat template, without vLLM." in said
    assert "The server itself, in 3 prompts: it moves system messages" in said
    assert kvtune([*words, "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert texts["rendered_by"] and texts["by_server"] == [{"kind": REMINDER, "requests": 3}]
