"""The files beside a server: the image's steps work as another user, and each manifest is what its tool takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers.watch.played import Answers, http
from tests.servers.watch.recordings import recorded

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = ROOT / "kvtune" / "servers" / "watch" / "dashboards"
ENTRY = ["watch", "http://localhost:8000", "--metrics", "9108", "--metrics-host", "0.0.0.0"]


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def steps(file: Path = DEPLOY / "Containerfile") -> list[tuple[str, str]]:
    """The instructions of a Containerfile, in order."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        (line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line and not line.startswith("#")
    ]


def listed(text: str) -> list[str]:
    """A JSON list of an instruction."""
    words = yaml.safe_load(text)
    assert isinstance(words, list)
    return words


def test_the_image_runs_as_nobody_and_opens_one_port() -> None:
    found = dict(steps())
    assert found["USER"] == "65532:65532" and found["EXPOSE"] == "9108"
    assert listed(found["ENTRYPOINT"]) == ["kvtune"] and listed(found["CMD"]) == ENTRY


def test_compose_mounts_files_that_are_there_and_watches_the_server_by_its_name() -> None:
    services = read("compose.yaml")["services"]
    assert set(services) == {"vllm", "kvtune", "prometheus", "grafana"}
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).resolve().is_file(), source
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), port
    assert services["kvtune"]["command"][:2] == ["watch", "http://vllm:8000"]
    assert services["kvtune"]["read_only"] is True and services["kvtune"]["cap_drop"] == ["ALL"]
    targets = [
        c["targets"] for job in read("prometheus.yml")["scrape_configs"] for c in job["static_configs"]
    ]
    assert targets == [["vllm:8000"], ["kvtune:9108"]]
    assert read("grafana/board.yml")["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"


def test_the_sidecar_is_short_and_may_write_nothing() -> None:
    assert len((DEPLOY / "sidecar.yaml").read_text().splitlines()) <= 40
    (container,) = read("sidecar.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ENTRY
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["runAsNonRoot"] is True


def test_the_patched_deployment_holds_to_kubernetes_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    template = read("sidecar.yaml")["spec"]["template"]
    server = {"name": "vllm", "image": "vllm/vllm-openai", "args": ["model"]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "template": {
                "metadata": {"labels": {"app": "vllm"}, **template["metadata"]},
                "spec": {"containers": [server, *template["spec"]["containers"]]},
            },
        },
    }
    validate.validate(deployment, "1.31", strict=True)
    deployment["spec"]["template"]["spec"]["containers"][1]["securityContexts"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(deployment, "1.31", strict=True)


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="needs the program `docker-compose`")
def test_compose_itself_takes_the_file() -> None:
    command = ["docker-compose", "-f", str(DEPLOY / "compose.yaml"), "config", "-q"]
    done = subprocess.run(
        command, env={**os.environ, "MODEL": "m"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    without = {name: value for name, value in os.environ.items() if name != "MODEL"}
    refused = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "set MODEL to what vllm serve takes" in refused.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs the program `promtool`")
def test_prometheus_takes_its_configuration_with_the_rules(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus.yml", tmp_path)
    shutil.copy(DASHBOARDS / "alerts.yml", tmp_path)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rules found" in done.stdout


def as_nobody() -> None:
    os.setgroups([])
    os.setgid(65532)
    os.setuid(65532)


def python_for_all() -> str | None:
    """A Python of a supported version, with venv, that another user can run."""
    check = "import ensurepip, sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with suppress(OSError, subprocess.SubprocessError):
            if (
                subprocess.run([python, "-c", check], preexec_fn=as_nobody, cwd="/", check=False).returncode
                == 0
            ):
                return python
    return None


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="image-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("of", ["checkout", "wheel"])
def test_the_steps_of_the_image_work_and_the_exporter_runs_as_another_user(of: str, place: Path) -> None:
    """COPY and RUN of a Containerfile in a folder here; then its command, as uid 65532, where it cannot write."""
    origins, file = ROOT, DEPLOY / "Containerfile"
    if of == "wheel":
        origins = place / "dist"
        build = [
            str(ROOT / ".venv/bin/uv"),
            "build",
            "--quiet",
            "--wheel",
            "--out-dir",
            str(origins),
            str(ROOT),
        ]
        subprocess.run(build, check=True)
        subprocess.run([sys.executable, str(ROOT / ".ci/publishing"), str(origins)], check=True)
        file = origins / "Containerfile"
    at = {"/src": str(place / "src"), "/opt/kvtune": str(place / "opt")}
    python = python_for_all()
    if python is None:
        pytest.skip("no Python here is one that another user can run (Debian: python3-venv)")
    for name, text in steps(file):
        for path, here in at.items():
            text = text.replace(path, here)
        if name == "COPY":
            *sources, target = text.split()
            for source in sources:
                origin = origins / source
                if origin.is_dir():
                    shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    Path(target).mkdir(exist_ok=True)
                    shutil.copy(origin, target)
        elif name == "RUN":
            text = re.sub(r"^python ", f"{python} ", text)
            done = subprocess.run(
                ["bash", "-c", text], capture_output=True, text=True, check=False, cwd=place
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    assert not (place / "src").exists()
    run = recorded("full_attention")
    answers = Answers(run.metrics)
    with http(answers) as base:
        words = [word.replace("http://localhost:8000", base) for word in ENTRY]
        words = ["19108" if word == "9108" else "127.0.0.1" if word == "0.0.0.0" else word for word in words]
        environ = {"PATH": f"{place}/opt/bin", "PYTHONDONTWRITEBYTECODE": "1"}
        exporter = subprocess.Popen(
            [f"{place}/opt/bin/kvtune", *words],
            cwd=place,
            env=environ,
            preexec_fn=as_nobody,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            text = ""
            for _ in range(300):
                with (
                    suppress(OSError),
                    closing(urllib.request.urlopen("http://127.0.0.1:19108/metrics")) as got,
                ):
                    text = got.read().decode()
                if "kvtune_server_up 1.0" in text or exporter.poll() is not None:
                    break
                time.sleep(0.1)
            assert "kvtune_server_up 1.0" in text, (
                exporter.communicate(timeout=10)[0] if exporter.poll() else text
            )
        finally:
            exporter.terminate()
            exporter.communicate(timeout=30)
