"""A recording of a server made by hand: ten minutes, a look every half second, from 14:55 to 15:05 UTC."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtune.data.run.extras import Extras, ServerAccount
from kvtune.data.run.types import Run
from tests.reading.analysis.made import header_of, table

LOOKS = 1200
BAD = slice(600, 720)
"""The minute at 3 pm."""
STALL = slice(640, 656)
RESTART, LOST = 100, 1000


def ten_minutes(*, bad: bool = True, **header: Any) -> Run:
    """Steady traffic; if `bad`, a minute of new prompts, a queue and a stall; also a restart and three lost looks."""
    at = np.arange(LOOKS)
    looks: dict[str, Any] = {
        "t_s": at / 2,
        "until_s": (at + 1) / 2,
        "lost": np.zeros(LOOKS),
        "restarts": np.zeros(LOOKS),
        "running": np.full(LOOKS, 4.0),
        "waiting": np.zeros(LOOKS),
        "pool_use": np.full(LOOKS, 0.5),
        "query_tokens": np.full(LOOKS, 500.0),
        "hit_tokens": np.full(LOOKS, 250.0),
        "output_tokens": np.full(LOOKS, 20.0),
        "came": np.ones(LOOKS),
        "answered": np.ones(LOOKS),
        "first_tokens": np.ones(LOOKS),
        "first_token_s": np.full(LOOKS, 0.2),
        "queued": np.ones(LOOKS),
        "queue_s": np.full(LOOKS, 0.01),
        "stalled_s": np.zeros(LOOKS),
    }
    cold, evicted = np.full(LOOKS, 150), np.full(LOOKS, 100)
    if bad:
        looks["query_tokens"][BAD], looks["hit_tokens"][BAD], looks["came"][BAD] = 2000, 100, 3
        looks["first_token_s"][BAD], looks["queue_s"][BAD] = 5.0, 4.0
        looks["waiting"][BAD] = np.minimum(np.arange(120), 30)
        looks["stalled_s"][STALL] = 0.5
        cold[BAD] = 1800
        for name in ("output_tokens", "first_tokens", "first_token_s", "answered", "queued", "queue_s"):
            looks[name][STALL] = 0
        looks["restarts"][RESTART], looks["lost"][LOST] = 1, 3
    first = np.flatnonzero(looks["first_tokens"] > 0)
    slow = looks["first_token_s"][first] > 1
    return Run(
        header_of(
            source="server",
            started_at="2026-01-01T14:55:00+00:00",
            wall_s=LOOKS / 2,
            extra=Extras(
                server=ServerAccount(
                    events="on",
                    complete=True,
                    seconds=LOOKS / 2,
                    query_tokens=int(looks["query_tokens"].sum()),
                    hit_tokens=int(looks["hit_tokens"].sum()),
                    misses={"cold": int(cold.sum()), "evicted": int(evicted.sum())},
                )
            ),
            **header,
        ),
        {
            "looks": table("looks", **looks),
            "look_misses": table(
                "look_misses",
                look=np.tile(at, 2),
                cause=["cold"] * LOOKS + ["evicted"] * LOOKS,
                tokens=np.concatenate((cold, evicted)),
            ),
            "look_times": table(
                "look_times",
                look=first,
                what=["first_token"] * len(first),
                above_s=np.where(slow, 2.5, 0.1),
                upto_s=np.where(slow, 7.5, 0.25),
                count=np.ones(len(first)),
            ),
        },
    )
