"""Texts with questions: every answer stands in its text once, and neighbours never share a text."""

from __future__ import annotations

from kvtune.workload.reading import questions


def test_every_answer_stands_in_its_text_and_is_not_told_by_the_examples() -> None:
    for one in questions():
        text, _, asked = one.prompt.rpartition("Question: Where does ")
        name = asked.split(" live?")[0]
        lines = [line for line in text.splitlines() if line.startswith(f"{name} is a ")]
        assert len(lines) == 1 and lines[0].endswith(f"lives in {one.answer}.")
        assert f"Where does {name} live?" not in text


def test_texts_take_turns_and_share_their_beginning() -> None:
    found = questions(texts=3, per_text=2)
    assert [q.text for q in found] == [0, 1, 2, 0, 1, 2]
    for a, b in zip(found[:3], found[3:], strict=True):
        shared = a.prompt.rpartition("Question:")[0]
        assert b.prompt.startswith(shared) and a.prompt != b.prompt
    assert len({q.prompt.partition("Question:")[0] for q in found}) == 3


def test_the_same_seed_asks_the_same() -> None:
    assert questions(seed=4) == questions(seed=4) != questions(seed=5)
