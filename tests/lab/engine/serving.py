"""`vllm serve` in a subprocess, for tests and benchmarks. Imports no vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 300.0


def tokenizer_in(folder: Path) -> Path:
    """A byte-level tokenizer, trained on this repository's prose."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train([str(path) for path in sorted(Path(__file__).parents[3].glob("*.md"))], vocab_size=500)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
    fast.save_pretrained(str(folder))
    return folder


def environment(core: str, folder: Path) -> dict[str, str]:
    """Of `vllm serve` with this core, and with the device in `folder`."""
    return {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]),
        "KVTUNE_CORE": core,
        "KVTUNE_SET": "",
        "KVTUNE_RECIPE": "",
        "KVTUNE_STRICT": "1",
        "KVTUNE_RUN_DIR": str(folder),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def served(
    folder: Path,
    command: Sequence[str],
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Starts the command with vLLM's flags, and yields the server's URL. `port` 0: any free port."""
    port = port or free_port()
    log = (folder / f"serve-{port}.log").open("wb")
    process = subprocess.Popen(
        [*command, "--port", str(port), *flags],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env={**os.environ, **(environment or {})},
    )
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(process, base, Path(log.name))
        yield base
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_until_up(process: subprocess.Popen[bytes], base: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")


def metric(base: str, name: str) -> float:
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    named = (f"{name} ", f"{name}{{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(named))
