"""Finds the cause of an engine's failure in its log, and a hint for it. Pure text processing."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from kvtune.data.layout.models import NAMES

MOST_LAST_LINES = 5
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(\([^)]*\)\s*)?((ERROR|WARNING|INFO|CRITICAL)\s[\d-]+\s[\d:]+\s(\[[^\]]*\]\s?)?)?")
_RAISED = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure)):?\s*(.*)$")
_IGNORED = re.compile(r"^Exception ignored in")
"""Precedes an error raised while an object was deleted, mostly at exit: such an error is not the cause."""
_NOTICED = re.compile(r"(exited|died) unexpectedly")
_WORKER = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+|None)\)")
_AT_START = re.compile(r"Failed core proc\(s\): \{'([^']+)': (-?\d+)")
# Exceptions that follow from another failure: the cause only if the log has no other exception.
_FOLLOWS = (
    "Engine core initialization failed",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "cancelled",
    "WorkerProc initialization failed",
    "Executor failed",
    "See root cause",
    "KeyboardInterrupt",
    "CancelledError",
)

_HINTS = (
    (
        r"killed by SIGKILL",
        "the kernel sends SIGKILL when memory runs out (`dmesg` then says so): lower --max-model-len, --max-num-seqs "
        "or the cache size after `--`, or end what else uses the memory",
    ),
    (
        r"not a valid model identifier|is not a local folder|couldn't connect|offline|Repo id",
        "check the name; built-in models are tiny-opt, tiny-llama, tiny-gemma3, tiny-qwen3next and tiny-granite; "
        "a local model is a folder with config.json",
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache",
        "give the cache more memory (`-- --kv-cache-memory-bytes N`), or lower --max-model-len",
    ),
    (
        r"Free memory on device .* is less than|reduce GPU memory used by other processes",
        "other processes use the GPU's memory (`nvidia-smi` lists them): end them, or take a smaller share with "
        "`-- --gpu-memory-utilization 0.5`; --kv-cache-memory-bytes alone does not skip this check",
    ),
    (
        r"NVIDIA driver on your system is too old|driver version is insufficient",
        "the driver is older than torch's CUDA needs (CUDA 13: driver 580 or newer): update the driver",
    ),
    (
        r"Failed to find C compiler",
        "Triton compiles at its first use: install gcc, or name a compiler in CC",
    ),
    (
        r"Python\.h: No such file",
        "Triton compiles against Python's headers: install them (Debian: python3-dev)",
    ),
    (
        r"Insufficient space in /dev/shm",
        "in a container: `docker run --shm-size` or --ipc=host; a tier of host memory is a file there",
    ),
    (
        r"CUDA out of memory|CUDA error: out of memory",
        "lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens after `--`, or end what else "
        "uses the GPU (`nvidia-smi`)",
    ),
    (
        r"out of memory|Cannot allocate memory|MemoryError",
        "lower --max-model-len, --max-num-seqs, the cache size or --kv-offloading-size after `--`",
    ),
    (
        r"desired CPU memory utilization",
        "set the cache's size: `-- --kv-cache-memory-bytes 4G` (the CPU engine takes 92 % of the memory by default)",
    ),
    (
        r"Address already in use",
        "another engine uses the port; run again, or end the other engine",
    ),
    (
        r"Cannot find any model weights",
        "use --dummy for random weights, or give a folder with weights",
    ),
)


def clean(line: str) -> str:
    """Return a log line without colour codes and vLLM's prefix."""
    return _PREFIX.sub("", _ANSI.sub("", line).rstrip(), count=1).strip()


def cause(log: str) -> str:
    """Return the log's first exception, if possible one that does not follow from another; "" if it has none."""
    raised, ignored = [], False
    for line in map(clean, log.splitlines()):
        ignored = ignored or _IGNORED.match(line) is not None
        if _RAISED.match(line):
            if not ignored:
                raised.append(line)
            ignored = False
    first = [line for line in raised if not any(f in line for f in _FOLLOWS)]
    return next(iter(first or raised), "")[:400]


_NO_HUB = re.compile(
    r"ConnectError|Name or service not known|name resolution|couldn't connect to|Max retries exceeded"
    r"|LocalEntryNotFound|outgoing traffic has been disabled|Network is unreachable",
    re.IGNORECASE,
)
_NO_ACCESS = re.compile(
    r"gated repo|GatedRepo|restricted|401 Client Error|403 Client Error|private repository|RepositoryNotFound",
    re.IGNORECASE,
)


def hub_fault(message: str, model: str) -> tuple[str, str] | None:
    """Return what is wrong and what to do, if the message says that the model cannot be fetched; else None."""
    local = "give a folder with its config.json (--dummy where it has no weights), or a built-in model"
    if _NO_HUB.search(message):
        what = f"{model} is neither built in nor a folder, and the model hub cannot be reached from here"
        return what, f"check the name and the network; without a network {local}: {', '.join(NAMES)}"
    if _NO_ACCESS.search(message):
        what = f"the model hub has no {model}, or does not give it to you"
        return (
            what,
            f"check the name; for a gated or private model set HF_TOKEN to a token that may read it; or {local}",
        )
    return None


def killer(exit_code: int) -> str:
    """Return the name of the signal that a negative exit code stands for."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def killed(died: Mapping[str, int], log: str) -> str:
    """Say which process of the engine a signal killed, from exit codes and vLLM's log; "" if none was killed."""
    logged = [match for pattern in (_WORKER, _AT_START) for match in pattern.findall(log)]
    seen = [(name, int(code)) for name, code in logged if code != "None"]
    for name, code in (*seen, *died.items()):
        if code < 0:
            return f"{name} was killed by {killer(code)}"
    # vLLM looks when the process's pipe closes, a moment before the exit code is available.
    raised = cause(log)
    said_why = raised and not any(f in raised for f in _FOLLOWS)
    for name, code in logged:
        if code == "None" and not said_why:
            return f"{name} died, by a signal it seems: vLLM saw no exit code"
    return ""


def last_lines(log: str) -> list[str]:
    """Return the last log lines until the engine noticed that it failed, without tracebacks and shutdown."""
    kept: list[str] = []
    in_traceback = False
    for line in map(clean, log.splitlines()):
        if _NOTICED.search(line):
            kept.append(line)
            break
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif in_traceback and _RAISED.match(line):
            in_traceback = False
            if not any(f in line for f in _FOLLOWS):
                kept.append(line)
        elif not in_traceback and line and not any(f in line for f in _FOLLOWS):
            kept.append(line)
    return [line[:200] for line in kept[-MOST_LAST_LINES:]]


def hint_for(message: str, log_path: str) -> str:
    """Return what to do about a cause; for an unknown cause, where the full log is."""
    for pattern, hint in _HINTS:
        if re.search(pattern, message, re.I):
            return hint
    return f"the engine's full log is {log_path}"


_COMPILED = re.compile(r"JIT compilation during inference: ([^.(]+)")


def compiled_kernels(log: str) -> list[str]:
    """Return the kernels compiled while requests ran, from vLLM's monitor: each costs a latency spike."""
    return list(dict.fromkeys(name.strip() for name in _COMPILED.findall(log)))


def compiled_note(log: str) -> list[str]:
    """Return a note that names the kernels compiled while requests ran; [] if there were none."""
    kernels = compiled_kernels(log)
    if not kernels:
        return []
    named = ", ".join(kernels[:5]) + (f" and {len(kernels) - 5} more" if len(kernels) > 5 else "")
    return [f"kernels compiled while requests ran (warm-up included): {named}; each makes slow tokens"]


def tail(log: str, lines: int = 60) -> list[str]:
    """Return the last lines of the log without colour codes, for the run file."""
    return [_ANSI.sub("", line)[:500] for line in log.splitlines()[-lines:]]
