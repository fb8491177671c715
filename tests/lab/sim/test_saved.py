"""Replays that were made before: what is read again, and all that makes a replay another one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtune.data.layout.models import FOLDER
from kvtune.data.platforms import device
from kvtune.lab.setup.setup import Load, Setup, Simulated
from kvtune.lab.sim import saved
from kvtune.lab.sim.saved import SavedReplays, saved_replays
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload
from tests.hostile import GOLDEN
from tests.simulator import Lent, SharedLab, run


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replays are saved, in this folder."""
    monkeypatch.setenv("KVTUNE_REPLAYS", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtune" / "replays"


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """A model of the user's own, and a log."""
    shutil.copytree(FOLDER / "tiny-llama", tmp_path / "model")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": [1] * 40, "max_tokens": n}) + "\n" for n in (1, 2, 3)))
    flags = ["--num-gpu-blocks-override", "64"]
    model = str(tmp_path / "model")
    return Setup(model=model, load=_load(f"requests:path={log}"), engine_args=flags, device=Simulated())


def _load(spec: str, seed: int = 0) -> Load:
    return Load.of(build(spec, seed=seed))


def _rewritten(path: Path, old: str, new: str) -> None:
    about = path.stat()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


CHANGES: dict[str, Callable[[Setup], Setup]] = {
    "a flag": lambda setup: setup.with_flags(max_num_seqs=2),
    "a setting of the core": lambda setup: setup.with_core(pin_window=1024),
    "the device": lambda setup: Setup(
        **{name: getattr(setup, name) for name in ("model", "load", "engine_args")}, platform=device("h100")
    ),
    "when it ends": lambda setup: setup.replayed(end_s=2.0),
    "another load": lambda setup: setup.with_load(build("zipf:requests=3")),
    "other names of the same requests": lambda setup: setup.with_load(_renamed(setup.load.built())),
}


def _renamed(load: Workload) -> Workload:
    return replace(load, requests=[replace(request, id=f"{request.id}x") for request in load.requests])


@pytest.mark.parametrize("change", CHANGES)
def test_another_set_up_has_another_name(change: str, setup: Setup, kept: Path) -> None:
    replays = SavedReplays(kept)
    name = replays.name(setup)
    assert name and name == SavedReplays(kept).name(setup)
    assert replays.name(CHANGES[change](setup)) not in ("", name)


def test_seeds_and_changed_files_have_another_name(setup: Setup, kept: Path, tmp_path: Path) -> None:
    """The files keep their lengths and times."""
    names = [SavedReplays(kept).name(setup)]
    _rewritten(tmp_path / "log.jsonl", "[1, 1,", "[1, 7,")
    names.append(SavedReplays(kept).name(setup.with_load(build(setup.load.spec))))
    _rewritten(tmp_path / "model" / "config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 5')
    names.append(SavedReplays(kept).name(setup))
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    names.append(SavedReplays(kept).name(setup))
    names += [
        SavedReplays(kept).name(setup.with_load(build("zipf:requests=3", seed=seed))) for seed in (0, 1)
    ]
    assert len(set(names)) == 6 and all(names)


def test_another_vllm_has_another_name(
    setup: Setup, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [SavedReplays(kept).name(setup)]
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")
    names.append(SavedReplays(kept).name(setup))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (tmp_path / "packages" / "transformers-9.9.dist-info").mkdir(parents=True)
    names.append(SavedReplays(kept).name(setup))
    scheduler = tmp_path / "vllm" / "v1" / "scheduler.py"
    scheduler.parent.mkdir(parents=True)
    monkeypatch.setattr(
        saved, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "vllm" / "__init__.py"))
    )
    for code in ("", "a = 1"):
        scheduler.write_text(code)
        names.append(SavedReplays(kept).name(setup))
    assert len(set(names)) == 5 and all(names)


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("Qwen/Qwen3-8B", ""),
        ("missing/folder", ""),
        ("tiny-llama", "--hf-overrides {}"),
        ("tiny-llama", '--speculative-config {"method":"eagle","model":"draft"}'),
        ("tiny-llama", "--config engine.yaml"),
    ],
)
def test_what_may_change_unseen_is_not_kept(model: str, flags: str, kept: Path) -> None:
    assert not SavedReplays(kept).name(
        Setup(model=model, engine_args=flags.split(), load=_load("zipf:requests=3"))
    )


def test_a_folder_of_other_things_is_not_looked_through(
    setup: Setup, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "MOST_FILES", 5)
    assert SavedReplays(kept).name(setup)
    (tmp_path / "model" / "cycle").symlink_to(tmp_path / "model")
    assert not SavedReplays(kept).name(setup)
    (tmp_path / "model" / "cycle").unlink()
    for number in range(5):
        (tmp_path / "model" / f"{number}.txt").write_text("")
    assert not SavedReplays(kept).name(setup)


def test_without_a_place_or_by_wish_nothing_is_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert saved_replays() is not None
    monkeypatch.setenv("KVTUNE_REPLAYS", "off")
    assert saved_replays() is None


def test_those_that_were_not_used_for_longest_go(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = next(GOLDEN.glob("schema1-*.kvrun"))
    monkeypatch.setattr(saved, "MOST_BYTES", 5 * made.stat().st_size)
    replays = SavedReplays(kept)
    for place, name in enumerate(("old", "used", "a", "b", "c")):
        replays.add(name, made)
        os.utime(kept / f"{name}.kvrun", (place, place))
    assert replays.run("used") is not None
    replays.add("new", made)
    replays.add("newer", made)
    assert {path.stem for path in kept.iterdir()} == {"b", "c", "used", "new", "newer"}
    monkeypatch.setattr(saved, "MOST_BYTES", 3 * made.stat().st_size)
    replays.add("large", made)
    assert not (kept / "large.kvrun").exists()
    assert {path.stat().st_mode & 0o777 for path in (kept, *kept.iterdir())} == {0o700, 0o600}


LOAD = "rounds:prefixes=4,prefix=512,suffix=16,output=2,rounds=2"
POOL = ("--num-gpu-blocks-override", "12", "--max-model-len", "1024")


class Counting(SharedLab):
    """Counts the replays that are made."""

    def __init__(self) -> None:
        self.opened: list[Lent] = []

    def simulators(self, model: str = "", platform: object = None) -> Lent:
        self.opened.append(Lent(model=model))
        return self.opened[-1]

    def taken(self) -> int:
        made = sum(each.made for each in self.opened)
        self.opened.clear()
        return made


@pytest.mark.full
def test_what_profile_replayed_explain_reads(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged one is made again, and the answer is that of replays that are all made now."""
    monkeypatch.setenv("KVTUNE_OUTPUT", str(tmp_path / "runs"))
    lab = Counting()
    assert run(["profile", "tiny-llama", "--on", "sim", "-w", LOAD, "--", *POOL], lab) == 0
    profiled = lab.taken()
    assert profiled == len([*kept.iterdir()]) >= 3
    answers = []
    for expected in (0, 1, profiled - 1):
        capsys.readouterr()
        assert run(["explain", "last", "--json"], lab) == 0
        answers.append(json.loads(capsys.readouterr().out))
        assert lab.taken() == expected
        if not expected:
            last = max(kept.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            last.write_bytes(last.read_bytes()[:-40])
        else:
            monkeypatch.setenv("KVTUNE_REPLAYS", "off")
    assert answers[0] == answers[1] == answers[2]
