"""Loads for servers with a tier of host memory, and what a client and a subscriber of their own count of them.

`python -m tests.servers.watch.tiers NAME OUT` made the recordings `traffic-tier-NAME.xz`, of vLLM 0.32 with
its native tier. A CPU has none without kvtune's plugin, of which nothing else is on. `Outside` uses nothing of kvtune.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kvtune.data.layout.models import builtin, engine_defaults
from tests.lab.engine.serving import environment, free_port, served
from tests.servers.watch.traffic import SCRAPE_S, Listener, Sent, Traffic, write


@dataclass(frozen=True)
class Set:
    """A server, and the load that it gets. `full`: the number of the group with full attention."""

    model: str
    blocks: int
    tier_gib: float
    block: int
    sessions: int
    rounds: int
    prompt: int
    grows: bool = True
    """Whether a session's next prompt goes on with all before it; else only with its first part."""
    full: int = 0


SETS = {
    "loads": Set("tiny-gemma3", 500, 0.1, 32, sessions=8, rounds=3, prompt=610, full=3),
    "never": Set("tiny-gemma3", 500, 0.1, 32, sessions=8, rounds=2, prompt=610, grows=False, full=3),
    "small": Set("tiny-llama", 90, 0.004, 32, sessions=9, rounds=3, prompt=700),
    "states": Set("tiny-qwen3next", 40, 0.1, 160, sessions=5, rounds=3, prompt=500, full=3),
}


@dataclass
class Sessions(Traffic):
    """Sessions in turn, two at once; each prompt has two whole blocks or more that are new."""

    async def send_all(self, of: Set) -> list[Sent]:
        texts = [self.words(of.prompt + number) for number in range(of.sessions)]

        async def turn(number: int) -> None:
            text = texts[number] = [*texts[number], *self.words(2 * of.block + number)]
            answer = await self.send("session", text, 1)
            texts[number] = [*text, *answer] if of.grows else text[: of.prompt]

        async with self._client():
            for _ in range(of.rounds):
                for first in range(0, of.sessions, 2):
                    await asyncio.gather(*map(turn, range(first, min(first + 2, of.sessions))))
            await asyncio.sleep(3 * SCRAPE_S)
        return self.sent


@contextmanager
def serving(of: Set, folder: Path) -> Iterator[str]:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    events |= {"replay_endpoint": f"tcp://127.0.0.1:{free_port()}"}
    chosen = {
        **engine_defaults(of.model),
        "load-format": "dummy",
        "max-model-len": "2048",
        "block-size": "32",
    }
    del chosen["kv-cache-memory-bytes"]
    chosen |= {"num-gpu-blocks-override": str(of.blocks), "kv-offloading-size": str(of.tier_gib)}
    chosen |= {
        "model": str(builtin(of.model)),
        "served-model-name": of.model,
        "max-num-batched-tokens": "1024",
    }
    chosen |= {"kv-events-config": json.dumps(events), "enable-prompt-tokens-details": ""}
    flags = [word for name, value in chosen.items() for word in (f"--{name}", value) if word]
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    only_the_tier = {**environment("stock", folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with served(folder, command, flags, only_the_tier) as base:
        yield base


def send(name: str, base: str) -> tuple[Listener, list[Sent]]:
    """Send the load of a set to its server, with a subscriber beside it."""
    listener = Listener(base)
    try:
        sent = asyncio.run(Sessions(base, SETS[name].model, seed=7).send_all(SETS[name]))
    finally:
        listener.close()
    return listener, sent


@dataclass
class Outside:
    """The same counts as kvtune's, by vLLM's raw messages and the client's prompts and `cached_tokens`.

    A stretch of blocks was loaded if its prompt goes on in the same step: a step computes one stretch of a prompt.
    """

    of: Set
    payloads: Sequence[tuple[int, bytes]]
    sent: Sequence[Sent]
    stored: int = 0
    kept: Counter[tuple[Any, int]] = field(default_factory=Counter)
    loaded: int = 0
    rest: Counter[str] = field(default_factory=Counter)
    ages: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        times: dict[Any, tuple[float, float]] = {}
        computed: set[Any] = set()
        for _, payload in self.payloads:
            at, events, *_ = msgspec.msgpack.decode(payload)
            rows = [
                event for event in events if event.get("medium") == "GPU" and event["type"] == "BlockStored"
            ]
            rows = [event for event in rows if event["group_idx"] == self.of.full]
            parents = {event.get("parent_block_hash") for event in rows}
            for event in rows:
                names = event["block_hashes"]
                if names[-1] in parents:
                    self.loaded += len(event["token_ids"])
                    continue
                whys = [self._why(name, computed) for name in names]
                self.rest.update({why: self.of.block * whys.count(why) for why in set(whys)})
                if "evicted_from_both" in whys:
                    since, gone = times[names[whys.index("evicted_from_both")]]
                    self.ages.append((gone - since, at - since))
                computed.update(names)
            for event in (event for event in events if event.get("medium") == "CPU"):
                for name in event["block_hashes"]:
                    place, new = (name, event["group_idx"]), event["type"] == "BlockStored"
                    self.stored += new
                    self.kept[place] += 1 if new else -1
                    times[name] = (at, 0.0) if new else (times[name][0], at)

    def _why(self, name: Any, computed: set[Any]) -> str:
        if name not in computed:
            return "cold"
        if (name, self.of.full) not in self.kept:
            return "never_stored"
        return "window_not_stored" if self.kept[name, self.of.full] else "evicted_from_both"

    @property
    def missed(self) -> int:
        return sum(len(one.prompt) - one.hit for one in self.sent)

    def told(self) -> dict[str, Any]:
        """The figures, by the names of kvtune's."""
        hits = sum(one.hit for one in self.sent)
        return {
            "stored_blocks": self.stored,
            "kept_blocks": self.kept.total(),
            "asked_tokens": self.missed + self.loaded,
            "loadable_tokens": self.loaded,
            "loaded_tokens": self.loaded,
            "rest": dict(self.rest),
            "evicted_s": [median(ages) for ages in zip(*self.ages, strict=True)] or None,
        } | ({} if hits >= self.loaded else {"loaded_tokens": -1})


def main() -> None:
    name, out = sys.argv[1:3]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, serving(SETS[name], Path(folder)) as base:
        listener, sent = send(name, base)
    write(Path(out), [listener], sent)
    print(Outside(SETS[name], listener.batches, sent).told(), Path(out).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
