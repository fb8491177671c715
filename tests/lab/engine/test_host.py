"""What the host refuses before it starts an engine."""

from __future__ import annotations

import pytest

from kvtune.base.errors import UsageError
from kvtune.lab.engine.host import check_fits, warm_up_workload
from kvtune.requests.loads.spec import build


def test_a_prompt_longer_than_the_model_allows_is_refused() -> None:
    workload = build("prefill:requests=2,prompt=5000,output=8")
    with pytest.raises(UsageError, match=r"2 of 2 .* max-model-len 4096.* 5000 prompt \+ 8 output"):
        check_fits(workload, 4096)
    check_fits(workload, 5008)


def test_the_warm_up_is_short_and_has_the_workloads_prompt_lengths() -> None:
    warm = warm_up_workload(build("prefill:requests=9,prompt=500,output=300"), 4096)
    assert [r.prompt_tokens for r in warm.requests] == [500]
    assert all(r.output_tokens <= 4 for r in warm.requests)
