"""Starts vLLM's own server as the front end, waits until it answers, and ends it. In the host process."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_urlsafe
from typing import Self

import aiohttp
import msgspec

from kvtune.base import children
from kvtune.base.errors import UsageError
from kvtune.base.files import replacing
from kvtune.data.flags import flag_value, with_flag
from kvtune.lab.engine.driver import RequestLog
from kvtune.lab.engine.front_end import key
from kvtune.lab.engine.front_end.client import NAME, HttpDriver
from kvtune.lab.engine.front_end.messages import CONFIG_FILE, READY, ServerConfig
from kvtune.lab.engine.messages import COUNTS_FILE, LOG_FILE, HostPlan
from kvtune.lab.engine.process import kill_tree
from kvtune.requests.types import Request, Workload

COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "finished": "vllm:request_success_total",
    "prompt_tokens": "vllm:request_prompt_tokens_sum",
    "generation_tokens": "vllm:generation_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""vLLM's counters by their names in a run."""

_LINE = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def counters(text: str) -> dict[str, float]:
    """Return the counters that the server has, by the run's names, summed over engines and finish reasons."""
    sums: dict[str, float] = {}
    for name, _, value in _LINE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return {ours: sums[theirs] for ours, theirs in COUNTERS.items() if theirs in sums}


def pool(text: str) -> dict[str, int]:
    """Return the number and the size of the KV cache's blocks, as vLLM resolved them at start-up."""
    labels = next((text for name, text, _ in _LINE.findall(text) if name == "vllm:cache_config_info"), "")
    facts = dict(_LABEL.findall(labels))
    names = {"num_blocks": "num_gpu_blocks", "block_size": "block_size"}
    return {ours: int(facts[theirs]) for ours, theirs in names.items() if facts.get(theirs, "").isdigit()}


LOOK_S = 0.1
GRACE_S = 5.0
ADDRESS = "127.0.0.1"
WARM_UPS = 8
"""Copies of each warm-up request per API server. A new connection goes to the API server that has fewest."""

FLAGS = {
    "host": ADDRESS,
    "served-model-name": NAME,
    "generation-config": "vllm",  # requests set every parameter, as they do with AsyncLLM
    "disable-uvicorn-access-log": "",
    "enable-prompt-tokens-details": "",
}


def command(plan: HostPlan, port: int) -> list[str]:
    """Return the command line of `vllm serve` with the plan's flags and those that a run needs."""
    model = flag_value(plan.vllm_args, "model") or plan.setup.model
    words = with_flag(with_flag(plan.vllm_args, "model", None), "api-key", None)  # `key` draws one
    flags: dict[str, str | int] = {**FLAGS, "port": port, "api-server-count": plan.api_servers}
    for name, value in flags.items():
        words = with_flag(words, name, value)
    words += ["--middleware", key.MIDDLEWARE]
    return children.python("kvtune.lab.engine.front_end.api_servers", model, *words)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        return int(taken.getsockname()[1])


def allow_files() -> None:
    """Raise the limit of open files (connections) to the hard limit; the server does the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Server:
    """`vllm serve` in its own process, with its API servers and EngineCore as descendants."""

    def __init__(self, plan: HostPlan, folder: Path) -> None:
        port = free_port()
        allow_files()
        self._servers = plan.api_servers
        self._folder = folder
        self._base = f"http://{ADDRESS}:{port}"
        drawn = token_urlsafe(32)
        self._process = children.start(
            command(plan, port),
            stdin=subprocess.DEVNULL,
            variables={"VLLM_SERVER_DEV_MODE": "1", key.VARIABLE: drawn},  # enables /reset_prefix_cache
        )
        self._config = ServerConfig({}, 0)
        self._before: dict[str, float] = {}
        self.facts: dict[str, object] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers=key.header(drawn),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    @classmethod
    async def started(cls, plan: HostPlan, folder: Path, fits: Callable[[int], None]) -> Self:
        """Start the server and wait until it answers. `fits` checks the longest request once max_model_len is known."""
        server = cls(plan, folder)
        try:
            await server._until(lambda: (folder / CONFIG_FILE).exists())
            server._config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=ServerConfig)
            fits(int(str(server._config.facts["max_model_len"])))
            await server._until(lambda: len(list(folder.glob(f"{READY}*"))) >= plan.api_servers)
            server.facts = {**server._config.facts, **pool(await server._metrics())}
            settings = server.facts["settings"]
            assert isinstance(settings, dict)
            settings["api_server_count"] = plan.api_servers
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def errored(self) -> bool:
        return self._process.poll() is not None

    @property
    def dead_error(self) -> BaseException:
        code = self._process.poll()
        if code == 2:  # the argument parser's
            return UsageError(
                f"vLLM refuses these flags: {self._refusal()}", "after `--`, give flags of `vllm serve`"
            )
        return RuntimeError(f"vLLM's server ended with exit code {code}")

    def warm_up(self, workload: Workload) -> Workload:
        """Return the warm-up with each request repeated `WARM_UPS` times per API server, so that each one gets some."""
        requests: list[Request] = []
        for copy in range(WARM_UPS * self._servers):
            requests += [replace(request, id=f"{request.id}-{copy}") for request in workload.requests]
        return replace(workload, requests=tuple(requests), concurrency=len(requests))

    def driver(self, workload: Workload, log: RequestLog) -> HttpDriver:
        return HttpDriver(self._session, self._base, workload, self._config.vocab_size, log)

    async def forget(self) -> None:
        async with self._session.post(f"{self._base}/reset_prefix_cache?reset_external=true") as answer:
            answer.raise_for_status()

    async def begin(self) -> None:
        self._before = counters(await self._metrics())

    def keep(self) -> None:
        """Do nothing: the server keeps its own counts, and asking for them would cost it time."""

    async def end(self) -> None:
        with suppress(aiohttp.ClientError):  # the server died: the run has no counters
            await asyncio.sleep(LOOK_S)  # a step's statistics come after its tokens
            counted = counters(await self._metrics())
            difference = {name: value - self._before.get(name, 0.0) for name, value in counted.items()}
            with replacing(self._folder / COUNTS_FILE) as part:
                part.write(json.dumps({"counters": difference, "preemptions": {}}).encode())

    def died(self) -> dict[str, int]:
        code = self._process.poll()
        return {} if code is None else {"vllm serve": code}

    async def close(self) -> None:
        await self._session.close()
        kill_tree(self._process.pid, GRACE_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=GRACE_S)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.errored:
                raise self.dead_error
            await asyncio.sleep(LOOK_S)

    async def _metrics(self) -> str:
        async with self._session.get(f"{self._base}/metrics") as answer:
            answer.raise_for_status()
            text: str = await answer.text()
            return text

    def _refusal(self) -> str:
        log = self._folder / LOG_FILE
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return errors[-1] if errors else "its parser ended with exit code 2"
