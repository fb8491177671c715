"""A soak's servers, core and stock: `vllm serve` of a recipe or a twin; and the trouble that is not a request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, monotonic_ns, sleep

import aiohttp
import psutil

from bench.soak.client import MODEL
from bench.soak.models import MODELS
from bench.soak.trouble import LONGEST, SEQUENCES, Fault
from kvtune.base.scratch import sweep
from kvtune.data.layout.models import ON_CPU
from kvtune.lab.engine.process import ProcessSampler, shared_memory_files
from kvtune.lab.engine.profile import socket_folder
from kvtune.plugin.probe.lifetime import die_with_parent
from tests.lab.engine.serving import environment, wait_until_up
from tests.lab.engine.twins import written
from tests.living import living
from tests.weights.kvtune_test_weights import LOAD_FORMAT

ROOT = Path(__file__).parents[2]
SIDES = ("kvtune", "stock")
PROCESSES = ("API server", "EngineCore", "worker")
ENGINE_CORE, WORKER = 1, 2
STOP_S = 60.0
"""A server that was asked to stop and lives longer hangs."""

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


@dataclass(frozen=True, slots=True)
class Kind:
    """What servers are started with. `trace`: where the core's server records its traffic."""

    model: str
    tokenizer: Path
    speculate: bool = False
    trace: Path | None = None
    plant: str = ""


@dataclass(slots=True)
class Server:
    """One of the two. `since_ns`: when it was, on the clock of its records. `pids`: of PROCESSES, as last seen."""

    core: str
    base: str
    folder: Path
    process: subprocess.Popen[bytes]
    sampler: ProcessSampler
    since_ns: int = 0
    pids: list[int] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "serve.log"

    def wait(self) -> None:
        """Until it answers."""
        wait_until_up(self.process, self.base, self.log)
        self.sampler.start()
        self.since_ns = monotonic_ns()

    @property
    def up(self) -> bool:
        return self.process.poll() is None

    async def census(self, session: aiohttp.ClientSession) -> list[dict[str, int]]:
        """Of each of PROCESSES."""
        async with session.get(f"{self.base}/soak/census") as answer:
            assert answer.status == 200, await answer.text()
            found: list[dict[str, int]] = await answer.json(content_type=None)
        assert len(found) == len(PROCESSES)
        self.pids = [each["pid"] for each in found]
        return found

    async def suffer(self, session: aiohttp.ClientSession, fault: Fault, clock_s: float) -> None:
        """`clock_s`: what the wall clock is ahead by, after this fault."""
        if fault.kind == "reset":
            running = "true" if fault.value else "false"
            url = f"{self.base}/reset_prefix_cache?reset_running_requests={running}"
            async with session.post(url) as answer:
                assert answer.status == 200, await answer.text()
        elif fault.kind == "clock":
            async with session.post(f"{self.base}/soak/clock?s={clock_s}") as answer:
                assert answer.status == 200, await answer.text()
        elif fault.kind == "pause":
            os.kill(self.pids[WORKER], signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.value)
            finally:
                os.kill(self.pids[WORKER], signal.SIGCONT)
        else:
            await self._py_spy()

    async def _py_spy(self) -> None:
        """Attach to EngineCore, and be killed while at work."""
        spy = str(Path(sys.executable).with_name("py-spy"))
        out = str(self.folder / "spied.txt")
        watcher = await asyncio.create_subprocess_exec(
            *(spy, "record", "-p", str(self.pids[ENGINE_CORE]), "-d", "60", "-f", "raw", "-o", out),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await asyncio.sleep(1.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                watcher.kill()
            await watcher.wait()

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        async with session.get(f"{self.base}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def stop(self) -> str:
        """SIGTERM; says what was wrong with the way it went, "" if nothing."""
        before = self.processes()
        self.process.send_signal(signal.SIGTERM)
        end = monotonic() + STOP_S
        try:
            self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            return f"{self.core}: alive {STOP_S:.0f} s after SIGTERM"
        while (alive := living(each.pid for each in before)) and monotonic() < end:
            sleep(0.2)
        if alive:
            return f"{self.core}: left processes {alive}"
        files = shared_memory_files()
        left = [str(files[inode]) for inode in self.sampler.shared_memory & files.keys()]
        return f"{self.core}: left shared memory {left}" if left else ""


@contextmanager
def server(core: str, kind: Kind, folder: Path) -> Iterator[Server]:
    """One server that starts, until the block ends; nothing of it lives on."""
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**environment(core, folder), "VLLM_SERVER_DEV_MODE": "1", "KVTUNE_SOAK_PLANT": ""}
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "bench/soak/plugin"), str(ROOT / "tests/weights"), variables["PYTHONPATH"]]
    )
    if core == "kvtune":
        variables |= {"KVTUNE_METRICS_DIR": str(folder / "metrics")}  # a recipe's env.sh names its own
        variables |= {"KVTUNE_AUDIT": "raise", "KVTUNE_PROBE": "light", "KVTUNE_SOAK_PLANT": kind.plant}
        variables |= {"KVTUNE_RECORD": str(kind.trace)} if kind.trace is not None else {}
    with socket_folder() as sockets, (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*_command(core, kind.model, folder), "--port", str(port), *_flags(kind)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
            cwd=ROOT,
            env={**os.environ, **variables, **sockets},
        )
        sampler = ProcessSampler(process.pid, interval_s=1.0)
        try:
            yield Server(core, f"http://127.0.0.1:{port}", folder, process, sampler)
        finally:
            sampler.stop()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            sweep(Path(tempfile.gettempdir()))  # what a server that was killed could not remove


def _command(core: str, model: str, folder: Path) -> list[str]:
    """Plain `vllm serve` with an exported recipe, for stock without its core; of a twin by its folder."""
    vllm_serve = [sys.executable, "-m", "kvtune.lab.engine.serve"]
    if twin := MODELS[model].twin:
        return [*vllm_serve, written(twin, folder)]
    cli = [sys.executable, "-m", "kvtune", "recipe", "export", f"{model}-cpu", "-o", str(folder)]
    subprocess.run(cli, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    sourced = f". {shlex.quote(str(folder / 'env.sh'))} && " if core == "kvtune" else ""
    return ["sh", "-c", f'{sourced}exec "$@"', "sh", *vllm_serve, "--config", str(folder / "config.yaml")]


def _flags(kind: Kind) -> list[str]:
    model = MODELS[kind.model]
    given: dict[str, str] = {
        **({**ON_CPU, "load-format": LOAD_FORMAT} if model.twin else {}),
        **({"block-size": str(model.block)} if model.block else {}),
        "served-model-name": MODEL,
        "tokenizer": str(kind.tokenizer),
        "no-skip-tokenizer-init": "",
        "max-num-seqs": str(SEQUENCES),
        "max-model-len": str(LONGEST),
        "max-num-batched-tokens": "512",
        "num-gpu-blocks-override": str(model.blocks),
        "scheduling-policy": "priority",
        "middleware": "bench.soak.inside.Front",
        "worker-extension-cls": "bench.soak.inside.Extension",
        "logprobs-mode": "processed_logprobs",
        "disable-uvicorn-access-log": "",
    }
    if kind.speculate:
        given["speculative-config"] = NGRAM
    given.pop("skip-tokenizer-init", None)
    words = [word for name, value in given.items() for word in (f"--{name}", value) if word]
    return [*words, *model.flags]


@contextmanager
def servers(kind: Kind, folder: Path) -> Iterator[list[Server]]:
    """The two of them, up: SIDES."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(server(core, kind, folder / core)) for core in SIDES]
        for each in started:
            each.wait()
        yield started
