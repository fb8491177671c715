"""What a client knows of its own traffic, by a trie of all token ids and by `usage`: the truth beside kvtune's figures.

The recordings were made by `python -m bench.record_traffic MODEL OUT` (vLLM 0.32, two lives of a server each).
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.events import Batch, Received
from kvtune.servers.watch.metrics import Scrape, read
from tests.servers.watch.traffic import Sent

FOLDER = Path(__file__).with_name("recorded")
MODELS = ("tiny-llama", "tiny-gemma3", "tiny-qwen3next")


class Trie:
    """All token ids that were computed, one node a token."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def add(self, tokens: Sequence[int]) -> None:
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})

    def longest(self, tokens: Sequence[int]) -> int:
        node, count = self._root, 0
        for token in tokens:
            if token not in node:
                return count
            node, count = node[token], count + 1
        return count


@dataclass(frozen=True)
class Known:
    """How many first tokens of a prompt were computed before, since the server's start and the cache's last reset.

    `surely`: by requests that had ended when it was sent; `perhaps`: by those that had begun before it ended.
    `elsewhere`: perhaps, with another salt. `before_reset`: perhaps, before the reset.
    """

    sent: Sent
    surely: int
    perhaps: int
    elsewhere: int
    before_reset: int


def known(sent: Sequence[Sent]) -> list[Known]:
    """Return what the trie says of each request that was answered."""
    return [_known(one, sent) for one in sent if one.hit >= 0]


def _known(one: Sent, sent: Sequence[Sent]) -> Known:
    tries = [Trie() for _ in range(4)]
    surely, perhaps, elsewhere, before = tries
    for other in sent:
        if other is one or other.life != one.life or other.t0 >= one.t1:
            continue
        text = [*other.prompt, *other.answer[:-1]]
        if other.salt != one.salt:
            elsewhere.add(text)
            continue
        if other.hit >= 0 and other.t1 <= one.t0 and other.resets == one.resets:
            surely.add(text)
        (perhaps if other.resets == one.resets else before).add(text)
    return Known(one, *(trie.longest(one.prompt) for trie in tries))


@dataclass(frozen=True)
class Life:
    """One life of the server: its event batches, and /metrics every half a second."""

    payloads: Sequence[tuple[int, bytes]]
    samples: Sequence[tuple[float, str]]

    def received(self) -> list[Received]:
        return [Received(0, msgspec.msgpack.decode(payload, type=Batch)) for _, payload in self.payloads]

    def scrapes(self) -> list[Scrape]:
        return [read(text + "\n", at) for at, text in self.samples]


@dataclass(frozen=True)
class Traffic:
    lives: Sequence[Life]
    sent: Sequence[Sent]

    def asked(self, life: int) -> list[Logged]:
        """The log of one life: what was answered."""
        return [
            Logged(f"{number} {one.kind}", one.prompt, one.answer, one.t0, one.t1, one.hit, one.salt)
            for number, one in enumerate(self.sent)
            if one.life == life and one.hit >= 0
        ]


@cache
def traffic(model: str) -> Traffic:
    document = msgspec.msgpack.decode(lzma.decompress((FOLDER / f"traffic-{model}.xz").read_bytes()))
    lives = [
        Life(
            [(number, payload) for number, payload in one["batches"]],
            [(at, text) for at, text in one["samples"]],
        )
        for one in document["lives"]
    ]
    return Traffic(lives, [Sent(**row) for row in document["sent"]])
