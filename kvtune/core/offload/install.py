"""Makes `--kv-offloading-size` work on a CPU engine: its configuration names kvtune's spec, which copies memory.

vLLM's own spec raises there when the worker starts. The name travels with the configuration, so that only the process
that makes it needs the patch. A spec that the user names is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvtune.core.patches import PATCHES
from kvtune.core.vllm_config import Transfer

PART = "offload"
SPEC, MODULE = "MemcpyOffloadingSpec", "kvtune.core.offload.memcpy"
CONNECTOR = "OffloadingConnector"
OWN_SPECS = ("", "CPUOffloadingSpec")
"""vLLM's spec for host memory, which is also its default."""

_installed = False


class Configuration(Protocol):
    """VllmConfig, as far as it concerns offloading."""

    kv_transfer_config: Transfer | None


def install() -> None:
    """Wrap VllmConfig._post_init_kv_transfer_config on CPU platforms; idempotent."""
    global _installed
    if _installed:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.config import VllmConfig

    PATCHES.wrap(PART, VllmConfig, "_post_init_kv_transfer_config", _wrap)
    _installed = True


def _wrap(stock: Callable[[Configuration], None]) -> Callable[[Configuration], None]:
    def _post_init_kv_transfer_config(self: Configuration) -> None:
        stock(self)
        transfer = self.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            extra = transfer.kv_connector_extra_config
            if extra.get("spec_name", "") in OWN_SPECS:
                extra["spec_name"], extra["spec_module_path"] = SPEC, MODULE

    return _post_init_kv_transfer_config


def installed() -> bool:
    return _installed


def uninstall() -> None:
    """Undo `install`."""
    global _installed
    PATCHES.undo(PART)
    _installed = False
