"""Texts with questions: every answer stands in its text, far from its end, and neighbours never share a text."""

from __future__ import annotations

from kvtune.evidence.reading import CAPITALS, questions


def test_every_answer_stands_near_the_beginning_of_its_text() -> None:
    for one in questions():
        text, _, asked = one.prompt.rpartition("Country: ")
        country = asked.removesuffix("\nCapital:")
        at = text.index(f"Country: {country}\nCapital: {one.answer}\n")
        assert at < len(text) / 3 and CAPITALS[country] == one.answer
        assert text.count("Country: ") == len(CAPITALS)


def test_texts_take_turns_and_share_their_beginning() -> None:
    drawn = questions(texts=3, per_text=2)
    assert [q.text for q in drawn] == [0, 1, 2, 0, 1, 2]
    texts = [q.prompt.rpartition("Country:")[0] for q in drawn]
    assert texts[:3] == texts[3:] and len(set(texts)) == 3
    assert len({q.prompt for q in drawn}) == 6


def test_the_same_seed_asks_the_same() -> None:
    assert questions(seed=4) == questions(seed=4) != questions(seed=5)
