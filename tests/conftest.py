"""What every test is held to: no hook of ours outlives the test that installed it, no example has a deadline.

Engines that tests start compute with one thread each: two tests run at once, and threads that wait for each other at
every operation of a tiny model while another process has their core make it several times slower.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no defect: no test asserts a time.
settings.register_profile("kvtune", deadline=None)
settings.load_profile("kvtune")

# Started in the background of a script, SIGINT is ignored here and in every child; some tests press Ctrl-C in one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub


FOLDERS = [Path(__file__).with_name(name) for name in ("engine", "report")]
"""Where `make test` looks for tests that start an engine or a browser: collecting all others imports vLLM."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"engine", "vllm"} and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="needs vLLM"))
        if (
            marks & {"engine", "browser"}
            and "long" not in marks
            and not any(map(item.path.is_relative_to, FOLDERS))
        ):
            raise pytest.UsageError(
                f"{item.nodeid} starts an engine or a browser: move it to one of {FOLDERS}"
            )


@pytest.fixture(params=[False, True], ids=["no-avx512-bf16", "avx512-bf16"], scope="module")
def avx512_bf16(request: pytest.FixtureRequest) -> Iterator[bool]:
    """A CPU without AVX-512 BF16, then one with it, whichever this is: in this process and in what it starts."""
    from kvtune.run.cpu import VARIABLE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(int(request.param)))
        if find_spec("vllm") is None:
            yield request.param
            return
        from kvtune.core import cpu_flags

        with answered_here(cpu_flags):
            yield request.param


@contextmanager
def answered_here(cpu_flags: Any) -> Iterator[None]:
    """vLLM's platform is told the answer in this process, and asks the CPU again afterwards."""
    if cpu_flags.installed():  # by the whole test run's variable
        yield
        return
    cpu_flags.install()
    try:
        yield
    finally:
        cpu_flags.uninstall()


@pytest.fixture(autouse=True)
def no_hook_leaks() -> Iterator[None]:
    yield
    left = [c for c in gc.callbacks if (getattr(c, "__module__", "") or "").startswith("kvtune")]
    assert not left, f"collector callbacks outlived their test: {left}"
