"""Texts with questions whose answers stand in them, for a small model with real weights. Pure, seeded.

Each text lists countries with their capitals in an order of its own, and is longer than a sliding window; a question
asks for one that stands near its beginning. Texts are asked about in turn, so that a small pool has to give blocks up
between two questions on the same text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

PAIRS = """
Albania:Tirana Argentina:Buenos-Aires Australia:Canberra Austria:Vienna Belgium:Brussels Bolivia:La-Paz Brazil:Brasilia
Bulgaria:Sofia Canada:Ottawa Chile:Santiago China:Beijing Colombia:Bogota Croatia:Zagreb Cuba:Havana Cyprus:Nicosia
Denmark:Copenhagen Ecuador:Quito Egypt:Cairo Estonia:Tallinn Ethiopia:Addis-Ababa Finland:Helsinki France:Paris
Georgia:Tbilisi Germany:Berlin Ghana:Accra Greece:Athens Hungary:Budapest Iceland:Reykjavik India:New-Delhi
Indonesia:Jakarta Iran:Tehran Iraq:Baghdad Ireland:Dublin Israel:Jerusalem Italy:Rome Jamaica:Kingston Japan:Tokyo
Jordan:Amman Kenya:Nairobi Latvia:Riga Lebanon:Beirut Libya:Tripoli Lithuania:Vilnius Malaysia:Kuala-Lumpur
Malta:Valletta Morocco:Rabat Nepal:Kathmandu Netherlands:Amsterdam Nigeria:Abuja Norway:Oslo Pakistan:Islamabad
Peru:Lima Philippines:Manila Poland:Warsaw Portugal:Lisbon Romania:Bucharest Russia:Moscow Senegal:Dakar
Serbia:Belgrade Slovakia:Bratislava Slovenia:Ljubljana Spain:Madrid Sweden:Stockholm Switzerland:Bern Syria:Damascus
Thailand:Bangkok Tunisia:Tunis Turkey:Ankara Ukraine:Kyiv Uruguay:Montevideo Venezuela:Caracas Vietnam:Hanoi
"""
CAPITALS = {country: city.replace("-", " ") for country, _, city in (p.partition(":") for p in PAIRS.split())}


@dataclass(frozen=True, slots=True)
class Question:
    """`prompt` ends where the answer begins; `answer` is what stands in the text."""

    text: int
    prompt: str
    answer: str


def questions(texts: int = 4, per_text: int = 3, seed: int = 0) -> list[Question]:
    """One question of each text, then the next of each: neighbours never share a text."""
    draw = random.Random(seed)
    by_text: list[list[Question]] = []
    for number in range(texts):
        countries = draw.sample(sorted(CAPITALS), len(CAPITALS))
        text = "".join(f"Country: {c}\nCapital: {CAPITALS[c]}\n\n" for c in countries)
        chosen = draw.sample(countries[: len(countries) // 4], per_text)
        by_text.append([Question(number, f"{text}Country: {c}\nCapital:", CAPITALS[c]) for c in chosen])
    return [of_text[turn] for turn in range(per_text) for of_text in by_text]
