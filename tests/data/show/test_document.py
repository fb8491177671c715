"""One Document drawn three times: what each form must have, and what text from outside cannot do."""

from __future__ import annotations

import re

import pytest

from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.data.show.parts import Banner, Document, Section, grid
from kvtune.data.show.screen import WIDTH, document_lines

COMMAND = "kvtune recipe verify " + "a" * 150
DOCUMENT = Document(
    name="kvtune capacity",
    subject="tiny-llama",
    headline="6 sessions at once",
    sections=(
        Section(
            "curve",
            "How many fit",
            facts=(("pool", "33,379 blocks of 16 tokens, " + "with more words than a line has, " * 5),),
            tables=(
                grid(("sessions", "kept", "twice"), [(6, "95 %", "–"), (10, "74 %", "")]),
                grid(("none",), []),
            ),
            notes=("The limit is the pool.",),
            commands=(COMMAND,),
        ),
        Section("empty", "Nothing to say", tables=(grid(("none",), []),)),
    ),
    identity="capacity 0123456789abcdef",
    title="tiny-llama · sessions",
    banners=(Banner("warn", "Times", "are not known"),),
    closing="21 replays",
)


def drawn(document: Document) -> str:
    return "\n".join(document_lines(document))


@pytest.mark.parametrize("draw", [drawn, markdown, document_page])
def test_each_form_has_all_that_is_said_and_no_empty_column(draw) -> None:  # type: ignore[no-untyped-def]
    text = draw(DOCUMENT)
    for words in (
        "6 sessions at once",
        "Times",
        "How many fit",
        "33,379",
        "95 %",
        "The limit is the pool.",
        COMMAND,
    ):
        assert words in re.sub("<[^>]*>", "", text)
    assert "twice" not in text.partition("<script")[0]


def test_a_terminals_answer_begins_with_the_headline_folds_words_and_never_a_command() -> None:
    lines = drawn(DOCUMENT).splitlines()
    assert lines[0] == "6 sessions at once" and lines[-1] == "21 replays"
    assert "Nothing to say" not in lines
    assert all(len(line) <= WIDTH for line in lines if COMMAND not in line)
    assert f"  {COMMAND}" in lines


def test_a_table_in_markdown_has_one_line_a_row() -> None:
    table = grid(("sessions", "a|b"), [(6, "x|y\n# z")])
    text = markdown(Document("c", "s", "h", (Section("t", "T", tables=(table,)),), "i"))
    assert text.splitlines()[-3:] == ["| sessions | a\\|b |", "| ---: | --- |", "| 6 | x\\|y \\# z |"]


def test_text_from_outside_steers_no_form() -> None:
    hostile = "\x1b[31m\n# big <script>alert(1)</script> [a](http://x) \u202egnp"
    document = Document("c", hostile, hostile, (Section("t", hostile, notes=(hostile,)),), "capacity 00")
    assert "\x1b" not in drawn(document) and "\u202e" not in drawn(document)
    assert not any(line.startswith(("# big", "<script")) for line in markdown(document).splitlines())
    assert "<script>alert" not in document_page(document) and "\x1b" not in document_page(document)
