"""A client that routes by itself, before several real servers; and what their events said of it, recorded.

`python -m tests.servers.watch.fleet_load OUT MODEL URL URL ..` sends the load by each router, and writes a recording:
the servers' events, and the client's log with what `usage` says. The recordings beside this file are of vLLM 0.32.
"""

from __future__ import annotations

import lzma
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.endpoints import Named
from kvtune.servers.watch.events import Batch, Received, decoded
from kvtune.servers.watch.others import Others
from kvtune.servers.watch.replicas import funnel_of
from kvtune.servers.watch.requests import Answered, Served, join_fleet
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.watched import Watched
from tests.servers.watch.fleets import Asked, Truth, truth

ROUTERS: dict[str, Callable[[int, int, int, Sequence[int]], int]] = {
    "round robin": lambda number, session, servers, text: number % servers,
    "session hash": lambda number, session, servers, text: session % servers,
    "sticky": lambda number, session, servers, text: 0 if number % 8 else 1 + number // 8 % (servers - 1),
    "least loaded, with noise": lambda number, session, servers, text: random.Random(number).randrange(
        servers
    ),
    "the first words": lambda number, session, servers, text: sum(text[100:170]) % servers,
}
"""Which server gets a request: by its number, its session, and its text, of which all begin alike."""
WORDS = range(10, 410)


@dataclass
class Client:
    """Sends sessions that grow turn by turn, one request after another, and keeps what `usage` says."""

    model: str
    bases: Sequence[str]
    seed: int = 1
    sessions: int = 14
    rows: list[Logged] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.system = self.words(150)
        self.texts: dict[int, list[int]] = {}

    def words(self, count: int) -> list[int]:
        return [self.draw.choice(WORDS) for _ in range(count)]

    def run(self, requests: int, router: str) -> None:
        with httpx.Client(timeout=300) as http:
            for number in range(requests):
                session = self.draw.randrange(self.sessions)
                text = self.texts.get(session) or [*self.system, *self.words(self.draw.randrange(20, 200))]
                base = self.bases[ROUTERS[router](number, session, len(self.bases), text)]
                row = self.send(http, base, session, text)
                grown = [*text, *row.answer, *self.words(self.draw.randrange(10, 60))]
                self.texts[session] = grown if len(grown) < 900 else []

    def send(self, http: httpx.Client, base: str, session: int, text: list[int]) -> Logged:
        salt, begun = "b" if session == 1 else "", time.time()
        body = {"model": self.model, "prompt": text, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        body |= {
            "return_token_ids": True,
            "session_id": f"s{session}",
            **({"cache_salt": salt} if salt else {}),
        }
        told = http.post(f"{base}/v1/completions", json=body).json()
        answer = told["choices"][0]["token_ids"]
        hit = (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        line = len(self.rows) + 1
        more = {"output_tokens": len(answer), "replica": base, "line": line, "kind": f"s{session}"}
        row = Logged(f"r{line}", text, answer, begun, time.time(), hit, salt, **more)  # type: ignore[arg-type]
        self.rows.append(row)
        return row


@dataclass(frozen=True)
class Recorded:
    """Of each server, by the name that the log has: its batches and the tokens of its blocks."""

    batches: dict[str, list[Batch]]
    sizes: dict[str, int]
    rows: Sequence[Logged]
    blocks: int
    """Of all pools."""

    def truth(self) -> Truth:
        names = list(self.batches)
        asked = [Asked(names.index(r.replica), r.prompt, r.salt, r.hit, r.t0 or 0.0) for r in self.rows]
        return truth(list(self.batches.values()), list(self.sizes.values()), asked)

    def judged(self) -> list[Answered]:
        served = [
            Served([Received(0, one) for one in own], [r for r in self.rows if r.replica == name], Account())
            for name, own in self.batches.items()
        ]
        return [one for own in join_fleet(served) for one in own]

    def write(self, path: Path) -> None:
        path.write_bytes(lzma.compress(msgspec.json.encode(self, enc_hook=list), preset=9))


def recorded(path: Path) -> Recorded:
    found = msgspec.json.decode(lzma.decompress(path.read_bytes()))
    batches = {
        name: [decoded(msgspec.msgpack.encode(batch)) for batch in own]
        for name, own in found["batches"].items()
    }
    return Recorded(batches, found["sizes"], [Logged(**row) for row in found["rows"]], found["blocks"])


def watched(url: str, named: Named, others: Others | None) -> Watched:
    return Watched(Server(url), named, others, keep=[])


def recording_of(group: Servers, rows: Sequence[Logged]) -> Recorded:
    watchings = {url: member.watched for url, member in group.members.items()}
    return Recorded(
        {url: [got.batch for got in one.keep or []] for url, one in watchings.items()},
        {url: one.last[0].block_size or 0 for url, one in watchings.items()},
        list(rows),
        sum(one.last[0].blocks or 0 for one in watchings.values()),
    )


def main(out: str, model: str, *bases: str) -> None:
    group = Servers(Addresses(bases), watched)
    group.start()
    client = Client(model, bases)
    for router in ROUTERS:
        client.run(50, router)
        print(router, group.look().fleet.sentence)
    time.sleep(2)
    shot = group.look()
    made = recording_of(group, client.rows)
    made.write(Path(out))
    print(shot.fleet, made.truth(), funnel_of(made.judged(), 0, 0, whole=True))
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
