"""From logs of vLLM 0.32 to the line that names the cause."""

from __future__ import annotations

import pytest

from kvtune.lab.engine.faults import (
    cause,
    clean,
    compiled_kernels,
    hint_for,
    hub_fault,
    killed,
    killer,
    last_lines,
    tail,
)

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


IGNORED = """Exception ignored in: <function AsyncLLM.__del__ at 0x7f896bc5cf40>
Traceback (most recent call last):
  File "async_llm.py", line 298, in shutdown
TypeError: 'NoneType' object is not callable"""


def test_what_an_object_raised_as_it_was_thrown_away_is_no_cause() -> None:
    assert cause(IGNORED) == ""
    assert cause(f"{IGNORED}\nValueError: no memory") == "ValueError: no memory"
    early = "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."
    assert killed({}, f"{early}\n{IGNORED}").startswith("VllmWorker-0 died")


def test_a_log_without_an_exception_has_no_cause() -> None:
    assert cause("INFO all is well\n") == ""
    assert cause("") == ""


KILLED = """\
(Worker pid=5) INFO 11-22 14:52:52 [cpu_worker.py:260] Explicitly set (1.0/15.59) GiB for KV cache on node 0.
(MainProcess pid=2) WARNING 11-22 14:52:54 [base.py:413] Using None for EOS token id
(MainProcess pid=2) WARNING 11-22 14:52:58 [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; \
starting cleanup
(MainProcess pid=2) INFO 11-22 14:52:58 [core_client.py:777] [shutdown] MPClient: complete
(MainProcess pid=2) ERROR 11-22 14:52:58 [async_llm.py:906] Traceback (most recent call last):
(MainProcess pid=2) ERROR 11-22 14:52:58 [async_llm.py:906]   File "async_llm.py", line 849, in output_handler
(MainProcess pid=2) ERROR 11-22 14:52:58 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
"""


@pytest.mark.parametrize(
    ("message", "what", "next_"),
    [
        ("httpcore2.ConnectError: [Errno -2] Name or service not known", "cannot be reached", "network"),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "cannot be reached",
            "tiny-opt",
        ),
        ("OSError: You are trying to access a gated repo.", "the model hub has no org/name", "HF_TOKEN"),
        (
            "OSError: .. If this is a private repository, make sure to pass a token",
            "the model hub",
            "HF_TOKEN",
        ),
    ],
)
def test_a_model_that_cannot_be_fetched_says_why(message: str, what: str, next_: str) -> None:
    found = hub_fault(message, "org/name")
    assert found is not None and what in found[0] and next_ in found[1] and "Error" not in found[0]


def test_other_failures_are_not_the_hubs() -> None:
    assert hub_fault("ValueError: No available memory for the cache blocks", "m") is None
    assert hub_fault(cause(WORKER_FAILED), "m") is None


def test_a_process_that_a_signal_killed_is_named_with_the_signal() -> None:
    assert killed({"EngineCore": -9}, KILLED) == "EngineCore was killed by SIGKILL"
    assert killed({"EngineCore": -11}, "") == "EngineCore was killed by SIGSEGV"
    assert killed({"EngineCore": -64}, "").endswith("killed by SIGRTMAX") and killer(-99) == "signal 99"
    assert killed({"EngineCore": 1}, "") == killed({}, WORKER_FAILED) == ""
    worker = "ERROR 11-22 14:52:58 [x.py:3] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down"
    assert killed({"EngineCore": -15}, worker) == "VllmWorker-0 was killed by SIGKILL"
    start = "RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}"
    assert killed({}, start) == "EngineCore was killed by SIGKILL"
    early = "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."
    assert killed({}, early) == "VllmWorker-0 died, by a signal it seems: vLLM saw no exit code"
    assert killed({}, f"{early}\nRuntimeError: cancelled").startswith("VllmWorker-0 died")
    assert killed({}, f"ValueError: no memory for the KV cache\n{early}") == "", (
        "it ended by itself, and said why"
    )
    assert "dmesg" in hint_for("the engine failed: EngineCore was killed by SIGKILL", "x.log")


def test_the_end_of_a_log_is_what_came_before_the_failure() -> None:
    assert last_lines(KILLED) == [
        "Explicitly set (1.0/15.59) GiB for KV cache on node 0.",
        "Using None for EOS token id",
        "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
    ]
    own = "a\nTraceback (most recent call last):\n  File x\nValueError: odd\nb\n"
    assert last_lines(own) == ["a", "ValueError: odd", "b"]
    assert last_lines("") == []


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
        (
            "ValueError: Free memory on device cuda:0 (9.1/79.2 GiB) on startup is less than desired GPU memory "
            "utilization (0.92, 72.9 GiB). Decrease GPU memory utilization",
            "nvidia-smi",
        ),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12080)", "580"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "--gpu-memory-utilization"),
        ("ValueError: something else", "x.log"),
    ],
)
def test_known_causes_have_their_own_hint(message: str, word: str) -> None:
    assert word in hint_for(message, "x.log")


def test_kernels_that_were_compiled_while_requests_ran_are_named_once() -> None:
    said = "This causes a latency spike; consider extending warmup to cover this shape/config."
    log = (
        "(EngineCore pid=3) INFO 11-21 09:58:03 [jit_monitor.py:84] Kernel JIT monitor activated; monitored JIT "
        "compilations during inference will use mode=warn.\n"
        f"(EngineCore pid=3) WARNING 11-21 09:58:09 [jit_monitor.py:140] Triton kernel JIT compilation during "
        f"inference: _fwd_kernel. {said}\n"
        f"(EngineCore pid=3) WARNING 11-21 09:58:10 [jit_monitor.py:137] Triton kernel JIT compilation during "
        f"inference: _fwd_kernel (key=1). {said}\n"
        f"(EngineCore pid=3) WARNING 11-21 09:58:11 [jit_monitor.py:140] CuTeDSL JIT compilation during "
        f"inference: hgemm. {said}\n"
    )
    assert compiled_kernels(log) == ["_fwd_kernel", "hgemm"]
