"""`vllm serve` on a simulated device: `python serve_on_host.py MODEL FLAGS`; KVTUNE_RUN_DIR has the device.

Each process that is spawned runs this module again: so each of several API servers has the same shape.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm.engine.arg_utils import AsyncEngineArgs

from kvtune.fake_device.settings import read_device
from kvtune.fake_device.shape import shape

_create = AsyncEngineArgs.create_engine_config


def _shaped(self: AsyncEngineArgs, *args: Any, **options: Any) -> Any:
    config = _create(self, *args, **options)
    shape(config, read_device())
    return config


AsyncEngineArgs.create_engine_config = _shaped

if __name__ == "__main__":
    from kvtune.engine.serve import main

    main()
