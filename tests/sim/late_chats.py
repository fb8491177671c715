"""Chats that begin when a pool is full of cold prompts: tokens that the chats hit, as JSON.

    python -m tests.sim.late_chats BLOCKS stock|core

A process of its own: the core patches vLLM's classes.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from kvtune.sim.replay import replay
from kvtune.sim.settings import SimSettings
from kvtune.workload.spec import build
from kvtune.workload.types import STREAM_ANSWER, Request, Span, Workload

COLD = "rounds:prefixes=24,prefix=3000,suffix=64,output=8,rounds=1"
CHATS = "chat:sessions=12,turns=5,system=256,first=500,user=100,output=600,concurrency=2"


def late() -> tuple[Workload, int]:
    """The chats behind the cold prompts, and how many these are."""
    cold, chats = build(COLD, seed=1), build(CHATS, seed=0)
    count = len(cold.requests)

    def moved(request: Request) -> Request:
        spans = (
            Span(stream + (count if stream >= STREAM_ANSWER else 10**6), start, length)
            for stream, start, length in request.prompt
        )
        after = count - 1 if request.after is None else request.after + count
        return dataclasses.replace(request, prompt=tuple(spans), after=after)

    first = [dataclasses.replace(request, id=f"cold-{request.id}") for request in cold.requests]
    requests = (*first, *map(moved, chats.requests))
    return dataclasses.replace(chats, requests=requests, hash="late"), count


def main(blocks: str, side: str) -> None:
    work, count = late()
    flags = ["--num-gpu-blocks-override", blocks, "--block-size", "32", "--max-num-batched-tokens", "2048"]
    settings = SimSettings(
        model="tiny-gemma3",
        mode="jump",
        token_rows=0,
        engine_args=[*flags, "--max-model-len", "8192"],
        core="stock" if side == "stock" else "kvtune",
    )
    requests = replay(work, settings).table("requests")
    hit, asked = (int(requests[name][count:].sum()) for name in ("hit_tokens", "prompt_tokens"))
    print(json.dumps({"hit": hit, "asked": asked}))


if __name__ == "__main__":
    main(*sys.argv[1:])
