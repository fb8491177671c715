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
from typing import TYPE_CHECKING, Literal

import msgspec

from kvtune.engine.flags import settings_given
from kvtune.engine.gpu_needs import check_gpu_needs
from kvtune.engine.launch import launch
from kvtune.engine.messages import LOG_FILE, Event, HostPlan
from kvtune.engine.offload_flags import check_room
from kvtune.engine.platform import engines
from kvtune.engine.record import record
from kvtune.engine.resolve import api_servers, check_engine, check_pool, cpu_binding, is_cpu_build, resolve
from kvtune.engine.shared_memory import check_shared_memory
from kvtune.engine.sockets import socket_folder
from kvtune.errors import EXIT_FAILED, KvtuneError, UsageError
from kvtune.fake_device.settings import TIMED, Device, write_device
from kvtune.legal import Value
from kvtune.run.file import SUFFIX, write_run
from kvtune.run.folder import taken
from kvtune.run.scratch import HIDDEN, made, sweep
from kvtune.run.signature import run_identity, signature, write_own, wrote
from kvtune.run.slo import with_slo
from kvtune.run.types import CoreInfo, Run
from kvtune.vllm.platforms import Platform, origins
from kvtune.workload.types import Workload

if TYPE_CHECKING:
    from kvtune.probe.stacks import Stacks

BINDING = "VLLM_CPU_OMP_THREADS_BIND"

FAILED = "engine that did not start"

NEEDED_BYTES = 300 << 20
"""Free space that a run needs: a ring file per process, the engine's log, the run file."""


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """What to profile. `core_settings` has only settings that differ from the core's defaults."""

    model: str
    workload: Workload
    core: Literal["kvtune", "stock"] = "kvtune"
    core_settings: dict[str, Value] = field(default_factory=dict)
    probe: str = "light"
    stacks: bool = False
    dummy: bool = False
    engine_args: Sequence[str] = ()
    output: Path = Path("reports")
    command: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))
    environment: dict[str, str] = field(default_factory=dict)
    warm_up: bool = True
    slo: dict[str, float] = field(default_factory=dict)
    device: Device | None = None  # a simulated device, in place of the model
    from_recipe: frozenset[str] = frozenset()  # settings of vLLM in `engine_args` that come from a recipe
    like_device: str = ""  # the device of --like-device, for simulated engines


@dataclass(frozen=True, slots=True)
class Profiled:
    run: Run
    path: Path
    error: KvtuneError | None


def profile(job: ProfileJob, on_event: Callable[[Event], None] = lambda event: None) -> Profiled:
    """Run the job and write the run file, also if the run ended early. KvtuneError if the workload did not start."""
    version = check_engine()
    arguments = engine_arguments(job)
    device = job.device
    platform = engines("", timed=device is not None and not device.specs)
    resolved = resolve(
        job.model, dummy=job.dummy or device is not None, engine_args=arguments, platform=platform
    )
    check_output(job.output)
    if device is not None and not device.specs:
        check_pool(resolved.args)
    if device is None:
        check_machine(arguments, cpu_build=is_cpu_build())
    stacks = None
    if job.stacks:
        from kvtune.probe.stacks import Stacks

        stacks = Stacks.preflight()
    plan = HostPlan(
        model=job.model,
        vllm_args=resolved.args,
        workload=job.workload.spec,
        seed=job.workload.seed,
        on_device=device is not None,
        api_servers=api_servers(arguments),
    )
    environment = environment_of(job, resolved.offline)
    with reserved(job.output, run_name(job)) as (folder, path):
        if device is not None:
            given = sorted(settings_given(arguments))
            write_device(msgspec.structs.replace(device, given=given, like_device=platform.key), folder)
        with socket_folder() as sockets:
            outcome = launch(
                plan,
                folder,
                sockets | environment,
                _until_measured(on_event, stacks),
                (lambda pid: stacks.start(pid, folder)) if stacks is not None else (lambda pid: None),
            )
        if stacks is not None:
            stacks.stop()
        if cpus := environment.get(BINDING):
            outcome.notes.append(f"kvtune gave each worker its own CPUs: {BINDING}={cpus!r}")
        failed = outcome.error is not None and outcome.error.exit_code == EXIT_FAILED
        if not outcome.start_ns and outcome.error is not None:
            raise (
                with_log(outcome.error, folder, failed_log(job.output), FAILED) if failed else outcome.error
            )
        run = record(
            folder,
            plan,
            job.workload,
            outcome,
            command=job.command,
            core=CoreInfo(name=job.core, settings=job.core_settings),
            probe_level=job.probe,
            engine_args=arguments,
            decided=origins(settings_given(arguments), job.from_recipe, _asked(outcome.engine, platform)),
        )
        if not run.header.engine.vllm:
            run = _with_version(run, version)
        if job.slo:
            run = with_slo(run, job.slo)
        if stacks is not None:
            run = stacks.attach(run, path)
        write_run(run, path, new=True)
        if outcome.error is not None and failed:
            kept, of = path.with_suffix(".log"), run_identity(run.header)
            outcome.error = with_log(outcome.error, folder, kept, of)
        return Profiled(run, path, outcome.error)


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


def engine_arguments(job: ProfileJob) -> list[str]:
    """Return the flags after `--`. On a simulated device, the flags of the engine that it imitates come first."""
    return [*(job.device.engine_args if job.device is not None else ()), *job.engine_args]


def _until_measured(on_event: Callable[[Event], None], stacks: Stacks | None) -> Callable[[Event], None]:
    """Return a callback that passes events on, and stops stack sampling before the engine shuts down."""

    def passed(event: Event) -> None:
        if stacks is not None and event.kind == "phase" and event.name == "finishing":
            stacks.stop()
        on_event(event)

    return passed


def _with_version(run: Run, version: str) -> Run:
    """Add the installed version to a run if its engine died before it reported a configuration."""
    engine = msgspec.structs.replace(run.header.engine, vllm=version)
    return Run(msgspec.structs.replace(run.header, engine=engine), run.tables)


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


def run_name(job: ProfileJob) -> str:
    """Return MODEL_WORKLOAD_CORE_TIME, for instance `tiny-gemma3_rounds_kvtune_20261121-094501`."""
    model = re.sub(r"[^\w.-]+", "-", Path(job.model).name or job.model).strip("-")[:40]
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    place = "_host" if job.device is not None else ""
    return f"{model}_{job.workload.name}_{job.core}_{stamp}{place}"


def environment_of(job: ProfileJob, offline: bool) -> dict[str, str]:
    variables: dict[str, str] = {
        "KVTUNE_CORE": job.core,
        "KVTUNE_PROBE": job.probe,
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        "PYTHONUNBUFFERED": "1",
        # As in `vllm serve`. AsyncLLM's default on a GPU is fork: workers would collect a copy of the parent's heap.
        "VLLM_WORKER_MULTIPROC_METHOD": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn"),
        **job.environment,
    }
    # Set even if empty: a value inherited from the shell would differ from the one in the run file.
    variables |= {"KVTUNE_SET": msgspec.json.encode(job.core_settings).decode(), "KVTUNE_RECIPE": ""}
    if offline:
        variables["HF_HUB_OFFLINE"] = "1"
    if is_cpu_build() and BINDING not in os.environ:
        cpus = cpu_binding(job.engine_args, sorted(os.sched_getaffinity(0)))
        variables |= {BINDING: cpus} if cpus else {}
    return variables


def failed_log(output: Path) -> Path:
    """Return the first of `engine-failed.log`, `engine-failed-2.log` .. that is free or an older log of kvtune."""
    names = (f"engine-failed{'' if n == 1 else f'-{n}'}.log" for n in itertools.count(1))
    return next(p for p in map(output.joinpath, names) if not os.path.lexists(p) or wrote(p, FAILED))


def with_log(error: KvtuneError, folder: Path, kept: Path, of: str) -> KvtuneError:
    """Copy the engine's whole log to `kept`, and return the error with this path in its hint."""
    try:
        write_own(f"{signature(of)}\n".encode() + (folder / LOG_FILE).read_bytes(), kept, of)
    except (OSError, KvtuneError):
        return error
    whole = f"the engine's whole log is {kept}"
    hint = error.hint if error.hint and str(folder) not in error.hint else ""
    return KvtuneError(error.message, f"{hint}; {whole}" if hint else whole, error.exit_code, error.details)
