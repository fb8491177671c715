"""Texts with questions whose answers stand in them, for a model with real weights. Pure, seeded.

Each text is a register of people with a town and a number: nothing that a model can know but by reading. The texts
are long enough that a sliding window does not reach their beginning, and are asked about in turn, so that a small
pool has to give blocks up between two questions on the same text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Alice Bruno Clara David Elena Felix Greta Henry Irene Jonas Karin Louis Maria Nadia Oscar Paula Quinn Rosa Simon "
    "Tanja Urban Vera Walter Xenia Yusuf Zelda Anton Bella Carlo Diana Emil Flora Georg Hanna Igor Julia"
)
FAMILIES = _words(
    "Adler Brown Costa Diaz Evans Fischer Garcia Hill Ivanov Jensen Keller Lopez Meyer Novak Olsen"
)
TOWNS = _words(
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Warsaw Cairo Tokyo Lima"
)
JOBS = _words("teacher doctor baker farmer pilot painter lawyer nurse singer writer driver judge")


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` ends where the answer begins; `answer` is the word that stands in the text."""

    text: int
    prompt: str
    answer: str


def questions(texts: int = 6, per_text: int = 4, people: int = 80, seed: int = 0) -> list[Question]:
    """One question of each text, then the next of each: neighbours never share a text."""
    draw = random.Random(seed)
    found: list[list[Question]] = []
    for number in range(texts):
        names = draw.sample([f"{name} {family}" for name in NAMES for family in FAMILIES], people)
        towns = [draw.choice(TOWNS) for _ in names]
        jobs = [draw.choice(JOBS) for _ in names]
        lines = [f"{n} is a {j} and lives in {t}." for n, t, j in zip(names, towns, jobs, strict=True)]
        text = f"Register number {number}.\n" + "\n".join(lines) + "\n"
        asked = draw.sample(range(people), per_text + 2)
        shown = "".join(f"Question: Where does {names[i]} live?\nAnswer: {towns[i]}\n" for i in asked[:2])
        found.append(
            [
                Question(number, f"{text}{shown}Question: Where does {names[i]} live?\nAnswer:", towns[i])
                for i in asked[2:]
            ]
        )
    return [of_text[turn] for turn in range(per_text) for of_text in found]
