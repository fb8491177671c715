"""Chats that no trace can tell, because what an engine answered comes again: tokens that they hit, as JSON.

    python -m tests.sim.chats late|again BLOCKS stock|first|chat|..

`late`: they begin when a pool is full of cold prompts. `again`: every turn is answered a second time, when all others
were, and the conversation goes on behind the first answer. A process of its own: the core patches vLLM's classes.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from kvtune.sim.replay import replay
from kvtune.sim.settings import SimSettings
from kvtune.workload.spec import build
from kvtune.workload.types import STREAM_ANSWER, Request, Workload

COLD = 24
LATE = f"chat:sessions=12,turns=5,system=256,first=500,user=100,output=600,concurrency=2,before={COLD}"
SESSIONS = 20
AGAIN = f"chat:sessions={SESSIONS},turns=6,system=512,first=2000,user=200,output=100,concurrency=4"


def again() -> Workload:
    """Chats whose prompts all come twice."""
    chats = build(AGAIN, seed=0)

    def place(index: int) -> int:
        """Where a request of the chats is now: behind each round comes the same round again."""
        turn, session = divmod(index, SESSIONS)
        return 2 * turn * SESSIONS + session

    requests: list[Request] = []
    for index, request in enumerate(chats.requests):
        spans = tuple(
            span._replace(stream=STREAM_ANSWER + place(span.stream - STREAM_ANSWER))
            if span.stream >= STREAM_ANSWER
            else span
            for span in request.prompt
        )
        after = None if request.after is None else place(request.after)
        requests.append(dataclasses.replace(request, prompt=spans, after=after))
        if (index + 1) % SESSIONS == 0:
            begin = len(requests) - SESSIONS
            requests += [
                dataclasses.replace(
                    one, id=f"{one.id}-again", arrival_s=None, after=begin + number, think_s=0.0
                )
                for number, one in enumerate(requests[begin:])
            ]
    return dataclasses.replace(chats, requests=tuple(requests), hash="again")


def main(load: str, blocks: str, side: str) -> None:
    work, count = (build(LATE, seed=0), COLD) if load == "late" else (again(), 0)
    flags = ["--num-gpu-blocks-override", blocks, "--block-size", "32", "--max-num-batched-tokens", "2048"]
    settings = SimSettings(
        model="tiny-gemma3",
        mode="jump",
        token_rows=0,
        engine_args=[*flags, "--max-model-len", "8192"],
        core="stock" if side == "stock" else "kvtune",
        core_settings={} if side == "stock" else {"policy": side},
    )
    requests = replay(work, settings).table("requests")
    hit, asked = (int(requests[name][count:].sum()) for name in ("hit_tokens", "prompt_tokens"))
    print(json.dumps({"hit": hit, "asked": asked}))


if __name__ == "__main__":
    main(*sys.argv[1:])
