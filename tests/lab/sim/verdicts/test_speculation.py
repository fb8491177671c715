"""What speculation costs the prefix cache, under its own causes; on replays through vLLM's own scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.data.layout.models import config
from kvtune.lab.sim.verdicts.causes import split
from kvtune.lab.sim.verdicts.listener import PromptVerdict
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Request, Span, Workload

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

FLAGS = ["--max-model-len", "2048", "--max-num-batched-tokens", "1024", "--max-num-seqs", "8"]


def looks_ahead() -> bool:
    """Whether this vLLM's block hashes may cover what follows a block (from 0.33 on)."""
    from vllm.config import VllmConfig

    return hasattr(VllmConfig, "num_hash_lookahead_tokens")


def speculating(folder: Path, method: str, *, kv_heads: int = 1, lookahead: bool = False) -> list[str]:
    """Flags for a drafter of one layer. Without `lookahead` EAGLE drops blocks in every version."""
    draft = {**config("tiny-llama"), "num_hidden_layers": 1, "num_key_value_heads": kv_heads}
    (folder / "config.json").write_text(json.dumps(draft))
    settings: dict[str, object] = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    if method == "eagle" and looks_ahead() and not lookahead:
        settings["disable_lookahead_block_hashes"] = True
    return ["--speculative-config", json.dumps(settings)]


def judged(
    workload: Workload, model: str, flags: list[str], blocks: int = 60, *watching: Any
) -> list[PromptVerdict]:
    """The verdict on each request; its causes and its hit add up to its prompt."""
    pytest.importorskip("vllm")
    from kvtune.lab.setup.setup import Setup
    from kvtune.lab.sim.replay import replay
    from kvtune.lab.sim.verdicts.observer import VerdictObserver

    observer = VerdictObserver(workload)
    arguments = [*FLAGS, "--num-gpu-blocks-override", str(blocks), *flags]
    run = replay(workload, Setup(model=model, engine_args=arguments), observers=[observer, *watching])
    verdicts = [verdict for verdict in observer.verdicts() if verdict is not None]
    assert [v.boundaries.hit for v in verdicts] == run.table("requests")["hit_tokens"].tolist()
    for verdict, request in zip(verdicts, workload.requests, strict=True):
        counts = split(verdict.boundaries).misses
        assert min(counts.values()) >= 0
        assert verdict.boundaries.hit + sum(counts.values()) == request.prompt_tokens
    return verdicts


def two(prefix: int, suffix: int) -> Workload:
    tails = [(Span(2 + n, 0, suffix),) if suffix else () for n in range(2)]
    requests = tuple(Request(str(n), (Span(1, 0, prefix), *tails[n]), 2) for n in range(2))
    return Workload("two", "two", {}, 0, requests, "", concurrency=1)


# (model, prefix, suffix): tokens that the second visit hits, loses to EAGLE's dropped block, and to the last token. A
# window of tiny-gemma3 is kept at the second visit only; where there are several groups, vLLM looks up one block more.
EAGLE = [
    ("tiny-llama", 512, 100, 384, 128, 0),
    ("tiny-llama", 512, 300, 384, 128, 0),
    ("tiny-llama", 512, 0, 256, 128, 128),
    ("tiny-llama", 600, 100, 384, 128, 0),
    ("tiny-gemma3", 512, 300, 0, 128, 0),
    ("tiny-gemma3", 512, 0, 384, 0, 128),
]


@pytest.mark.parametrize(("model", "prefix", "suffix", "hit", "dropped", "last"), EAGLE)
def test_the_block_that_eagle_drops_is_a_cause_of_its_own(
    model: str, prefix: int, suffix: int, hit: int, dropped: int, last: int, tmp_path: Path
) -> None:
    at = judged(two(prefix, suffix), model, speculating(tmp_path, "eagle"))[1].boundaries
    counts = split(at).misses
    assert (at.hit, counts["eagle_drop"], counts["last_token"]) == (hit, dropped, last)
    assert counts["not_retained"] == (384 if model == "tiny-gemma3" and suffix else 0)
    assert not counts["evicted"] and not counts["lagging_group"] and not counts["draft_group"]


@pytest.mark.parametrize(
    ("prefix", "suffix", "hit", "dropped"), [(512, 100, 384, 128), (600, 100, 512, 0), (512, 0, 384, 0)]
)
def test_a_hash_that_looks_ahead_loses_a_block_only_where_another_token_follows_it(
    prefix: int, suffix: int, hit: int, dropped: int, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    if not looks_ahead():
        pytest.skip("this vLLM's hashes cover their blocks only")
    at = judged(two(prefix, suffix), "tiny-llama", speculating(tmp_path, "eagle", lookahead=True))[
        1
    ].boundaries
    assert (at.hit, split(at).misses["eagle_drop"]) == (hit, dropped)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_that_uses_no_hidden_states_drops_no_block(method: str, tmp_path: Path) -> None:
    flags = speculating(tmp_path, method, kv_heads=2)
    if method == "ngram":
        flags = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']
    at = judged(two(512, 100), "tiny-llama", flags)[1].boundaries
    assert (at.hit, split(at).misses["eagle_drop"], split(at).misses["cold"]) == (512, 0, 100)


def test_a_drafters_layers_are_marked_as_a_worker_marks_them(tmp_path: Path) -> None:
    """vLLM 0.33 drops a block in the groups of marked layers only; without a mark, in all."""
    pytest.importorskip("vllm")
    from kvtune.lab.setup.setup import Setup
    from kvtune.lab.sim.build import configure

    config, (stage,), _ = configure(
        Setup(model="tiny-gemma3", engine_args=[*FLAGS, *speculating(tmp_path, "eagle")])
    )
    specs, layers = stage.specs, config.compilation_config.static_forward_context
    marked = [name for name in specs if getattr(layers[name], "is_draft_layer", False)]
    assert marked == list(specs)[-1:] and len(specs) > 1
    assert [getattr(spec, "is_draft", True) for spec in specs.values()][-1]
    assert not getattr(specs[next(iter(specs))], "is_draft", False)


class DraftEvictor:
    """Takes the draft model's blocks out of the cache just before the second request is sent."""

    needs_single_steps = True

    def started(self, engine: Any) -> None:
        self.scheduler = engine.scheduler

    def sent(self, index: int, request: Any) -> None:
        from kvtune.lab.sim.verdicts.groups import drafters_groups

        (draft,) = drafters_groups(self.scheduler)
        if index == 1:
            manager = self.scheduler.kv_cache_manager
            for block in manager.block_pool.blocks:
                key = block.block_hash
                if key is not None and int.from_bytes(key[-4:], "big") == draft:
                    assert manager.block_pool._maybe_evict_cached_block(block)

    def stepped(self, engine: Any, outputs: Any) -> None: ...

    def finished(self, index: int) -> None: ...


def test_what_only_the_draft_models_group_lacks_is_its_own_cause(tmp_path: Path) -> None:
    """Its attention has other heads than the model's, so its layer has a KV cache group of its own."""
    flags = speculating(tmp_path, "draft_model", kv_heads=2)
    assert judged(two(1024, 0), "tiny-gemma3", flags)[1].boundaries.hit == 768
    verdict = judged(two(1024, 0), "tiny-gemma3", flags, 60, DraftEvictor())[1]
    counts = split(verdict.boundaries).misses
    assert verdict.boundaries.hit == 0
    assert (counts["draft_group"], counts["last_token"]) == (768, 256)


def test_blocks_that_the_draft_models_group_took_are_its_own_cause(tmp_path: Path) -> None:
    flags = speculating(tmp_path, "draft_model", kv_heads=2)
    workload = build("rounds:prefixes=3,prefix=1500,suffix=0,output=4,rounds=2")
    verdicts = judged(workload, "tiny-gemma3", flags, 64)
    lost: dict[str, int] = {}
    for verdict in verdicts:
        for cause, tokens in split(verdict.boundaries).misses.items():
            lost[cause] = lost.get(cause, 0) + tokens
    taken = [v for v in verdicts if v.evicted is not None and v.evicted.for_draft]
    assert taken and lost["draft_group"] == sum(split(v.boundaries).misses["draft_group"] for v in taken) > 0
    assert lost["evicted"] > 0  # the model's own groups took others
