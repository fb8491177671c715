"""A PostgreSQL of a test's own."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest


def require_postgres() -> None:
    pytest.importorskip("psycopg", reason="the test extra brings PostgreSQL's driver")
    for tool in ("initdb", "pg_ctl", "postgres"):
        if shutil.which(tool) is None:
            pytest.skip(f"PostgreSQL is not installed here: no {tool}")


class Cluster:
    """A separate PostgreSQL in a new folder, without root (PostgreSQL refuses root)."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtune-pg-"))
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user:
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._run("initdb", "-D", "data", "-A", "trust", "-U", "tester", "--no-sync", "--locale=C")

    @property
    def url(self) -> str:
        return f"postgresql://tester:hush@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-F -h 127.0.0.1 -p {self.port} -k {self.folder}"
        self._run("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def remove(self) -> None:
        subprocess.run(["pg_ctl", "-D", "data", "-m", "immediate", "stop"], **self._options(), check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, **self._options(), check=False)
        assert done.returncode == 0, command

    def _options(self) -> dict[str, Any]:
        as_user = {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid} if self._user else {}
        return {**as_user, "cwd": self.folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
