"""The simulator process of a study: `python -m kvtune.tune.sim_worker FOLDER SPEC SEED MODEL`.

Imports vLLM and the model's code once; each trial (FOLDER/N.ask) is replayed by a fork of this process, because one
process runs one choice of core, and leaves FOLDER/N.answer. A line `N STATUS` on stdout says that a fork has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvtune.errors import KvtuneError
from kvtune.probe.lifetime import die_with_parent
from kvtune.sim.settings import SimSettings
from kvtune.workload.types import Workload

MODULES = (
    "vllm.v1.engine.core",
    "vllm.model_executor.model_loader.utils",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.worker.gpu.attn_utils",
    "vllm.v1.worker.cpu_worker",
    "kvtune.sim.replay",
    "kvtune.sim.meta_model",
    "kvtune.sim.executor",
    "kvtune.analysis.summary",
    "scipy.stats",
)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    settings: SimSettings
    keep_run: str = ""  # write the run file there


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    summary: dict[str, Any] = {}
    elapsed_s: float = 0.0
    failed: str = ""  # why there is no summary
    hint: str = ""


def answer(ask: Ask, workload: Workload) -> Answer:
    """Replay the workload under the asked settings. The core is loaded by its own entry point."""
    from kvtune.analysis.summary import summary
    from kvtune.core.plugin import register
    from kvtune.run.file import write_run
    from kvtune.sim.build import choose_core
    from kvtune.sim.replay import replay

    started = time.monotonic()
    choose_core(ask.settings)
    register()  # this process's parent has loaded vLLM's plugins already, without a core
    run = replay(workload, ask.settings)
    if ask.keep_run:
        write_run(run, Path(ask.keep_run))
    return Answer(summary=summary(run, workload), elapsed_s=time.monotonic() - started)


def answer_file(folder: Path, number: int, workload: Workload) -> None:
    try:
        ask = msgspec.json.decode((folder / f"{number}.ask").read_bytes(), type=Ask)
        said = answer(ask, workload)
    except KvtuneError as error:
        said = Answer(failed=error.message, hint=error.hint)
    except BaseException as error:
        text = str(error).strip().splitlines() or ["no message"]
        said = Answer(failed=f"{type(error).__name__}: {text[0]}")
    part = folder / f"{number}.part"
    part.write_bytes(msgspec.json.encode(said))
    part.rename(folder / f"{number}.answer")


def prepare(model: str) -> None:
    """Import what every trial needs, the model's class too. No threads may be started here: forks would lack them."""
    for name in MODULES:
        with contextlib.suppress(ImportError):  # another platform's worker
            importlib.import_module(name)
    from kvtune.engine.host import parse_engine_args
    from kvtune.engine.resolve import resolve

    resolved = resolve(model, dummy=True, engine_args=[])
    if resolved.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    # A model that cannot be configured without the study's own flags: each trial says what is wrong.
    with contextlib.suppress(Exception):
        config = parse_engine_args(resolved.args).create_engine_config()
        from vllm.model_executor.models import ModelRegistry

        ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)


def serve(folder: Path, workload: Workload, out: int) -> None:
    """Fork a trial for each number on stdin; tell of each that ended."""
    wake, bell = os.pipe()
    os.set_blocking(bell, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _reap(running, out)
        if 0 not in ready:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            for child in running:
                os.kill(child, signal.SIGKILL)
            os._exit(0)  # torch and triton have nothing to put away, and say so at length
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number = int(line)
            child = os.fork()
            if child == 0:
                _trial(folder, number, workload)
            running[child] = number


def _trial(folder: Path, number: int, workload: Workload) -> None:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        answer_file(folder, number, workload)
    finally:
        os._exit(0)


def _reap(running: dict[int, int], out: int) -> None:
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        number = running.pop(child, None)
        if number is not None:
            os.write(out, f"{number} {status}\n".encode())


def main(arguments: Sequence[str]) -> None:
    from kvtune.workload.spec import build

    folder, spec, seed, model = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes our stdin
    die_with_parent(signal.SIGKILL)
    out = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    for name in ("KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_SET", "KVTUNE_PROBE", "KVTUNE_RUN_DIR"):
        os.environ.pop(name, None)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    workload = build(spec, seed=int(seed))
    prepare(model)
    gc.collect()
    gc.freeze()  # forks share what is never touched
    os.write(out, b"ready 0\n")
    serve(Path(folder), workload, out)


if __name__ == "__main__":
    main(sys.argv[1:])
