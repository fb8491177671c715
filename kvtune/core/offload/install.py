"""What the plugin changes in a configuration with `--kv-offloading-size`: names of kvtune's classes, nothing else.

On a CPU engine it names the spec whose copies are memory copies; vLLM's own raises there when the worker starts. Where
the eviction policy is `kvtune`, it names the classes of that policy. The names travel with the configuration, so that
only the process that makes it needs the patch. A spec that the user names is left alone. With that policy, the process
that has vLLM's connector offers every window to it (`offer_windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Concatenate, Protocol

from kvtune.core.offload import windows
from kvtune.core.offload.vllm_types import SchedulerSide
from kvtune.core.patches import PATCHES
from kvtune.core.vllm_config import Transfer

PART = "offload"
SPEC, MODULE = "MemcpyOffloadingSpec", "kvtune.core.offload.memcpy"
REUSE_SPEC, REUSE_MODULE = "ReuseOffloadingSpec", "kvtune.core.offload.spec"
POLICY = "kvtune"
"""The eviction policy of a tier as users name it, beside vLLM's lru and arc."""
POLICY_CLASS, POLICY_MODULE = "ReusePolicy", "kvtune.core.offload.policy"
CONNECTOR = "OffloadingConnector"
OWN_SPECS = ("", "CPUOffloadingSpec")
"""vLLM's spec for host memory, which is also its default."""

_installed = False
_offers_windows = False


class Configuration(Protocol):
    """VllmConfig, as far as it concerns offloading."""

    kv_transfer_config: Transfer | None


def install() -> None:
    """Wrap VllmConfig._post_init_kv_transfer_config; idempotent."""
    global _installed
    if _installed:
        return
    from vllm.config import VllmConfig

    if "_post_init_kv_transfer_config" in vars(VllmConfig):  # where a vLLM has none, its own classes stay
        PATCHES.wrap(PART, VllmConfig, "_post_init_kv_transfer_config", _wrap)
        _installed = True


def _wrap(stock: Callable[[Configuration], None]) -> Callable[[Configuration], None]:
    def _post_init_kv_transfer_config(self: Configuration) -> None:
        stock(self)
        transfer = self.kv_transfer_config
        if transfer is not None and transfer.kv_connector == CONNECTOR:
            name_classes(transfer.kv_connector_extra_config)

    return _post_init_kv_transfer_config


def name_classes(extra: dict[str, object]) -> None:
    """Name kvtune's classes in the connector's settings, where they are wanted."""
    from vllm.platforms import current_platform

    ours = extra.get("eviction_policy") == POLICY
    if ours:
        extra["eviction_policy"], extra["cache_policy_module_path"] = POLICY_CLASS, POLICY_MODULE
    if extra.get("spec_name", "") in OWN_SPECS:
        if current_platform.is_cpu():
            extra["spec_name"], extra["spec_module_path"] = SPEC, MODULE
        elif ours:
            extra["spec_name"], extra["spec_module_path"] = REUSE_SPEC, REUSE_MODULE


def offer_windows() -> None:
    """Have connectors that are built from now on offer every window to kvtune's policy; idempotent."""
    global _offers_windows
    if _offers_windows:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    PATCHES.wrap(PART, OffloadingConnectorScheduler, "__init__", _offering)
    _offers_windows = True


def _offering(
    stock: Callable[Concatenate[SchedulerSide, ...], None],
) -> Callable[Concatenate[SchedulerSide, ...], None]:
    def __init__(self: SchedulerSide, *args: object, **options: object) -> None:
        stock(self, *args, **options)
        if hasattr(self.manager, "keep_windows"):
            windows.offer_all(self)

    return __init__


def policy_name(extra: Mapping[str, object]) -> str:
    """The eviction policy in the connector's settings, as users name it."""
    name = str(extra.get("eviction_policy", "lru"))
    return POLICY if name == POLICY_CLASS else name


def installed() -> bool:
    return _installed


def uninstall() -> None:
    """Undo `install` and `offer_windows`."""
    global _installed, _offers_windows
    PATCHES.undo(PART)
    _installed = _offers_windows = False
