"""What is known of a watched server beside its metrics: its limits, its model's shape; and how to know more.

The server is asked once at the start. A model's shape comes from a config.json of this machine, never from a network.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from kvtune.base.commands import command, vllm_serve
from kvtune.base.files import home_folder
from kvtune.data.layout.plan import GPU, ModelShape, plan_per_layer
from kvtune.data.show.terminal import one_line
from kvtune.servers.watch.endpoints import host_of
from kvtune.servers.watch.regime import Limits
from kvtune.servers.watch.server import Server

ASK_S = 1.0
"""Seconds that the server has to tell its scheduler's limits: a first screen does not wait for more."""
AGAIN_S = 10.0
"""vLLM answers at once when it has looked at its environment, for the first question."""
TIMES = 3
LOCAL = ("localhost", "127.0.0.1", "::1")

ShapeAtHand = Callable[[str, bool], ModelShape | None]
"""Returns the shape of a model by its folder or name; folders only if the second argument is true."""


class Next(msgspec.Struct, frozen=True):
    """A command that would tell more, and what."""

    what: str
    command: str


@dataclass
class Facts:
    """Filled by `ask`, and again after a restart of the server."""

    server: Server
    shape_at_hand: ShapeAtHand
    given: Limits = field(default_factory=Limits)
    """Limits that the user gave: they stand before those that the server tells."""
    limits: Limits = field(default_factory=Limits)
    shape: ModelShape | None = None
    root: str = ""
    _asked: int = 0
    _due: float = 0.0

    def ask(self) -> None:
        """Ask for all of it."""
        card = self.server.card()
        self.root = one_line(card.root or card.id)
        local = host_of(self.server.base) in LOCAL
        shapes = (self.shape_at_hand(name, local) for name in (card.root, card.id) if name)
        self.shape = next((shape for shape in shapes if shape is not None), None)
        groups = plan_per_layer(self.shape, GPU).groups if self.shape is not None else 0
        self.limits = replace(self.given, longest=card.max_model_len or 0, groups=groups)
        self._asked, self._due = 0, 0.0
        self.ask_limits()

    def ask_limits(self) -> None:
        """Ask for the scheduler's limits, unless they are given, or the server told them; not again within AGAIN_S."""
        if self.given.seats and self.given.step_tokens:
            return
        if self._asked >= TIMES or time.monotonic() < self._due:
            return
        self._asked, self._due = self._asked + 1, time.monotonic() + AGAIN_S
        limits = self.server.scheduler_limits(ASK_S)
        if limits is not None:
            self._asked = TIMES
            seats, step_tokens = limits
            given = self.given
            self.limits = replace(
                self.limits, seats=given.seats or seats, step_tokens=given.step_tokens or step_tokens
            )

    def more(self) -> list[Next]:
        """Return what would tell more of a server that publishes no KV events, complete and ready to copy."""
        base = self.server.base
        flags, options = events_words(base)
        insecure = ["--insecure"] if self.server.insecure else []
        return [
            Next(
                "without a restart: each request, what it hit, and the text that differs. Clients ask port 8001 then",
                command("tap", base, *insecure),
            ),
            Next(
                "the causes of all misses: start the server again with these flags, beside those that it has",
                vllm_serve(self.root, [*flags, "--enable-prompt-tokens-details"]),
            ),
            Next("and then", command("watch", base, *options, *insecure)),
        ]


def events_words(base: str) -> tuple[list[str], list[str]]:
    """Return vLLM's flag that publishes events, and kvtune's options for it.

    On this machine: in files of a folder that is the user's own.
    """
    folder = os.environ.get("XDG_RUNTIME_DIR") or home_folder()
    if folder and host_of(base) in LOCAL:
        ends = [f"ipc://{folder}/kv-events", f"ipc://{folder}/kv-events-replay"]
        options = [word for end in ends for word in ("--events", end)]
    else:
        ends, options = ["tcp://*:5557", "tcp://*:5558"], []
    named = {"endpoint": ends[0], "replay_endpoint": ends[1]}
    config = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **named})
    return ["--kv-events-config", config], options
