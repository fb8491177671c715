"""A home, a temp and an output folder full of a person's own files with tempting names: every command, with and
without kills, leaves each byte as it was.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvtune.base.scratch import HIDDEN, PREFIX, make
from tests.choice import first_of
from tests.cli.test_runs import GOLDEN, snapshot
from tests.simulator import run

RUN = "tiny-opt_decode_kvtune_20261121-094501"
STUDY = "tiny-opt_decode_tune"
TEMP = (
    "kvtune-my-results/data.txt",
    "kvtune-src/.lock",
    "kvtune-serve-1/1.counters",
    "kvtune-doctor-1/facts.json",
    ".kvtune-x_y/notes",
    "kvtune-test-mine/.lock",
)
OUTPUT = (
    ".kvtune-my_notes/notes",
    f".kvtune-{RUN}/.lock",
    ".kvtune-0123.part",
    *(f"{RUN}{e}" for e in (".html", "-compared.html", ".trace.json", ".log")),
    f"{RUN}.csv/steps.csv",
    f"{RUN}.csv/mine/data",
    "mine.kvrun",
    "torn.kvrun",
    *(f"{STUDY}{e}" for e in (".html", ".result.json", ".toml")),
    *(f"mine{e}" for e in (".jsonl", ".html", ".result.json", ".toml", ".txt")),
    "engine-failed.log",
    "verify-1/data",
    "config.yaml",
    "env.sh",
)
HOME = ("kvtune/notes",)
MINE = b"mine, without a newline at its end"


class World:
    """The three folders. `kept` is what a person has in them."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        for folder, names in (("home", HOME), ("temp", TEMP), ("out", OUTPUT)):
            for name in names:
                path = root / folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(MINE)
        self._copy_of_a_scratch_folder()
        for name in ("linked.jsonl", "linked.html", "linked.result.json", "linked.toml", "linked.kvrun"):
            (self.out / name).symlink_to(root / "home" / "kvtune" / "notes")
        self.kept = snapshot(root)
        shutil.copy(GOLDEN / "schema1-real.kvrun", self.out / f"{RUN}.kvrun")
        for path in root.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)

    def _copy_of_a_scratch_folder(self) -> None:
        made = self.root / "temp" / "kvtune-sim-0"
        os.close(make(made))
        shutil.copytree(made, made.with_name("kvtune-sim-copy"))
        shutil.rmtree(made)

    def check(self, after: str) -> None:
        now = snapshot(self.root)
        assert {name: now.get(name) for name in self.kept} == self.kept, after


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    for name, value in {"HOME": "home", "TMPDIR": "temp", "KVTUNE_OUTPUT": "out"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "out")
    return made


SMALL = "decode:requests=2,prompt=16,output=4"
SEARCH = ("tiny-opt", "-w", SMALL, "--on", "sim")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("runs",),
    ("runs", "--state", "unreadable", "--delete", "--yes"),
    ("runs", "mine.txt", "mine.kvrun", "torn.kvrun", "linked.kvrun", "--delete", "--yes"),
    ("report", "last"),
    ("report", "last", "last"),
    ("report", "last", "-o", "linked.html"),
    ("export", "last", "--csv"),
    ("export", "last", "--perfetto"),
    ("export", "last", "--perfetto", "-o", "linked.toml"),
    ("compare", "last", "last"),
    ("recipe", "list"),
    ("recipe", "export", "gemma-3-4b-cpu", "-o", "."),
    ("bounds", "-w", SMALL),
    *(("sweep", *SEARCH, "--study", f) for f in ("mine.jsonl", "mine.result.json", "linked.jsonl")),
    *(("tune", *SEARCH, "--study", f) for f in ("mine.jsonl", "mine.txt")),
    ("tune", *SEARCH, "--study", "new.jsonl", "--recipe", "mine.toml"),
    ("tune", *SEARCH, "--study", "new.jsonl", "--recipe", "linked.toml"),
    ("runs", "--delete", "--yes"),
)


@pytest.mark.full
@pytest.mark.vllm
def test_no_command_changes_a_byte_of_a_persons_files(world: World) -> None:
    for argv in COMMANDS:
        run(argv)
        world.check(" ".join(argv))
    assert not (world.out / f"{RUN}.kvrun").exists(), "the run itself is deleted"


@pytest.mark.vllm
@pytest.mark.parametrize("number", first_of([signal.SIGKILL, signal.SIGTERM, signal.SIGHUP]))
def test_a_command_that_is_killed_while_it_has_folders_changes_none_either(
    world: World, number: signal.Signals
) -> None:
    """The next command removes what a kill left, and nothing else."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtune", "profile", *SEARCH],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not list((world.root / "temp").glob(f"{PREFIX}sim-????????/*")):
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), said
    assert number == signal.SIGKILL or f"interrupted by {number.name}".encode() in said
    world.check(number.name)
    left = [path.name for path in (world.root / "temp").glob(f"{PREFIX}sim-????????")]
    assert bool(left) == (number == signal.SIGKILL)
    code = "from pathlib import Path; from kvtune.base.scratch import sweep; sweep(Path('../temp')); sweep(Path())"
    late = time.monotonic() + 120
    while left_folders := _kvtunes_own(world):
        assert time.monotonic() < late, [sorted(at.rglob("*")) for at in left_folders]
        subprocess.run([sys.executable, "-c", code], check=True)
    world.check(f"{number.name}, and the next command")


def _kvtunes_own(world: World) -> list[Path]:
    """Folders that the killed command left; its simulator ends with it, and has no lock then.

    One that was killed before it had written the mark is empty, and stays: nothing proves whose it is.
    """
    kept = {Path(name).parts[1] for name in world.kept}
    places = (world.root / "temp", world.out)
    ours = [
        p for at in places for p in at.glob("*") if p.name.startswith((PREFIX, HIDDEN)) and p.name not in kept
    ]
    return [p for p in ours if any(file.stat().st_size for file in p.rglob("*"))]
