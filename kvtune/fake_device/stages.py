"""What each rank of a pipeline holds of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.vllm.types import KVCacheSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of one pipeline rank, their specs by name; of a model without a pipeline all.

    `weight_bytes`: of one tensor-parallel rank. `spare_bytes`: memory for its pool beyond the heaviest stage's.
    """

    specs: dict[str, KVCacheSpec]
    weight_bytes: int = 0
    spare_bytes: int = 0


def layers_of(stages: Sequence[Stage]) -> dict[str, KVCacheSpec]:
    """Return the specs of all stages, first to last."""
    return {name: spec for stage in stages for name, spec in stage.specs.items()}
