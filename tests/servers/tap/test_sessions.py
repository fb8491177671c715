"""The sessions of a log that `kvtune tap` wrote: conversations that grow, several at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvtune.requests.loads.spec import build, session_load
from tests.servers.tap.stand_in import vllm
from tests.servers.tap.test_command import TEXT, Tap, tap

TURNS, PAUSES_S = 4, (0.02, 0.3, 0.1)


def chatml(body: Mapping[str, Any]) -> list[int]:
    """A prompt as chat templates write it: it ends where the answer begins."""
    said = "".join(f"<{one['role']}>{one['content']}</>" for one in body["messages"])
    return list(f"{said}<assistant>".encode())


@dataclass
class Client:
    """One conversation. `sent_s`, `ended_s`: its own stamps of each turn."""

    name: str
    sent_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)

    def talk(self, to: Tap) -> None:
        said = [{"role": "system", "content": TEXT}, {"role": "user", "content": f"I am {self.name}"}]
        for turn in range(TURNS):
            self.sent_s.append(time.time())
            to.post("/v1/chat/completions", {"messages": said, "max_tokens": 5})
            self.ended_s.append(time.time())
            answer = {"role": "assistant", "content": f"answer {turn}"}
            said = [*said, answer, {"role": "user", "content": f"more of {turn}"}]
            time.sleep(PAUSES_S[turn % len(PAUSES_S)])


def test_conversations_through_a_tap_are_the_sessions_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    clients = [Client(name) for name in ("Ada", "Bob", "Cleo", "Dan")]
    with vllm(render=chatml) as server, tap(server.url, "-o", str(log)) as one:
        threads = [threading.Thread(target=client.talk, args=(one,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one.until(lambda: sum(line.startswith("#") for line in one.out) >= len(clients) * TURNS)

    rows: dict[str, list[dict[str, Any]]] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        text = bytes(row["prompt_token_ids"]).decode()
        rows.setdefault(text.partition("I am ")[2].partition("<")[0], []).append(row)
    load = session_load(f"requests:path={log}")
    assert len(load.sessions) == len(clients) == len(rows)
    begun = sorted(rows, key=lambda name: min(row["t0"] for row in rows[name]))
    for name, session in zip(begun, load.sessions, strict=True):
        mine = sorted(rows[name], key=lambda row: row["t0"])
        client = next(one for one in clients if one.name == name)
        assert all(row["t0"] >= sent for row, sent in zip(mine, client.sent_s, strict=True))
        assert [node.tokens for node in session.nodes] == [len(row["prompt_token_ids"]) for row in mine]
        assert [node.after for node in session.nodes] == [(), (0,), (1,), (2,)]
        assert [node.parent for node in session.nodes] == [-1, 0, 1, 2]
        pauses = [after["t0"] - before["t1"] for before, after in pairwise(mine)]
        assert [node.think_s for node in session.nodes[1:]] == pytest.approx(pauses, abs=1e-4)
        shared = sum(span.length for span in session.nodes[0].head)
        assert shared > len(TEXT), "the system prompt"
    played = build(f"requests:path={log},sessions=2,hours=0.001").requests
    assert {request.session for request in played} >= {0, 1}
