"""What a small file asks for is estimated before it is built: little memory, and one line with the figure."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.run.file import read_run
from kvtune.lab.device.kv_specs import restore
from tests.choice import first_of

GOLDEN = Path(__file__).parents[1] / "golden" / "schema1-real.kvrun"
MOST = 1 << 30
"""Bytes that a command may take for a file of a few kilobytes."""

MEASURED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
from tests.simulator import run
code = run(sys.argv[1:])
# Not this process's ru_maxrss: it counts the process that started this one, too.
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
peak = max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print("peak", code, peak * 1024)
"""


def measured(*words: str, folder: Path) -> tuple[list[str], list[str], int, int]:
    """Lines on standard output and standard error, the exit code, and the largest process's memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURED, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"KVTUNE_OUTPUT": str(folder)},
        check=False,
    )
    *out, last = done.stdout.splitlines()
    _, code, peak = last.split()
    return out, done.stderr.splitlines(), int(code), int(peak)


def one_line(errors: list[str]) -> str:
    """The one line of an error, which a hint may follow."""
    (said,) = (line for line in errors if line.startswith("kvtune: "))
    assert "unexpected" not in said
    return said


def changed(path: Path, header: dict[str, Any], tables: dict[str, Any] | None = None) -> Path:
    """A golden run with these fields of its header merged, and these tables' columns replaced."""
    with zipfile.ZipFile(GOLDEN) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    decoded = json.loads(parts["header.json"])
    for name, value in header.items():
        decoded[name] = {**decoded[name], **value} if isinstance(value, dict) else value
    parts["header.json"] = json.dumps(decoded).encode()
    if tables is not None:
        parts = {name: part for name, part in parts.items() if not name.startswith("tables/")}
    for name, column in (tables or {}).items():
        out = io.BytesIO()
        np.save(out, column, allow_pickle=False)
        parts[f"tables/{name}.npy"] = out.getvalue()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    return path


def chat(path: Path, spec: str, rows: int) -> Path:
    times = {f"requests/{name}": np.arange(rows) / 100 for name in ("sent_s", "first_token_s", "finished_s")}
    counts = {
        f"requests/{name}": np.ones(rows, "i8") for name in ("prompt_tokens", "output_tokens", "hit_tokens")
    }
    texts = {f"requests/{name}": np.full(rows, "a") for name in ("id", "kind", "finish")}
    return changed(
        path,
        {"workload": {"name": "chat", "spec": spec, "hash": ""}, "extra": {}},
        {**times, **counts, **texts, "requests/planned_s": np.full(rows, np.nan)},
    )


@pytest.mark.full
def test_a_chat_of_thousands_of_turns_is_drawn_without_its_workload(tmp_path: Path) -> None:
    path = chat(tmp_path / "a.kvrun", "chat:sessions=1,turns=7071,answers=fixed", 7071)
    assert path.stat().st_size < 100_000
    out, errors, code, peak = measured("report", str(path), "--console", folder=tmp_path)
    assert (code, errors) == (0, []) and peak < MOST
    said = " ".join(" ".join(out).split())
    assert "prompts of 49,999,041 parts, 4.42 GiB of memory, and 8,000,000 parts are allowed" in said


@pytest.mark.full
def test_explain_refuses_such_a_chat_in_one_line(tmp_path: Path) -> None:
    path = chat(tmp_path / "a.kvrun", "chat:sessions=1,turns=7071,answers=fixed", 7071)
    out, errors, code, peak = measured("explain", str(path), "--tries", "0", folder=tmp_path)
    assert code == 2 and not out and "4.42 GiB" in one_line(errors) and peak < MOST


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("engine", "says"),
    first_of(
        [
            (
                {"args": ["--num-gpu-blocks-override", "2147483648"]},
                "a pool of 2,147,483,648 KV blocks takes 512 GiB",
            ),
            ({"kv_specs": {"num_blocks": 1 << 61}}, "a pool of 2,305,843,009,213,693,952 KV blocks"),
            ({"kv_specs": {"num_blocks": None}}, "no number of blocks: num_blocks is None"),
        ]
    ),
    ids=["flag", "specs", "none"],
)
def test_explain_refuses_such_a_pool_in_one_line(tmp_path: Path, engine: dict[str, Any], says: str) -> None:
    pytest.importorskip("vllm")
    if "kv_specs" in engine:
        engine = {"args": [], "kv_specs": {**read_run(GOLDEN).header.engine.kv_specs, **engine["kv_specs"]}}
    path = changed(tmp_path / "a.kvrun", {"engine": engine})
    out, errors, code, peak = measured("explain", str(path), "--tries", "0", folder=tmp_path)
    assert code and not out and says in one_line(errors) and peak < MOST


def spec(value: object) -> dict[str, Any]:
    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": value}
    return {"version": 1, "specs": [{"$spec": "FullAttentionSpec", "fields": fields}], "layers": {"a": 0}}


def deep() -> object:
    value: Any = 1
    for _ in range(900):
        value = {"$tuple": [value]}
    return value


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "value",
    [
        *(
            {"$fraction": given}
            for given in (["1e30000000"], ["1e3000000", 1], [1, 0], [], [1, 2, 3], 7, None)
        ),
        {"$tuple": 3},
        {"$tuple": {"$fraction": ["9" * 4000]}},
        {"$enum": "x", "name": "y"},
        {"$enum": 3},
        {"$dtype": ["x"]},
        {"$dtype": "__doc__"},
        {"$multiple": {}},
        {"$spec": "FullAttentionSpec"},
        deep,
        -(1 << 62),
    ],
    ids=lambda value: str(value)[:40].partition(" at ")[0],
)
def test_hostile_kv_specs_are_refused_or_harmless(value: object) -> None:
    pytest.importorskip("vllm")
    try:
        restore(spec(value() if callable(value) else value))
    except KvtuneError as error:
        assert "cannot be used with this vLLM" in error.message and len(error.message) < 500


def test_any_error_of_vllms_classes_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(encoded: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvtune.lab.device.kv_specs._spec", full)
    with pytest.raises(KvtuneError, match="cannot be used with this vLLM: MemoryError"):
        restore(spec(1))
