"""Two machines on one study by the command line: real simulators, a real PostgreSQL that stops in mid-study."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tune.postgres import Cluster

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(600)]

LOAD = "rounds:prefixes=8,prefix=1000,suffix=32,output=2,rounds=2"
FLAGS = ["--", "--block-size", "32", "--num-gpu-blocks-override", "900", "--max-model-len", "4096"]
TRIALS = 60


class Worker:
    """One `kvtune tune` on its own folder; `trials` of its progress lines are counted as they come."""

    def __init__(self, url: str, folder: Path, *more: str) -> None:
        command = [sys.executable, "-c", "from kvtune.cli.app import main; main()", "tune", "tiny-gemma3"]
        command += ["-w", LOAD, "--on", "sim", "--trials", str(TRIALS), "--study", url]
        command += ["-o", str(folder), "--json", *more, *FLAGS]
        folder.mkdir(exist_ok=True)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder)
        self.lines: list[str] = []
        self.news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.news:
                self.lines.append(line)
                self.news.notify_all()
        with self.news:
            self.news.notify_all()

    def trials(self) -> int:
        return sum(" on sim, " in line for line in self.lines)

    def wait_for_trials(self, number: int) -> None:
        with self.news:
            seen = self.news.wait_for(
                lambda: self.trials() >= number or not self._reader.is_alive(), timeout=240
            )
        assert seen and self.trials() >= number, "".join(self.lines)

    def end(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        said = self.process.stdout.read()
        self._reader.join(240)
        return self.process.wait(240), said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(60)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def wait_for_study(url: str) -> None:
    import psycopg

    end = time.monotonic() + 120
    while time.monotonic() < end:
        with suppress(psycopg.Error), psycopg.connect(url) as connection:
            if connection.execute("select 1 from studies").fetchone():
                return
        time.sleep(0.2)
    pytest.fail("no study was begun")


def journal(folder: Path) -> set[str]:
    """The settings of which this machine's newest journal knows the result."""
    newest = max(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    return complete(json.loads(line) for line in newest.read_text().splitlines()[1:])


def told(url: str) -> set[str]:
    """The settings of which the database knows the result."""
    import psycopg

    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "select value_json from trial_user_attributes where key = 'trial'"
        ).fetchall()
    assert len(rows) > TRIALS // 2
    return complete(json.loads(json.loads(value)) for (value,) in rows)


def complete(trials: Iterable[dict[str, Any]]) -> set[str]:
    return {json.dumps(t["settings"], sort_keys=True) for t in trials if t["state"] == "complete"}


def test_two_machines_tune_together_and_survive_an_outage(cluster: Cluster, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    workers = [first := Worker(cluster.url, one)]
    try:
        wait_for_study(cluster.url)
        workers.append(second := Worker(cluster.url, two, "--join"))
        for worker in (first, second):
            worker.wait_for_trials(5)
        cluster.stop()
        for worker in (first, second):
            code, said = worker.end()
            printed = "".join(worker.lines)
            assert (code, said) == (1, ""), printed
            assert "does not answer" in printed and "storage is back" in printed
            assert "hush" not in printed, "the URL's password is not printed"
        kept = journal(one)
        assert len(kept) >= 4
        cluster.start()
        workers += [first := Worker(cluster.url, one), second := Worker(cluster.url, two, "--join")]
        ended = [first.end(), second.end()]
        assert [code for code, _ in ended] == [0, 0], "".join(first.lines + second.lines)
        begun, joined = (json.loads(said) for _, said in ended)
        assert begun["verdict"]["winner"] and Path(one / begun["recipe"]).is_file()
        assert "joined" in joined["verdict"]["text"] and joined["recipe"] is None
        assert min(first.trials(), second.trials()) > 0, "both went on"
        # The baseline and the defaults apart, each may make the two again that it could not tell any more.
        assert first.trials() + second.trials() <= TRIALS + 4 - len(kept) + 8
        assert kept <= journal(one)
        for folder in (one, two):  # except a batch that the other machine told after this one had ended
            assert len(told(cluster.url) - journal(folder)) <= 2, (
                "each machine's record holds what the other found"
            )
    finally:
        for worker in workers:
            worker.kill()
