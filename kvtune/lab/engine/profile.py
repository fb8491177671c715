"""Runs one profile from start to run file: checks, work folder, environment, launch, record. In the CLI's process."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from kvtune.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, KvtuneError, UsageError
from kvtune.base.scratch import HIDDEN, PREFIX, made, scratch, sweep
from kvtune.data.flags import settings_given
from kvtune.data.platforms import Platform, origins
from kvtune.data.run.file import SUFFIX, write_run
from kvtune.data.run.folder import taken
from kvtune.data.run.signature import run_identity, signature, write_own, wrote
from kvtune.data.run.types import Run
from kvtune.lab.device.settings import TIMED, Timed, write_device
from kvtune.lab.engine import ask
from kvtune.lab.engine.gpu_needs import check_gpu_needs, check_shared_memory
from kvtune.lab.engine.launch import launch
from kvtune.lab.engine.messages import LOG_FILE, Event, HostPlan
from kvtune.lab.engine.record import record
from kvtune.lab.engine.served import command_of, served
from kvtune.lab.setup.offload_flags import check_room
from kvtune.lab.setup.resolve import check_engine, check_pool, cpu_binding, is_cpu_build, resolve
from kvtune.lab.setup.setup import Setup, Simulated

if TYPE_CHECKING:
    from kvtune.lab.engine.stacks import Stacks


BINDING = "VLLM_CPU_OMP_THREADS_BIND"

FAILED = "engine that did not start"

NEEDED_BYTES = 300 << 20
"""Free space that a run needs: a ring file per process, the engine's log, the run file."""


@dataclass(frozen=True, slots=True)
class Profiled:
    run: Run
    path: Path
    error: KvtuneError | None


@dataclass(frozen=True, slots=True)
class EngineBench:
    """Runs set-ups on the real engine or on a timed device. `output`: the folder of its run files.

    `probe` and `stacks`: what is measured. `environment`: more variables for the engine's processes.
    """

    output: Path = Path("reports")
    probe: str = "light"
    stacks: bool = False
    command: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, setup: Setup, watch: Callable[[Event], None] = lambda event: None) -> Profiled:
        """Run the set-up and write the run file, also if the run ended early. KvtuneError if the load did not start."""
        version = check_engine()
        setup.refuse()
        device = setup.device if isinstance(setup.device, Timed) else None
        platform = setup.machine
        resolved = resolve(
            setup.model,
            dummy=setup.dummy or device is not None,
            engine_args=setup.engine_args,
            platform=platform,
        )
        check_output(self.output)
        if device is not None:
            if not device.specs:
                check_pool(resolved.args)
            given = sorted(settings_given(setup.engine_args))
            device = replace(device, given=given)
            if platform.key and not device.specs:
                # This machine is none: a GPU's engine is imitated by what its vLLM decides.
                like = setup.replayed()
                device = replace(device, specs=ask.specs(like))
            setup = replace(setup, device=device)
        else:
            check_machine(setup.engine_args, cpu_build=is_cpu_build())
        stacks = None
        if self.stacks:
            from kvtune.lab.engine.stacks import Stacks

            stacks = Stacks.preflight()
        workload = setup.load.built()
        plan = HostPlan(setup=setup, vllm_args=resolved.args)
        environment = environment_of(setup, self, resolved.offline)
        with reserved(self.output, run_name(setup)) as (folder, path):
            if device is not None:
                write_device(device, folder)
            with socket_folder() as sockets:
                outcome = launch(
                    plan,
                    folder,
                    sockets | environment,
                    _until_measured(watch, stacks),
                    (lambda pid: stacks.start(pid, folder)) if stacks is not None else (lambda pid: None),
                )
            if stacks is not None:
                stacks.stop()
            if cpus := environment.get(BINDING):
                outcome.notes.append(f"kvtune gave each worker its own CPUs: {BINDING}={cpus!r}")
            failed = outcome.error is not None and outcome.error.exit_code == EXIT_FAILED
            if not outcome.start_ns and outcome.error is not None:
                raise (
                    with_log(outcome.error, folder, failed_log(self.output), FAILED)
                    if failed
                    else outcome.error
                )
            given_by = frozenset(setup.from_recipe)
            run = record(
                folder,
                plan,
                workload,
                outcome,
                command=self.command,
                probe_level=self.probe,
                decided=origins(
                    settings_given(setup.engine_args), given_by, _asked(outcome.engine, platform)
                ),
            )
            if not run.header.engine.vllm:
                engine = replace(
                    run.header.engine, vllm=version
                )  # it died before it reported a configuration
                run = Run(replace(run.header, engine=engine), run.tables)
            if setup.load.slo:
                run = run.with_extra(slo=setup.load.slo)
            if stacks is not None:
                run = stacks.attach(run, path)
            write_run(run, path, new=True)
            if outcome.error is not None and failed:
                kept, identity = path.with_suffix(".log"), run_identity(run.header)
                outcome.error = with_log(outcome.error, folder, kept, identity)
            elif outcome.error is not None and outcome.error.exit_code == EXIT_INTERRUPTED:
                outcome.error = interrupted("what was measured", path)
            return Profiled(run, path, outcome.error)

    @contextlib.contextmanager
    def serve(self, setup: Setup) -> Iterator[tuple[str, Callable[[], str]]]:
        """Serve the set-up; yield the server's URL, and what tells why it has ended (`served.py`)."""
        resolved = resolve(setup.model, dummy=setup.dummy, engine_args=setup.engine_args)
        check_machine(setup.engine_args, cpu_build=is_cpu_build())
        command = command_of(setup.model, [*resolved.args, "--enable-prompt-tokens-details"])
        with (
            socket_folder() as sockets,
            served(command, sockets | environment_of(setup, self, resolved.offline)) as server,
        ):
            yield server


def interrupted(what: str, path: Path) -> KvtuneError:
    """Return the error of a run that Ctrl-C ended, once its partial run file is written."""
    return KvtuneError("interrupted", f"{what} is in {path}, marked partial", EXIT_INTERRUPTED)


def check_machine(words: Sequence[str], *, cpu_build: bool) -> None:
    """Raise KvtuneError if an engine with these flags could not start on this machine."""
    check_gpu_needs(cpu_build=cpu_build)
    check_shared_memory(words, cpu_build=cpu_build)
    check_room(words, cpu_build=cpu_build)


def _asked(facts: Mapping[str, object], platform: Platform) -> str:
    """Return the device whose defaults the engine used, in words."""
    if platform.key:
        return f"{platform.name}: this machine has no GPU"
    return str(facts.get("device_name") if facts.get("device") != TIMED else "") or platform.name


def _until_measured(on_event: Callable[[Event], None], stacks: Stacks | None) -> Callable[[Event], None]:
    """Return a callback that passes events on, and stops stack sampling before the engine shuts down."""

    def passed(event: Event) -> None:
        if stacks is not None and event.kind == "phase" and event.name == "finishing":
            stacks.stop()
        on_event(event)

    return passed


def check_output(folder: Path) -> None:
    """Make the output folder and check that it is writable and has room. Called before an engine starts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(
            f"-o {folder} cannot be written: {error.strerror or error}", "choose another folder with -o DIR"
        ) from error
    if free < NEEDED_BYTES:
        raise UsageError(
            f"-o {folder} has {free >> 20} MiB free, a run needs up to {NEEDED_BYTES >> 20} MiB while it is measured",
            "free space or choose another folder with -o DIR",
        )


@contextlib.contextmanager
def reserved(output: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Yield a hidden work folder and a free path for the run file: `name`, else `name-2`, `name-3` ..

    Runs that start together get different names. Removes the work folders of killed runs.
    """
    sweep(output)
    for n in itertools.count(1):
        free = name if n == 1 else f"{name}-{n}"
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(made(output / f"{HIDDEN}{free}"))
            except FileExistsError:
                continue
            if not taken(output, free):
                yield folder, output / f"{free}{SUFFIX}"
                return


def run_name(setup: Setup) -> str:
    """Return MODEL_WORKLOAD_CORE_TIME_DEVICE, for instance `tiny-gemma3_rounds_kvtune_20261121-094501_sim`."""
    model = re.sub(r"[^\w.-]+", "-", Path(setup.model).name or setup.model).strip("-")[:40]
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    place = {Timed: "_host", Simulated: "_sim"}.get(type(setup.device), "")
    return f"{model}_{setup.load.built().name}_{setup.core}_{stamp}{place}"


def environment_of(setup: Setup, bench: EngineBench, offline: bool) -> dict[str, str]:
    variables: dict[str, str] = {
        "KVTUNE_CORE": setup.core,
        "KVTUNE_PROBE": bench.probe,
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        "PYTHONUNBUFFERED": "1",
        # As in `vllm serve`. AsyncLLM's default on a GPU is fork: workers would collect a copy of the parent's heap.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        **bench.environment,
    }
    # Set even if empty: a value inherited from the shell would differ from the one in the run file.
    variables |= {"KVTUNE_SET": msgspec.json.encode(setup.core_settings).decode(), "KVTUNE_RECIPE": ""}
    if offline:
        variables["HF_HUB_OFFLINE"] = "1"
    if is_cpu_build() and BINDING not in os.environ:
        cpus = cpu_binding(setup.engine_args, sorted(os.sched_getaffinity(0)))
        variables |= {BINDING: cpus} if cpus else {}
    return variables


def failed_log(output: Path) -> Path:
    """Return the first of `engine-failed.log`, `engine-failed-2.log` .. that is free or an older log of kvtune."""
    names = (f"engine-failed{'' if n == 1 else f'-{n}'}.log" for n in itertools.count(1))
    return next(p for p in map(output.joinpath, names) if not os.path.lexists(p) or wrote(p, FAILED))


def with_log(error: KvtuneError, folder: Path, kept: Path, identity: str) -> KvtuneError:
    """Copy the engine's whole log to `kept`, and return the error with this path in its hint."""
    try:
        write_own(f"{signature(identity)}\n".encode() + (folder / LOG_FILE).read_bytes(), kept, identity)
    except (OSError, KvtuneError):
        return error
    whole = f"the engine's whole log is {kept}"
    hint = error.hint if error.hint and str(folder) not in error.hint else ""
    return KvtuneError(error.message, f"{hint}; {whole}" if hint else whole, error.exit_code, error.details)


SOCKETS = "VLLM_RPC_BASE_PATH"
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""The most characters that the folder's path may have, so that vLLM's socket names still fit."""

LONGEST_PARENT = LONGEST - len(f"/{PREFIX}ipc-12345678")
SHORT_PATHS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


@contextlib.contextmanager
def socket_folder(environ: Mapping[str, str] = os.environ) -> Iterator[dict[str, str]]:
    """Make a folder for the engine's sockets, and yield the variable that names it, or {}.

    {} if the user set it, or no folder can be made. vLLM would leave the sockets in the temp folder. A socket's path
    holds 107 characters: if the temp folder's path is too long, a folder with a shorter path is used.
    """
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        for parent in (Path(tempfile.gettempdir()), *SHORT_PATHS) if not environ.get(SOCKETS) else ():
            if len(os.fsencode(parent)) <= LONGEST_PARENT and os.access(parent, os.W_OK | os.X_OK):
                try:
                    variables = {SOCKETS: str(stack.enter_context(scratch("ipc", parent)))}
                except KvtuneError:  # a full disk: try the next one
                    continue
                break
        yield variables
