"""From logs of vLLM 0.32 to the line that names the cause."""

from __future__ import annotations

import pytest

from kvtune.engine.faults import cause, clean, hint_for, tail

WORKER_FAILED = """\
INFO 11-21 09:57:40 [__init__.py:1] Automatically detected platform cpu.
(VllmWorker-0 pid=12067) ERROR 11-21 09:58:00 [multiproc_executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=12067) ERROR 11-21 09:58:00 [multiproc_executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=12067) ERROR 11-21 09:58:00 [multiproc_executor.py:953]   File "vllm/v1/worker/cpu_worker.py", line 83
(VllmWorker-0 pid=12067) ERROR 11-21 09:58:00 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=12067) ERROR 11-21 09:58:00 [multiproc_executor.py:953] ValueError: Available memory on node 0 \
(6.69/8.59 GiB) on startup is less than desired CPU memory utilization (0.92, 7.9 GiB).
(EngineCore pid=11994) ERROR 11-21 09:58:03 [core.py:1510] Exception: WorkerProc initialization failed due to an \
exception in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""


def test_the_first_failure_is_the_cause_not_its_consequences() -> None:
    line = cause(WORKER_FAILED)
    assert line.startswith("ValueError: Available memory on node 0 (6.69/8.59 GiB)")
    assert "kv-cache-memory-bytes" in hint_for(line, "x.log")


def test_a_consequence_is_the_cause_if_there_is_no_other() -> None:
    assert cause("RuntimeError: Engine core initialization failed. See root cause above.\n").startswith(
        "RuntimeError"
    )


def test_a_log_without_an_exception_has_no_cause() -> None:
    assert cause("INFO all is well\n") == ""
    assert cause("") == ""


def test_colours_and_prefixes_are_removed() -> None:
    assert (
        clean("\x1b[0;36m(EngineCore pid=3)\x1b[0;0m ERROR 11-21 09:58:03 [core.py:15] OSError: no")
        == "OSError: no"
    )
    assert tail("\x1b[31ma\x1b[0m\nb") == ["a", "b"]


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("OSError: nosuch is not a local folder and is not a valid model identifier", "tiny-opt"),
        ("ValueError: No available memory for the cache blocks", "max-model-len"),
        ("RuntimeError: out of memory", "max-num-seqs"),
        ("OSError: [Errno 98] Address already in use", "port"),
        ("ValueError: something else", "x.log"),
    ],
)
def test_known_causes_have_their_own_hint(message: str, word: str) -> None:
    assert word in hint_for(message, "x.log")
