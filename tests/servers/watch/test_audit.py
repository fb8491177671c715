"""The audit of a server's events: a fake publisher with each fault planted alone, clean streams, recorded servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvtune.servers.watch.audit import NAMES, Audit
from kvtune.servers.watch.audit import _reading as audit_reading
from kvtune.servers.watch.events import Reader, Received, Stream
from kvtune.servers.watch.metrics import read
from tests.servers.watch.played import HERE, Answers, Publisher, answers_of, counters, http, until
from tests.servers.watch.recordings import NAMES as RECORDED
from tests.servers.watch.recordings import OLDER, recorded
from tests.simulator import run

SIZE = 4
FULL, WINDOW = ("full_attention", None), ("sliding_window", 8)
Events = list[dict[str, Any]]


def stored(*names: int, after: int | None = None, of: int | None = None, **more: Any) -> dict[str, Any]:
    """Blocks of SIZE tokens. `of`: how many blocks of tokens there are, if not as many as names."""
    tokens = list(range(SIZE * (len(names) if of is None else of)))
    made = {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": after,
        "token_ids": tokens,
    }
    return made | {"block_size": SIZE, "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": FULL[0]} | more


def removed(*names: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0} | more


CLEARED = {"type": "AllBlocksCleared"}


@dataclass
class Fake:
    """A publisher with what its server's counters say. A batch is kept for a replay, sent, or both."""

    publisher: Publisher = field(default_factory=lambda: Publisher(HERE, HERE))
    number: int = 0
    computed: int = 0
    """Prompt tokens that the counters have."""
    answered: int = 0
    started: float = 1.0
    at: float = 0.0
    """The last batch's time."""
    scrapes: int = 0

    def send(self, *events: dict[str, Any], ago: float = 0.0, kept: bool = True, sent: bool = True) -> None:
        self.at = time.time() - ago
        payload = msgspec.msgpack.encode([self.at, list(events), 0])
        self.raw(payload, kept=kept, sent=sent)

    def raw(self, payload: bytes, *, kept: bool = True, sent: bool = True) -> None:
        if not sent:
            self.publisher.dropped.add(self.number)
        self.publisher.publish([(self.number, payload)], remember=kept)
        self.number += 1

    def anew(self) -> None:
        """Start again, as vLLM does: numbers from 0, an empty history, counters at 0."""
        self.number, self.started = 0, self.started + 100.0
        self.publisher.sent.clear()
        self.publisher.dropped.clear()

    def metrics(self, _: Any) -> str:
        self.scrapes += 1
        first = f'vllm:time_to_first_token_seconds_count{{engine="0",model_name="tiny"}} {self.answered}.0\n'
        return counters(self.computed, 0, started=self.started) + first


def clean(fake: Fake) -> None:
    """Two groups with the same blocks, a chain that grows, evictions, a block that is stored again after its eviction,
    a reset, and a tier that describes its blocks.
    """
    fake.send(stored(1, 2, 3), stored(1, 2, 3, group_idx=1))
    fake.send(stored(4, after=3), stored(4, after=3, group_idx=1))
    fake.send(removed(4), removed(4, group_idx=1), stored(5, 6), stored(5, 6, group_idx=1))
    fake.send(stored(4, after=3), stored(7, medium="CPU"))
    fake.send(removed(7, medium="CPU"), CLEARED)
    fake.send(stored(1, 2), stored(1, 2, group_idx=1))


def lost(fake: Fake) -> None:
    fake.send(stored(1))
    fake.send(stored(2, after=1), kept=False, sent=False)
    fake.send(stored(3, after=2), removed(2))


def gaps(fake: Fake) -> None:
    fake.send(stored(1))
    fake.send(stored(2, after=1), sent=False)
    fake.send(stored(3, after=2))


def unreadable(fake: Fake) -> None:
    fake.raw(msgspec.msgpack.encode([1.0, [{"type": "BlockMoved", "block_hashes": [1]}], 0]))


def restart(fake: Fake) -> None:
    fake.send(stored(1, 2))
    time.sleep(0.05)
    fake.anew()
    fake.send(stored(1, 2))


def restart_of_a_quiet_server(fake: Fake) -> None:
    fake.send(stored(1, 2))
    time.sleep(0.15)
    fake.anew()


def late_joiner(fake: Fake) -> None:
    fake.number = 40
    fake.send(stored(8, after=7), removed(6))


def orphans(fake: Fake) -> None:
    fake.send(stored(1, 2), stored(4, after=3))


def never_stored(fake: Fake) -> None:
    fake.send(stored(1, 2), removed(3))


def of_another_group(fake: Fake) -> None:
    fake.send(stored(1, 2), removed(2, group_idx=1))


def stored_twice(fake: Fake) -> None:
    fake.send(stored(1, 2), stored(3, 2, after=1))


def overfull(fake: Fake) -> None:
    fake.send(stored(*range(201)))  # the pool has 200


def sparse_groups(fake: Fake) -> None:
    window: dict[str, Any] = {
        "group_idx": 1,
        "kv_cache_spec_kind": WINDOW[0],
        "kv_cache_spec_sliding_window": WINDOW[1],
    }
    fake.send(stored(1, 2, 3), stored(2, 3, of=3, **window))


def silent_groups(fake: Fake) -> None:
    for name in range(20):
        fake.send(stored(2 * name), stored(2 * name, group_idx=2))


def blank_tier(fake: Fake) -> None:
    fake.send(stored(1, 2), stored(2, medium="CPU", of=0, block_size=0, kv_cache_spec_kind=None))


def without_hashes(fake: Fake) -> None:
    fake.send(stored(1, 2), stored(medium="STORAGE", of=2))


def removed_by_tier(fake: Fake) -> None:
    fake.send(stored(1, 2), stored(1, 2, medium="CPU"), removed(2))


def late(fake: Fake) -> None:
    fake.send(stored(1))
    fake.send(stored(2, after=1), ago=30.0)


def late_by_the_counters(fake: Fake) -> None:
    fake.send(stored(1))
    fake.computed, fake.answered = 100 * SIZE, 2


PLANTED: dict[str, tuple[str, Callable[[Fake], None]]] = {
    plant.__name__: (name, plant)
    for name, plants in {
        "lost": (lost,),
        "gaps": (gaps,),
        "unreadable": (unreadable,),
        "restart": (restart, restart_of_a_quiet_server),
        "late_joiner": (late_joiner,),
        "orphans": (orphans,),
        "never_stored": (never_stored, of_another_group),
        "stored_twice": (stored_twice,),
        "overfull": (overfull,),
        "sparse_groups": (sparse_groups,),
        "silent_groups": (silent_groups,),
        "blank_tier": (blank_tier, without_hashes),
        "removed_by_tier": (removed_by_tier,),
        "late": (late, late_by_the_counters),
    }.items()
    for plant in plants
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr("kvtune.servers.watch.audit.LOOK_S", 0.05)
    monkeypatch.setattr("kvtune.servers.watch.audit.TAKE_S", 0.01)
    monkeypatch.setattr("kvtune.servers.watch.events.AGAIN_MS", 100)
    made = Fake()
    yield made
    made.publisher.close()


@dataclass
class Auditing:
    """The command on a fake server."""

    fake: Fake
    capsys: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def __call__(self, plant: Callable[[Fake], None], *words: str) -> tuple[int, str, str]:
        """The exit code and what is printed, while `plant` publishes live."""
        answers = answers_of(self.fake.publisher)
        answers.paths["/metrics"] = (200, self.fake.metrics)

        readers: list[Reader] = []
        """The audit's own: what it publishes live comes when its history was read."""
        planted: list[int] = []
        """How many scrapes had been answered when all was published."""

        def reading(*of: Any) -> Reader:
            readers.append(audit_reading(*of))
            return readers[-1]

        def over(audit: Audit, _: float) -> bool:
            stream = audit.streams[-1]
            came = stream.last >= self.fake.number - 1 and (stream.at == self.fake.at or stream.unknown > 0)
            return bool(planted) and came and self.fake.scrapes > planted[0] + 6

        def publish() -> None:
            until(lambda: bool(readers))
            readers[0].ready.wait()
            plant(self.fake)
            planted.append(self.fake.scrapes)

        self.patch.setattr("kvtune.servers.watch.audit._reading", reading)
        self.patch.setattr("kvtune.servers.watch.audit.over", over)
        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        with http(answers) as base:
            code = run(["watch", base, "--audit", *words])
        thread.join()
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err


@pytest.fixture
def auditing(fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Auditing:
    return Auditing(fake, capsys, monkeypatch)


def test_every_finding_is_planted() -> None:
    assert [name for name in NAMES if name not in {name for name, _ in PLANTED.values()}] == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(
    planted: str, auditing: Auditing, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted == "late_by_the_counters":
        monkeypatch.setattr("kvtune.servers.watch.audit.LATE_S", 0.2)
    name, plant = PLANTED[planted]
    code, out, err = auditing(plant, "--json")
    findings = json.loads(out)["findings"]
    assert [each["name"] for each in findings] == [name], (out, err)
    assert code == 1 and findings[0]["times"] >= 1 and findings[0]["example"] and findings[0]["wrong"]


def test_a_clean_stream_has_no_finding(auditing: Auditing) -> None:
    code, out, _ = auditing(clean, "--json")
    answer = json.loads(out)
    assert (code, answer["findings"], answer["complete"], answer["batches"]) == (0, [], True, 6)
    assert answer["unchecked"] == {}


def test_a_history_that_is_replayed_is_no_fault(auditing: Auditing) -> None:
    clean(auditing.fake)
    auditing.fake.computed, auditing.fake.answered = 50 * SIZE, 50
    code, out, _ = auditing(lambda fake: fake.send(stored(3, after=2)), "--json")
    answer = json.loads(out)
    assert (code, answer["findings"], answer["complete"]) == (0, [], True)


def test_what_an_index_knows_can_be_allowed(auditing: Auditing) -> None:
    def both(fake: Fake) -> None:
        stored_twice(fake)
        removed_by_tier(fake)

    code, out, _ = auditing(both, "--allow", "stored_twice", "--allow", "removed_by_tier")
    assert code == 0 and "no findings (2 allowed)" in out
    assert "count copies" in out and "vLLM stores a copy for each request" in out


def test_what_cannot_run_ends_with_2(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(counters(0, 0))
    with http(answers) as base:
        assert run(["watch", base, "--audit", "--seconds", "0.1"]) == 2
        assert "publishes no KV events" in capsys.readouterr().err
        answers.paths |= answers_of(fake.publisher, counters(0, 0)).paths
        assert run(["watch", base, "--audit", "--seconds", "0.1"]) == 2
        assert "published no event" in capsys.readouterr().err
        assert run(["watch", base, "--audit", "--allow", "twice"]) == 2
    assert "'twice' is no finding" in capsys.readouterr().err
    assert run(["watch", "http://127.0.0.1:9", "--audit"]) == 2


@pytest.mark.parametrize("name", [*RECORDED, *OLDER])
def test_a_recorded_server_shows_what_vllm_does_by_design_and_no_fault(name: str) -> None:
    server = recorded(name)
    audit = Audit(streams=[Stream(first=0, history=True)])
    for number, received in enumerate(server.received()):
        audit.add(numbered(received, number))
    audit.look(read(server.metrics, time.time()))
    findings = audit.findings()
    groups = set() if name.startswith("full_attention") else {"sparse_groups"}
    assert {each.name for each in findings} == groups | {"stored_twice"}
    assert all(each.design for each in findings)
    assert set(audit.unchecked()) == {"blank_tier", "removed_by_tier"}


def numbered(received: Received, number: int) -> Received:
    return Received(received.rank, received.batch, received.fresh, received.size, number)
