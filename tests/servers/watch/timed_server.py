"""`vllm serve` on a device that waits instead of computing: `python -m tests.servers.watch.timed_server MODEL FLAGS`.

Each process that vLLM spawns imports this module again as its main module, so each imitates the same device, which is
described in the folder KVTUNE_RUN_DIR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from kvtune.lab.device.settings import read_device
from kvtune.lab.device.shape import shape
from kvtune.lab.engine.serve import main
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import VllmConfig


def shaped(create: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    def created(self: Any, *args: object, **options: object) -> VllmConfig:
        config = create(self, *args, **options)
        shape(config, read_device(), asynchronous=self.async_scheduling is not False)
        return config

    return created


if __name__ in ("__main__", "__mp_main__"):
    STATE.patches.wrap("timed", EngineArgs, "create_engine_config", shaped)

if __name__ == "__main__":
    main()
