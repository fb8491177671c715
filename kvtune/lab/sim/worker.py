"""The simulator process: `python -m kvtune.lab.sim.worker`. Imports vLLM once and runs each job in a fork of itself.

The core patches vLLM's classes, so each fork runs one job with one choice of core, writes the run to a file and
exits. What a job had to import besides, its parent imports when it has ended, so that no later fork does so again.
Jobs and reports are messages (`kvtune/base/dialogue.py`). At the end of input, or on SIGTERM, running jobs end early
and write partial runs. The second argument names a model whose code is also imported before the first fork, the third
the GPU of --like-device whose vLLM this process has; "" for none. A job for another device goes to another simulator
process, which this one starts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import msgspec

from kvtune.base import children
from kvtune.base.dialogue import Frames, Refused, framed, tell
from kvtune.base.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.data.platforms import Platform, device
from kvtune.lab.as_if.deferred import defer
from kvtune.lab.setup.setup import Load, Setup
from kvtune.plugin.probe.lifetime import die_with_parent
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.requests.loads.sources import Sources
from kvtune.requests.types import Workload

POLL_S = 0.05
KEPT = 2
"""Workloads that are kept as built."""

IN_TRANSIT = 1
"""How much a run file is compressed that the parent reads at once, and removes."""

PRELOAD = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing._internal.distributed.fake_pg",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.engine.arg_utils",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.model_executor.model_loader.utils",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.utils",
    "vllm.v1.worker.gpu.attn_utils",
    "kvtune.lab.engine.config",
    "kvtune.plugin.core.plugin",
    "kvtune.plugin.core.steps.scheduler",
    "kvtune.lab.engine.host",
    "kvtune.lab.device.kv_specs",
    "kvtune.lab.device.meta_model",
    "kvtune.plugin.probe.describe",
    "kvtune.lab.sim.executor",
    "kvtune.lab.sim.replay",
)
"""Modules that nearly every job needs. They are imported once, before the first fork."""

OF_A_CPU = (
    "vllm.model_executor.kernels.linear",
    "vllm.v1.attention.backends.cpu_attn",
)
"""Modules that nearly every job without a GPU needs besides."""

OF_A_GPU = (
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flashinfer",
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.turboquant_attn",
)
"""Modules that nearly every job for a GPU needs besides. Some do not import on every machine."""


class ReplayJob(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """One replay of a set-up's load. `out`: path of the run file to write."""

    number: int
    setup: Setup
    out: str


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """A message to the parent about job `number` (-1: the worker itself). Of a job that failed: `Refused`."""

    kind: Literal["ready", "progress", "done"]
    number: int = -1
    finished: int = 0
    requests: int = 0
    virtual_s: float = 0.0
    elapsed_s: float = 0.0


def answer(job: ReplayJob, workload: Workload, reports: int) -> None:
    """Run the job in this process and write its run file; report the end or the error."""
    from kvtune.data.run.file import write_run
    from kvtune.lab.sim.engine_types import ReplayProgress
    from kvtune.lab.sim.replay import replay

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    def progress(now: ReplayProgress) -> None:
        tell(reports, Report(kind="progress", number=job.number, **asdict(now)))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = replay(workload, job.setup, progress=progress, stop=lambda: stopping)
        write_run(run, Path(job.out), level=IN_TRANSIT)
        tell(reports, Report(kind="done", number=job.number))
    except KvtuneError as error:
        tell(reports, failed(job.number, error))
    except BaseException as error:
        text = str(error).strip().splitlines() or ["no message"]
        message = f"the replay failed: {type(error).__name__}: {text[0]}"
        hint = "run the command again with --debug, or report it with the workload"
        tell(reports, failed(job.number, KvtuneError(message, hint)))


def failed(number: int, error: KvtuneError) -> Refused:
    """Return what the parent is told, in at most PIPE_BUF bytes."""
    return Refused(error.message[:700], error.hint[:300], error.exit_code, number)


def gpu(platform: Platform | None) -> str:
    """Return the key of a GPU of --like-device, whose vLLM its jobs need; "" for this machine's vLLM."""
    return platform.key if platform is not None and platform.kind == "cuda" else ""


class Server:
    """Forks a child for each job, and reports the job as failed if a signal kills the child. `reports`: their pipe."""

    def __init__(self, reports: int, platform_key: str = "") -> None:
        self._reports = reports
        self._platform_key = platform_key
        self._sources = Sources()
        self._loads: list[Load] = []  # the last that were built, which can take seconds
        self._others: dict[str, children.Child] = {}  # simulators of other devices
        self._children: dict[int, int] = {}  # pid -> job
        self._imported: dict[int, int] = {}  # pid -> pipe with the modules that it imported
        self._frames = Frames[ReplayJob](ReplayJob)
        self._stopping = False

    def serve(self, descriptor: int) -> None:
        ended = False
        while not ended:
            readable, _, _ = select.select(
                [descriptor], [], [], POLL_S if self._children or self._others else None
            )
            if readable:
                chunk = os.read(descriptor, 1 << 16)
                ended = not chunk
                for job in self._frames.feed(chunk):
                    wanted = gpu(job.setup.platform)
                    if wanted == self._platform_key:
                        self._start(job)
                    else:
                        self._pass_on(job, wanted)
            self._reap()
        self.stop()
        while self._children or self._others:
            self._reap(block=True)

    def stop(self) -> None:
        self._stopping = True
        for other in self._others.values():
            assert other.stdin is not None
            other.stdin.close()
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)

    def _pass_on(self, job: ReplayJob, platform_key: str) -> None:
        """Give a job to the simulator of its device, which reports to the same pipe."""
        other = self._others.get(platform_key)
        if other is None:
            words = (str(self._reports), job.setup.model, platform_key)
            command = children.python("kvtune.lab.sim.worker", *words)
            other = children.start(command, stdin=subprocess.PIPE, pass_fds=[self._reports])
            self._others[platform_key] = other
        assert other.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_reap` reports
            other.stdin.writelines(framed(job))
            other.stdin.flush()

    def _start(self, job: ReplayJob) -> None:
        try:
            workload = self._built(job.setup.load)  # children share its memory
        except KvtuneError as error:
            tell(self._reports, failed(job.number, error))
            return
        gc.freeze()  # garbage collections would write to memory that children share
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = set(sys.modules)
        child = os.fork()
        if child == 0:
            try:
                die_with_parent(signal.SIGKILL)
                answer(job, workload, self._reports)
                os.write(writer, " ".join(name for name in sys.modules if name not in before).encode())
            finally:
                os._exit(0)
        os.close(writer)
        self._children[child], self._imported[child] = job.number, reader

    def _built(self, load: Load) -> Workload:
        """Build a load's workload, or take that of a job before. Without a hash the file may be another by now."""
        kept = next((load_kept for load_kept in self._loads if load_kept == load and load.hash), load)
        workload = kept.built(self._sources)
        self._loads = [kept, *(load_kept for load_kept in self._loads if load_kept is not kept)][:KEPT]
        return workload

    def _reap(self, block: bool = False) -> None:
        while self._children or self._others:
            pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
            if pid == 0:
                return
            ended = [key for key, other in self._others.items() if other.pid == pid]
            if ended:
                self._end_other(ended[0])
                continue
            number = self._children.pop(pid, -1)
            if (reader := self._imported.pop(pid, -1)) >= 0:
                import_also(reader)
            if number >= 0 and os.WIFSIGNALED(status):
                name = signal.Signals(os.WTERMSIG(status)).name
                if self._stopping and name == "SIGTERM":  # before the replay began
                    tell(self._reports, Refused("interrupted", "", EXIT_INTERRUPTED, number))
                    continue
                hint = "SIGKILL mostly means out of memory: run fewer replays at once"
                tell(
                    self._reports, Refused(f"the simulator process was killed by {name}", hint, number=number)
                )

    def _end_other(self, platform_key: str) -> None:
        """Report that the simulator of another device has ended, unless it was asked to."""
        other = self._others.pop(platform_key)
        other.returncode = 0  # it has been waited for
        if not self._stopping:
            message = f"the simulator process of {platform_key or 'this machine'} ended"
            tell(self._reports, Refused(message, "run the command again with --debug"))


def import_also(reader: int) -> None:
    """Import the modules of vLLM and kvtune that an ended child names, but none that may initialise a GPU."""
    with open(reader, "rb", buffering=0) as pipe:
        names = (pipe.read(1 << 20) or b"").decode().split()
    names = [name for name in names if name.startswith(("vllm.", "kvtune."))]
    for name in names if names and not has_accelerator() else ():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def prepare(model: str, platform_key: str = "") -> None:
    """Import the modules that every job needs and the class of `model`. Must start no threads, which a fork would lose.

    The garbage collector is off meanwhile: it would find nothing, and take a quarter of the time.
    """
    from kvtune.lab.sim.build import run_on

    gc.disable()
    platform = device(platform_key) if platform_key else None
    run_on(platform)
    for name in PRELOAD:
        importlib.import_module(name)
    for name in OF_A_GPU if platform_key else OF_A_CPU:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    if model and not starts_accelerator(lambda: import_class(model, platform)):
        import_class(model, platform)
    gc.freeze()
    gc.enable()


def not_imported(error: ImportError) -> Refused:
    """Return a report of why imports failed: no vLLM, a version unknown to the simulator, or a broken installation."""
    from kvtune.lab.setup.resolve import check_vllm

    try:
        check_vllm()
    except KvtuneError as refused:
        return failed(-1, refused)
    hint = "simulating needs vLLM: `pip install 'kvtune[cpu]'` or `'kvtune[cuda]'`"
    return failed(-1, KvtuneError(f"vLLM cannot be imported: {error}", hint, 2))


def starts_accelerator(work: Callable[[], None]) -> bool:
    """Whether `work` initialises the GPU, tried in a fork: forks of a process with an initialised GPU fail.

    Importing some model classes does, as their kernels query the device; each job's fork then imports the class itself.
    """
    if not has_accelerator():
        return False
    child = os.fork()
    if child == 0:
        started = True
        try:
            work()
            started = accelerator_started()
        finally:
            os._exit(int(started))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def has_accelerator() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda_alike()) and STATE.platform is None


def accelerator_started() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def import_class(model: str, platform: Platform | None = None) -> None:
    """Import the code of a model's class; do nothing if the model cannot be configured without a job's flags."""
    from kvtune.lab.engine.config import engine_config, parse_engine_args
    from kvtune.lab.setup.resolve import resolve
    from kvtune.lab.sim.build import look_at_models_here, only_text

    look_at_models_here()  # vLLM remembers a class that its child could not import, for all jobs
    # A job configures the model with its own flags, and reports the error if that fails, too.
    with contextlib.suppress(Exception):
        resolved = resolve(model, dummy=True, engine_args=[], platform=platform)
        if resolved.offline:
            os.environ["HF_HUB_OFFLINE"] = "1"
        arguments = parse_engine_args(resolved.args)
        only_text(arguments)
        config = engine_config(arguments)
        from vllm.model_executor.models import ModelRegistry

        ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
        if config.model_config.quantization:  # imports the code of every quantization
            from vllm.model_executor.layers.quantization import get_quantization_config

            get_quantization_config(config.model_config.quantization)


def main(reports: int, model: str = "", platform_key: str = "") -> None:
    server = Server(reports, platform_key)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes our input
    die_with_parent(signal.SIGTERM)
    commands = select.poll()
    commands.register(sys.stdin.fileno(), 0)
    if commands.poll(0):  # nobody is left to write to it: the parent died before it was heeded
        os._exit(EXIT_INTERRUPTED)
    for name in ("KVTUNE_CORE", "KVTUNE_RECIPE", "KVTUNE_SET", "KVTUNE_RUN_DIR"):
        os.environ.pop(name, None)  # each job chooses its own core
    STATE.workers = False
    try:
        defer()
        prepare(model, platform_key)
    except ImportError as error:
        tell(reports, not_imported(error))
        return
    tell(reports, Report(kind="ready"))
    server.serve(sys.stdin.fileno())
    os._exit(0)  # skips torch's shutdown: there is nothing to clean up, and it logs at length


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
