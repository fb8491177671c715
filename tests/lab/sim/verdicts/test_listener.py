"""The listener's verdicts on replays through vLLM's own scheduler: exact sums, no influence, the right cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtune.lab.sim.verdicts.causes import split
from kvtune.lab.sim.verdicts.listener import PromptVerdict
from kvtune.requests.loads.spec import build
from kvtune.requests.types import STREAM_ANSWER, Request, Span, Workload
from tests.choice import drawn

# vLLM's imports warn (deprecations of torch): not ours to turn into errors.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ENGINES: dict[str, tuple[str, list[str]]] = {
    "llama": ("tiny-llama", ["--num-gpu-blocks-override", "24"]),
    "llama off": ("tiny-llama", ["--num-gpu-blocks-override", "24", "--no-enable-prefix-caching"]),
    "gemma3": ("tiny-gemma3", ["--num-gpu-blocks-override", "56"]),
    "gemma3 512": (
        "tiny-gemma3",
        ["--num-gpu-blocks-override", "64", "--prefix-cache-retention-interval", "512"],
    ),
    "qwen3next": ("tiny-qwen3next", ["--num-gpu-blocks-override", "40"]),
    "qwen3next 32": ("tiny-qwen3next", ["--num-gpu-blocks-override", "40", "--prefix-match-unit", "32"]),
}
LENGTH = ["--max-model-len", "2048", "--max-num-batched-tokens", "1024", "--max-num-seqs", "8"]


def replayed(workload: Workload, engine: str) -> tuple[list[int], list[PromptVerdict | None]]:
    """Hits without and verdicts with a listener; both replays must hit alike."""
    pytest.importorskip("vllm")
    from kvtune.lab.setup.setup import Setup
    from kvtune.lab.sim.replay import replay
    from kvtune.lab.sim.verdicts.observer import VerdictObserver

    model, flags = ENGINES[engine]
    chosen = Setup(model=model, engine_args=[*LENGTH, *flags])
    observer = VerdictObserver(workload)
    listened = replay(workload, chosen, observers=[observer]).table("requests")["hit_tokens"].tolist()
    alone = replay(workload, chosen).table("requests")["hit_tokens"].tolist()
    assert listened == alone
    assert observer.listener is not None
    verdicts = observer.listener.verdicts
    return listened, [verdicts.get(str(index)) for index in range(len(listened))]


def check(workload: Workload, engine: str) -> Counter[str]:
    """Every request's tokens are accounted for; all causes added up."""
    hits, verdicts = replayed(workload, engine)
    total: Counter[str] = Counter()
    for request, hit, verdict in zip(workload.requests, hits, verdicts, strict=True):
        assert verdict is not None
        at = verdict.boundaries
        counts = split(at).misses
        assert at.prompt == request.prompt_tokens
        assert at.hit == hit
        assert min(counts.values()) >= 0
        assert at.hit + sum(counts.values()) == at.prompt
        # The boundaries are in order by themselves: nothing had to be bent to make the parts fit.
        order = (at.hit, at.alone, at.ever, at.reachable, at.whole, at.seen, at.prompt)
        if not at.skipped:
            assert order[0] <= min(at.alone, at.ever)
            assert list(order[2:]) == sorted(order[2:])
        if counts["evicted"]:
            assert verdict.evicted is not None
            assert 0 <= verdict.evicted.at_s <= verdict.at_s
            assert verdict.lagging
        if counts["not_retained"]:
            assert verdict.unkept
        total.update(counts)
        total["hit"] += hit
    assert total.total() == workload.prompt_tokens
    return total


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A few prompts that share beginnings, some repeated, some that go on from an earlier answer."""
    requests: list[Request] = []
    for number in range(draw(st.integers(1, 9))):
        earlier = [r for r in requests if r.prompt_tokens < 900]
        kind = draw(st.sampled_from(["fresh", "shared", "again", "turn"]))
        after: tuple[int, ...] = ()
        if kind == "again" and requests:
            prompt = draw(st.sampled_from(requests)).prompt
        elif kind == "turn" and earlier:
            before = draw(st.sampled_from(earlier))
            after = (requests.index(before),)
            said = Span(STREAM_ANSWER + after[0], 0, before.output_tokens)
            prompt = (*before.prompt, said, Span(1000 + number, 0, draw(st.integers(1, 300))))
        elif kind == "shared":
            start = Span(draw(st.integers(1, 3)), 0, draw(st.sampled_from([100, 256, 640, 1000, 1300])))
            prompt = (start, Span(1000 + number, 0, draw(st.integers(1, 300))))
        else:
            prompt = (Span(1000 + number, 0, draw(st.integers(1, 1500))),)
        output = draw(st.integers(1, 40))
        requests.append(Request(f"r{number}", prompt, output, after=after, kind=kind))
    concurrency = draw(st.integers(1, 4))
    return Workload("random", "random", {}, 0, tuple(requests), "", concurrency=concurrency)


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=drawn(3), deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
def test_every_token_is_a_hit_or_has_one_cause(engine: str, workload: Workload) -> None:
    check(workload, engine)


def rounds(prefixes: int, prefix: int, rounds: int, suffix: int = 200) -> Workload:
    return build(f"rounds:prefixes={prefixes},prefix={prefix},suffix={suffix},output=4,rounds={rounds}")


def test_a_window_is_not_kept_before_the_second_visit() -> None:
    workload = rounds(1, 1024, 3)
    _, verdicts = replayed(workload, "gemma3")
    second, third = verdicts[1], verdicts[2]
    assert second is not None and third is not None
    assert split(second.boundaries).misses["not_retained"] == 1024
    assert second.unkept == "sliding window 512"
    assert third.boundaries.hit == 1024


def test_an_eviction_names_the_request_that_took_the_blocks() -> None:
    workload = rounds(3, 1024, 2, suffix=100)
    hits, verdicts = replayed(workload, "llama")
    again = verdicts[3]
    assert again is not None and again.evicted is not None
    assert 0 < hits[3] < 1024
    assert split(again.boundaries).misses["evicted"] == 1024 - hits[3]
    assert again.lagging == "full attention"
    assert again.evicted.phase == "prefill"
    assert int(again.evicted.by) in (1, 2)
    assert 0 < again.evicted.at_s < again.at_s


def test_caching_off_is_a_skipped_lookup() -> None:
    total = check(rounds(2, 1024, 2), "llama off")
    assert total["skipped_lookup"] == 2 * 1024
    assert total["hit"] == 0


def test_a_smaller_match_unit_turns_partial_blocks_into_hits(avx512_bf16: bool) -> None:
    """Blocks are 256 tokens with states of the model's type, 384 with float32's."""
    again = (Span(1, 0, 700),)
    requests = tuple(Request(str(n), again, 2) for n in range(2))
    workload = Workload("again", "again", {}, 0, requests, "", concurrency=1)
    coarse, fine = check(workload, "qwen3next"), check(workload, "qwen3next 32")
    hit = 384 if avx512_bf16 else 512
    assert (coarse["hit"], coarse["partial_block"], coarse["last_token"]) == (hit, 699 - hit, 1)
    assert (fine["hit"], fine["partial_block"], fine["last_token"]) == (672, 27, 1)


def test_lookups_of_a_waiting_request_do_not_count_as_seen() -> None:
    """A lookup is repeated while a request waits for blocks; its own prompt stays cold."""
    requests = tuple(Request(str(n), (Span(n, 0, 1500),), 40) for n in range(4))
    workload = Workload("crowd", "crowd", {}, 0, requests, "", concurrency=4)
    assert check(workload, "llama")["cold"] == 4 * 1500


class Evictor:
    """Takes full attention's blocks from the ninth on out of the cache just before the second request is sent."""

    needs_single_steps = True

    def started(self, engine: Any) -> None:
        self.scheduler = engine.scheduler

    def sent(self, index: int, request: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        if index != 1:
            return
        pool = self.scheduler.kv_cache_manager.block_pool
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        full = next(i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec))
        for block_hash in request.block_hashes[9:14]:
            key = make_block_hash_with_group_id(block_hash, full)
            assert pool._maybe_evict_cached_block(pool.cached_block_hash_to_block.get_one_block(key))

    def stepped(self, engine: Any, outputs: Any) -> None: ...

    def finished(self, index: int) -> None: ...


def test_groups_that_hold_different_boundaries_lag() -> None:
    """Windows are kept at 1024 and 1792 tokens, full attention still reaches to 1152: only 1024 serves both."""
    pytest.importorskip("vllm")
    from kvtune.lab.setup.setup import Setup
    from kvtune.lab.sim.replay import replay
    from kvtune.lab.sim.verdicts.observer import VerdictObserver

    prefix = Span(1, 0, 1792)
    requests = tuple(Request(str(n), (prefix, Span(2 + n, 0, 10)), 2) for n in range(2))
    workload = Workload("two", "two", {}, 0, requests, "", concurrency=1)
    flags = ["--num-gpu-blocks-override", "200", "--prefix-cache-retention-interval", "1024"]
    observer = VerdictObserver(workload)
    replay(
        workload,
        Setup(model="tiny-gemma3", engine_args=[*LENGTH, *flags]),
        observers=[observer, Evictor()],
    )
    assert observer.listener is not None
    verdict = observer.listener.verdicts["1"]
    counts = split(verdict.boundaries).misses
    assert verdict.boundaries.hit == 1024
    assert (counts["lagging_group"], counts["evicted"], counts["cold"]) == (128, 640, 10)
    assert verdict.lagging == "full attention"


def test_blocks_are_lost_when_and_to_whom_single_steps_say() -> None:
    """Steps in bulk take many blocks at once; what a lost block's fate is does not change."""
    pytest.importorskip("vllm")
    from kvtune.lab.setup.setup import Setup, Simulated
    from kvtune.lab.sim.replay import replay

    work = build("zipf:prefixes=8,prefix=64,requests=60,concurrency=5,output=200", seed=116)
    flags = ["--max-model-len", "700", "--max-num-batched-tokens", "512", "--num-gpu-blocks-override", "300"]
    single, bulk = (
        replay(
            work,
            Setup(
                model="tiny-gemma3",
                engine_args=[*flags, "--block-size", "16"],
                device=Simulated(async_scheduling=True, verdicts=True, shortcuts=on),
            ),
        )
        for on in (False, True)
    )
    assert single.header.extra.verdicts == bulk.header.extra.verdicts
    assert any(verdict and verdict["evicted"] for verdict in single.header.extra.verdicts)
    assert bulk.header.extra.sim is not None and bulk.header.extra.sim.jumped_steps > 1000
