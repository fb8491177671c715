"""Runs `vllm serve` in a run: `python -m kvtune.lab.engine.front_end.api_servers MODEL FLAGS`.

Each process that vLLM spawns imports this module again as its main module, so each API server imitates the same
simulated device, and reports when it answers. Files in the work folder: CONFIG_FILE, the engine's configuration, and
READY-PID for each API server.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import msgspec
import uvicorn
from vllm.engine.arg_utils import EngineArgs

from kvtune.base.files import claim, replacing
from kvtune.data.flags import flag_value
from kvtune.lab.device.settings import DEVICE_FILE, TIMED, read_device
from kvtune.lab.device.shape import shape
from kvtune.lab.engine.front_end.config import describe_engine, jsonable
from kvtune.lab.engine.front_end.messages import CONFIG_FILE, READY, ServerConfig
from kvtune.lab.engine.serve import main as vllm_serve
from kvtune.plugin.probe.lifetime import die_with_parent
from kvtune.plugin.probe.status import FRONT_END
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import VllmConfig

PART = "engine.front_end"


def install(folder: Path) -> None:
    """Patch vLLM to fit its configuration to the simulated device in `folder`, if any, and to write it to `folder`."""

    def shaped(create: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
        def created(self: Any, *args: object, **options: object) -> VllmConfig:
            device = read_device() if (folder / DEVICE_FILE).exists() else None
            config = create(self, *args, **options)
            facts: dict[str, object] = {}
            if device is not None:
                shape(config, device, asynchronous=self.async_scheduling is not False)
                facts = {"device": TIMED, "device_name": device.name}
            described = ServerConfig(
                facts=jsonable(describe_engine(config)) | facts,
                vocab_size=int(config.model_config.get_vocab_size()),
            )
            with replacing(folder / CONFIG_FILE) as part:
                part.write(msgspec.json.encode(described))
            return config

        return created

    STATE.patches.wrap(PART, EngineArgs, "create_engine_config", shaped)


def say_when_ready(folder: Path) -> None:
    """Patch uvicorn to write a file when this API server answers; /health answers when any API server does."""
    startup = uvicorn.Server.startup

    async def started(self: uvicorn.Server, sockets: list[socket] | None = None) -> None:
        await startup(self, sockets)
        claim(folder / f"{READY}{os.getpid()}")

    uvicorn.Server.startup = started


def main() -> None:
    die_with_parent(signal.SIGTERM)
    if flag_value(sys.argv[1:], "api-server-count") == "1":
        os.environ[FRONT_END] = str(os.getpid())
    vllm_serve()


if __name__ in ("__main__", "__mp_main__"):
    install(Path(os.environ["KVTUNE_RUN_DIR"]))
    say_when_ready(Path(os.environ["KVTUNE_RUN_DIR"]))

if __name__ == "__main__":
    main()
