"""Replays that commands made before, on disk, by all that decides them: engine, load, code, machine.

A replay whose model or flags name what may change unseen (the hub, other files) is not kept. In the CLI's process.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import msgspec

import kvtune
from kvtune.base.errors import KvtuneError
from kvtune.base.files import cache_folder, read_regular, replacing
from kvtune.data.file_flags import read_flags
from kvtune.data.layout.models import builtin
from kvtune.data.run.file import SUFFIX, read_run
from kvtune.data.run.machine import this_host
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Load, Setup

SWITCH = "KVTUNE_REPLAYS"
MOST_BYTES = 512 << 20
"""All files together: those go that were not used for longest."""
MOST_FILES = 1000
"""A model's folder with more is another kind of folder, and is not looked through."""
READ_BYTES = 1 << 20
"""Larger files of a model (weights, vocabularies) are told apart by size and time."""
VARIABLES = ("CUDA_", "HF_", "KVTUNE_", "PYTHON", "TORCH", "TRANSFORMERS_", "VLLM_")
"""Environment variables that may decide what an engine does, by their beginnings."""


def saved_replays() -> SavedReplays | None:
    """Return this user's saved replays; None without a place for them, or if the user wants none."""
    home = cache_folder()
    return None if home is None or os.environ.get(SWITCH) == "off" else SavedReplays(home / "replays")


class SavedReplays:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def name(self, setup: Setup) -> str:
        """Return the name of a set-up's replay, which other engines and loads do not have; "" if it is not known."""
        try:
            read_flags(setup.engine_args, "")  # refuses flags that name files or models
            model = _model(setup.model)
        except (OSError, KvtuneError):
            return ""
        load, engine = setup.load.built(), msgspec.json.encode(msgspec.structs.replace(setup, load=Load()))
        names = [(each.id, each.kind, each.session, each.replica) for each in load.requests]
        work = (load.hash, load.name, load.spec, load.seed, load.params, load.note, names)
        return blake2b(repr((self._here, engine, model, work)).encode(), digest_size=20).hexdigest()

    def run(self, name: str) -> Run | None:
        """Return a replay that was made before, if it was and is not damaged."""
        with suppress(OSError, KvtuneError):
            run = read_run(self._path(name))
            os.utime(self._path(name))
            return run
        return None

    def add(self, name: str, made: Path) -> None:
        """Keep a copy of a complete replay's file, if there is space, and it takes no more than a quarter of it."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            run = read_regular(made, MOST_BYTES // 4)
            with replacing(self._path(name), private=True) as copy:
                copy.write(run)
            total = 0
            for path, size, _ in sorted(_files(str(self._folder)), key=lambda file: -file[2]):
                total += size
                if total > MOST_BYTES and path.endswith(SUFFIX):
                    Path(path).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    @cached_property
    def _here(self) -> str:
        """What replays depend on besides their set-up: the code of kvtune and vLLM, other packages, the machine."""
        vllm = find_spec("vllm")
        folders = [Path(kvtune.__file__).parent]
        folders += [Path(vllm.origin).parent] if vllm is not None and vllm.origin is not None else []
        code = [sorted(_files(str(folder))) for folder in folders]
        packages = sorted(str(package) for place in sys.path for package in Path(place).glob("*-info"))
        chosen = sorted(pair for pair in os.environ.items() if pair[0].startswith(VARIABLES))
        machine = (platform.node(), sys.version, msgspec.to_builtins(this_host()))
        return repr((code, packages, chosen, machine))


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path) if entry.name != "__pycache__" else ()
            else:
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns


def _model(model: str) -> list[tuple[str, int, bytes | int]]:
    """Return what a model's folder holds. A built-in one is part of the code. OSError if it is no such folder."""
    if builtin(model) is not None:
        return []
    files = sorted(islice(_files(str(Path(model).expanduser())), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise OSError
    return [
        (path, size, read_regular(Path(path), READ_BYTES) if size <= READ_BYTES else changed_ns)
        for path, size, changed_ns in files
    ]
