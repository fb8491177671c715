"""Names kvtune's offloading spec in a CPU engine's configuration with `--kv-offloading-size`.

vLLM's own spec raises on a CPU when the worker starts; kvtune's copies within memory. The name is part of the
configuration, so only the process that builds the configuration needs this patch. A spec that the user names stays.
"""

from __future__ import annotations

import logging

from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import KVTransferConfig, VllmConfig

logger = logging.getLogger("vllm.kvtune")

PART = "cpu_tier"
SPEC, MODULE = "MemcpyOffloadingSpec", "kvtune.plugin.core.cpu_tier.memcpy"
CONNECTOR = "OffloadingConnector"
OWN_SPECS = ("", "CPUOffloadingSpec")
"""vLLM's spec for host memory, which is also its default."""


def install() -> None:
    """Wrap VllmConfig._post_init_kv_transfer_config; idempotent."""
    if PART in STATE.loaded:
        return
    try:
        from vllm.config import VllmConfig as Replaced
    except ImportError:
        return
    if "_post_init_kv_transfer_config" in vars(Replaced):  # a vLLM without this method keeps its own spec
        STATE.patches.after(PART, Replaced, "_post_init_kv_transfer_config", _configured)
        STATE.loaded.add(PART)


def _configured(configuration: VllmConfig) -> None:
    try:
        name_spec(configuration.kv_transfer_config)
    except Exception as error:
        logger.warning("kvtune: vLLM's own spec of a tier of host memory stays: %r", error)


def name_spec(transfer: KVTransferConfig | None) -> None:
    """Put kvtune's spec into the connector's settings, if the engine runs on a CPU and the user named no other."""
    from vllm.platforms import current_platform

    if transfer is None or transfer.kv_connector != CONNECTOR or not current_platform.is_cpu():
        return
    extra = transfer.kv_connector_extra_config or {}
    if extra.get("spec_name", "") in OWN_SPECS:
        extra |= {"spec_name": SPEC, "spec_module_path": MODULE}
        transfer.kv_connector_extra_config = extra
