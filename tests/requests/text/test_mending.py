"""What mending is said to bring is what a client gains that mends its prompts."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

import pytest

from kvtune.answers.explain.log import TextLog, read
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.token_ids import Prefixes, packed
from kvtune.requests.text.decoded import Decoder
from tests.requests.text.logs import rules

BLOCK = 16
PIECE = re.compile(r"<\|\w+\|>| ?[A-Za-z]+| ?\d{1,3}|\s|[^\w\s]|_")


class Words:
    """A tokenizer of words, numbers of three digits, blanks and marks."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def ids(self, text: str) -> list[int]:
        pieces = PIECE.findall(text)
        assert "".join(pieces) == text
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
        return [self._ids[piece] for piece in pieces]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[one] for one in ids)


def rendered(*turns: str) -> str:
    roles = ("system", *("user", "assistant") * len(turns))
    said = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, turns, strict=False)
    )
    return f"{said}<|im_start|>assistant\n"


def headers(draw: random.Random, number: int) -> list[str]:
    return [
        f"Current time: 2026-11-{draw.randrange(10, 29)}T{draw.randrange(10, 24)}:{draw.randrange(10, 60)}:00Z",
        f"Request id: req_{draw.randrange(10**8):08}f3",
        f"user: customer{number}@example.com",
    ]


def of_tenants(draw: random.Random, mends: Sequence[int]) -> Iterable[str]:
    """Three values on top of the prompts of four tenants; `mends`: those that the client moves behind its question."""
    prompts = [rules(draw.randrange(1 << 30), draw.randint(9, 40)) for _ in range(4)]
    for number in range(60):
        lines = headers(draw, number)
        top = [line for at, line in enumerate(lines) if at not in mends]
        moved = [lines[at] for at in mends]
        asked = f"Where is order {draw.randrange(1000)}? {rules(draw.randrange(1 << 30), draw.randint(1, 3))}"
        yield rendered("\n".join([*top, prompts[number % 4]]), "\n".join([asked, *moved]))


def of_conversations(draw: random.Random, mends: Sequence[int]) -> Iterable[str]:
    """Conversations whose system prompt has the time of each turn: mended, the last message has it."""
    for talk in range(8):
        system = rules(draw.randrange(1 << 30), draw.randint(9, 30))
        turns: list[str] = []
        for turn in range(6):
            (time, *_) = headers(draw, talk)
            asked = f"Asked {turn}: {rules(draw.randrange(1 << 30), draw.randint(1, 4))}"
            if mends:
                yield rendered(system, *turns, f"{asked}\n{time}")
            else:
                yield rendered(f"{time}\n{system}", *turns, asked)
            turns += [asked, f"Told {turn}: {rules(draw.randrange(1 << 30), draw.randint(1, 4))}"]


def of_documents(draw: random.Random, mends: Sequence[int]) -> Iterable[str]:
    """Five documents in any order; mended, in the order of the first request."""
    documents = [
        f"<document>\n{rules(draw.randrange(1 << 30), draw.randint(4, 9))}\n</document>" for _ in range(5)
    ]
    for _ in range(20):
        shuffled = draw.sample(documents, len(documents))
        listed = documents if mends else shuffled
        yield rendered("Answer from these.", "\n".join([*listed, rules(draw.randrange(1 << 30), 2)]))


def hit_rate(prompts: Iterable[Sequence[int]]) -> float:
    """The share of tokens that full blocks hit in a cache that keeps everything."""
    known: Prefixes[int] = Prefixes()
    hit = asked = 0
    for prompt in prompts:
        tokens = packed(prompt)
        hit += min(known.longest(tokens)[0], len(prompt) - 1) // BLOCK * BLOCK
        asked += len(prompt)
        known.add(tokens, 0)
    return hit / asked


def logged(prompts: Iterable[list[int]], words: Words) -> TextLog:
    rows = [Logged(f"r{n}", prompt, output_tokens=1, line=n) for n, prompt in enumerate(prompts)]
    return read(rows, words.text)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "made", [of_tenants, of_conversations, of_documents], ids=lambda made: str(made.__name__)
)
def test_the_client_gains_what_is_promised(made: object, seed: int) -> None:
    """All that differs is mended: a tenth of a percentage point at most lies between promise and gain."""
    words = Words()
    make = made  # the same draws, mended and not
    raw = [words.ids(text) for text in make(random.Random(seed), ())]  #
    own = [words.ids(text) for text in make(random.Random(seed), (0, 1, 2))]  #
    log = logged(raw, words)
    promised = hit_rate(row.prompt for row in log.mended(log.groups)) - hit_rate(raw)
    gained = hit_rate(own) - hit_rate(raw)
    assert gained > 0.1
    assert abs(promised - gained) < 0.001


@pytest.mark.parametrize("seed", range(4))
def test_what_one_change_brings_with_all_before_it(seed: int) -> None:
    """The client moves the first value, the first two, all three: each step brings what is promised."""
    words = Words()
    raw = [words.ids(text) for text in of_tenants(random.Random(seed), ())]
    log = logged(raw, words)
    by_kind = {group.kind: group for group in log.groups}
    assert set(by_kind) >= {"time", "id", "user"}
    assert [len(log.grouped.up_to(by_kind[kind])) for kind in ("time", "id", "user")] == [1, 2, 3]
    for count, kind in enumerate(("time", "id", "user"), 1):
        own = [words.ids(text) for text in of_tenants(random.Random(seed), range(count))]
        promised = hit_rate(row.prompt for row in log.mended(log.grouped.up_to(by_kind[kind])))
        assert abs(promised - hit_rate(own)) < 0.001
    alone = hit_rate(row.prompt for row in log.mended([by_kind["user"]]))
    assert abs(alone - hit_rate(raw)) < 0.02


def test_decoded_pieces_are_the_text() -> None:
    """A character of several tokens is decoded whole, and a blank that a tokenizer drops at the start is kept."""
    letters = ["a", " b", *(bytes([one]).decode("latin-1") for one in "é€".encode())]

    def text(ids: Sequence[int]) -> str:
        raw = "".join(letters[one] for one in ids).encode("latin-1")
        return raw.decode("utf-8", "replace").removeprefix(" ")

    decoded = Decoder(text).decoded([1, 0, 1, 2, 3, 0, 4, 5, 6, 1])
    assert decoded.text == " ba bé" + "a€ b"
    assert decoded.starts == [0, 2, 3, 5, 6, 6, 7, 8, 8, 8, 10]


def test_a_prompt_asks_for_its_text_twice() -> None:
    """Not once for each token: questions go to another process."""
    asked: list[int] = []
    words = Words()
    ids = words.ids(rendered(rules(1), "And now?"))

    def text(some: Sequence[int]) -> str:
        asked.append(len(some))
        return words.text(some)

    decoder = Decoder(text)
    assert decoder.decoded(ids).text == words.text(ids)
    assert decoder.decoded(ids).starts[-1] == len(words.text(ids))
    assert len(asked) == 3
