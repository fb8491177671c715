"""KV specs of one of several tensor-parallel ranks, from a model that was built as on one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.errors import KvtuneError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def shared(specs: dict[str, Any], ranks: int) -> dict[str, Any]:
    pytest.importorskip("vllm")
    from kvtune.fake_device.meta_model import of_one_rank

    parallel: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
    return dict(of_one_rank(specs, parallel))


def attention(heads: int) -> Any:
    torch = pytest.importorskip("torch")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)


def test_a_rank_has_its_share_of_the_heads_and_at_least_one() -> None:
    pages = {
        heads: {ranks: shared({"a": attention(heads)}, ranks)["a"].page_size_bytes for ranks in (1, 2, 4)}
        for heads in (8, 2)
    }
    assert pages[8][1] == 2 * pages[8][2] == 4 * pages[8][4]
    assert pages[2][1] == 2 * pages[2][2] == 2 * pages[2][4]


def test_states_on_several_ranks_want_a_recorded_run() -> None:
    torch = pytest.importorskip("torch")
    from vllm.v1.kv_cache_interface import MambaSpec

    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    assert shared({"a": attention(8), "s": state}, 1)["s"] is state
    with pytest.raises(KvtuneError, match="recurrent states on 2 tensor-parallel ranks") as refused:
        shared({"a": attention(8), "s": state}, 2)
    assert "--like RUN" in refused.value.hint
