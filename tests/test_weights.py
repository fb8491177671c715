"""Seeded weights: they depend only on the name, have a realistic scale, and states decay."""

from __future__ import annotations

import pytest

from tests.weights.kvtune_test_weights import fill

pytestmark = pytest.mark.vllm


def test_values_depend_only_on_the_name() -> None:
    torch = pytest.importorskip("torch")
    one, same, other = (torch.empty(256, 64) for _ in range(3))
    fill("layers.0.proj.weight", one)
    fill("layers.0.proj.weight", same)
    fill("layers.1.proj.weight", other)
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert float(one.std()) == pytest.approx(64**-0.5, rel=0.05)
    half = torch.empty(256, 64, dtype=torch.bfloat16)
    fill("layers.0.proj.weight", half)
    assert torch.equal(half, one.bfloat16())


def test_norms_states_and_whole_numbers() -> None:
    torch = pytest.importorskip("torch")
    norm, sharp, plus, decay, log, ids, bias = (torch.empty(8) for _ in range(7))
    fill("fc1.bias", bias)
    fill("norm.weight", norm)
    fill("attn.q_norm.weight", sharp)
    fill("input_norm.weight", plus, one_plus=True)
    fill("mixer.A", decay)
    fill("mixer.A_log", log)
    ids = ids.to(torch.int32)
    fill("ids", ids)
    assert set(norm.tolist()) == {1.0} and set(sharp.tolist()) == {2.0} and set(plus.tolist()) == {0.0}
    assert bool((decay < 0).all()) and -3 <= float(log.min()) <= float(log.max()) <= 1
    assert not ids.any()
    assert 0 < float(bias.abs().max()) < 0.1  # beside embeddings of 0.09: OPT answers nothing alike
