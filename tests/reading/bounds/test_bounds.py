"""Bounds against naive models that work node by node, and the command's output."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.base.errors import UsageError
from kvtune.reading.bounds.given import parse_pools, shape_named
from kvtune.reading.bounds.ladder import bounds
from kvtune.reading.bounds.paths import paths_of
from kvtune.reading.bounds.policies import hit_share, infinite, lru, optimum, two_class
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Request, Span, Workload

NODE = 4


def workload(prompts: list[tuple[int, ...]], times: list[float] | None = None) -> Workload:
    """A prompt is a row of stream names, each one node long, and one token, so that all nodes may match."""
    requests = tuple(
        Request(
            str(i),
            (*(Span(name, 0, NODE) for name in prompt), Span(1000 + i, 0, 1)),
            1,
            arrival_s=None if times is None else times[i],
        )
        for i, prompt in enumerate(prompts)
    )
    return Workload("made", "made", {}, 0, requests, "")


# A small tree: names per depth, so that prefixes are shared often.
tree_paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=40)


def prefixes(prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [prompt[: n + 1] for n in range(len(prompt))]


def leading(nodes: list[tuple[int, ...]], cache: object) -> int:
    count = 0
    for node in nodes:
        if node not in cache:  # type: ignore[operator]
            break
        count += 1
    return count


def naive_lru(prompts: list[tuple[int, ...]], capacity: int) -> list[int]:
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for prompt in prompts:
        nodes = prefixes(prompt)
        hits.append(leading(nodes, cache))
        for node in nodes:
            cache.pop(node, None)
        while len(cache) + len(nodes) > capacity:
            cache.popitem(last=False)
        for node in reversed(nodes):
            cache[node] = None
    return hits


def naive_optimum(prompts: list[tuple[int, ...]], capacity: int) -> list[int]:
    uses = [set(prefixes(p)) for p in prompts]
    cache: set[tuple[int, ...]] = set()
    hits = []
    for at, prompt in enumerate(prompts):
        nodes = prefixes(prompt)
        hits.append(leading(nodes, cache))

        def farthest(node: tuple[int, ...], at: int = at) -> tuple[float, int]:
            return (next((t for t in range(at + 1, len(uses)) if node in uses[t]), inf), len(node))

        rest = cache - set(nodes)
        while len(rest) + len(nodes) > capacity:
            rest.remove(max(rest, key=farthest))
        cache = rest | set(nodes)
    return hits


def naive_two_class(
    prompts: list[tuple[int, ...]], times: list[float], capacity: int, head_start: float, ghost: int
) -> list[int]:
    cache: dict[tuple[int, ...], tuple[int, bool]] = {}  # last use, seen again
    gone: deque[tuple[int, ...]] = deque()
    hits = []
    for at, prompt in enumerate(prompts):
        nodes = prefixes(prompt)
        hits.append(leading(nodes, cache))
        remembered = set(list(gone)[-ghost:]) if ghost else set()
        again = leading(nodes, remembered | set(cache))
        for node in nodes:
            cache.pop(node, None)
        while len(cache) + len(nodes) > capacity:
            heads = {}
            for part in (False, True):
                members = [n for n, (_, seen) in cache.items() if seen is part]
                if members:
                    heads[part] = min(members, key=lambda n: (cache[n][0], -len(n)))
            if len(heads) == 2:
                once, seen = cache[heads[False]][0], cache[heads[True]][0]
                take = seen < once if head_start == 0 else times[once] - times[seen] > head_start
            else:
                take = True in heads
            gone.append(heads[take])
            del cache[heads[take]]
        for depth, node in enumerate(nodes):
            cache[node] = (at, depth < again)
    return hits


def in_nodes(hits: list[int]) -> list[int]:
    return [h // NODE for h in hits]


@given(tree_paths, st.integers(5, 25))
@settings(max_examples=200, deadline=None)
def test_lru_equals_a_list_that_evicts_the_oldest(prompts: list[tuple[int, ...]], capacity: int) -> None:
    paths = paths_of(workload(prompts), NODE, answers=False)
    assert in_nodes(lru(paths, capacity)) == naive_lru(prompts, capacity)


@given(tree_paths, st.integers(5, 25))
@settings(max_examples=200, deadline=None)
def test_the_optimum_equals_beladys(prompts: list[tuple[int, ...]], capacity: int) -> None:
    paths = paths_of(workload(prompts), NODE, answers=False)
    assert sum(optimum(paths, capacity)) // NODE == sum(naive_optimum(prompts, capacity))


@pytest.mark.full
@given(tree_paths, st.integers(5, 25), st.sampled_from([0.0, 2.0, 6.0, inf]), st.integers(0, 60), st.data())
@settings(max_examples=300, deadline=None)
def test_two_class_equals_two_queues_and_a_ghost_list(
    prompts: list[tuple[int, ...]], capacity: int, head_start: float, ghost: int, data: st.DataObject
) -> None:
    gaps = data.draw(st.lists(st.integers(1, 5), min_size=len(prompts), max_size=len(prompts)))
    times = [float(sum(gaps[:i])) for i in range(len(gaps))]
    paths = paths_of(workload(prompts, times), NODE, answers=False)
    got = in_nodes(two_class(paths, capacity, head_start_s=head_start, ghost=ghost))
    assert got == naive_two_class(prompts, times, capacity, head_start, ghost)


@given(tree_paths, st.integers(5, 25), st.sampled_from([0.0, 3.0, inf]))
@settings(max_examples=200, deadline=None)
def test_no_policy_beats_the_optimum_nor_that_the_infinite_cache(
    prompts: list[tuple[int, ...]], capacity: int, head_start: float
) -> None:
    paths = paths_of(workload(prompts), NODE, answers=False)
    best, whole = sum(optimum(paths, capacity)), sum(infinite(paths))
    assert (
        max(sum(lru(paths, capacity)), sum(two_class(paths, capacity, head_start_s=head_start)))
        <= best
        <= whole
    )
    assert sum(optimum(paths, sum(paths.nodes))) == sum(lru(paths, sum(paths.nodes))) == whole


def test_a_head_start_keeps_prefixes_that_are_used_again() -> None:
    """A hot prefix among one-off prompts: LRU loses it each time, two classes keep it."""
    prompts: list[tuple[int, ...]] = []
    for turn in range(20):
        prompts += [(0, 0), (10 + 3 * turn,) * 3, (11 + 3 * turn,) * 3, (12 + 3 * turn,) * 3]
    paths = paths_of(workload(prompts), NODE, answers=False)
    assert sum(lru(paths, 8)) == 0
    assert sum(two_class(paths, 8, head_start_s=inf)) // NODE == 2 * 18  # the second visit teaches it
    assert sum(optimum(paths, 8)) // NODE == 2 * 19


def test_the_last_token_is_never_a_hit() -> None:
    whole = (Span(1, 0, 2 * NODE),)
    twice = Workload("m", "m", {}, 0, (Request("a", whole, 1), Request("b", whole, 1)), "")
    assert infinite(paths_of(twice, NODE)) == [0, NODE]


def test_a_chats_next_turn_hits_the_last_answer() -> None:
    work = build("chat:sessions=1,turns=3,system=0,first=32,user=32,output=32", seed=0)
    assert hit_share(infinite(paths_of(work, 16)), paths_of(work, 16)) > hit_share(
        infinite(paths_of(work, 16, answers=False)), paths_of(work, 16, answers=False)
    )


def test_a_larger_pool_never_hits_less() -> None:
    result = bounds(build("zipf:prefixes=20,prefix=400,requests=100", seed=3))
    for less, more in pairwise(result.curve):
        assert less.pool_blocks < more.pool_blocks
        assert less.lru <= more.lru and less.optimum <= more.optimum
    last = result.curve[-1]
    assert last.lru == pytest.approx(result.infinite) and last.optimum == pytest.approx(result.infinite)


def test_requests_larger_than_the_pool_are_named() -> None:
    result = bounds(build("prefill:requests=4,prompt=1000", seed=0), [40])
    assert result.curve[0].oversized == 4
    assert any("larger than a pool" in note for note in result.notes)


@pytest.mark.parametrize("text", ["0", "x", "10q", "-5k", "nan", "1e400"])
def test_invalid_pool_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--pools"):
        parse_pools(text)


def test_pool_sizes_are_parsed_and_sorted() -> None:
    assert parse_pools("25k, 1m,100") == [100, 25_000, 1_000_000]


def test_a_pool_smaller_than_a_node_is_refused(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match="less than one node"):
        bounds(build(f"trace:path={file}", seed=0), [4])


def test_bounds_of_a_model_with_windows_name_their_relaxation() -> None:
    result = bounds(build("rounds", seed=0), shape=shape_named("tiny-gemma3"))
    assert "window" in result.relaxation and result.curve[0].pool_bytes > 0
    assert not bounds(build("rounds", seed=0), shape=shape_named("tiny-llama")).relaxation


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.simulator import run

    assert run(["bounds", "-w", "rounds", "--pools", "200,2k", "--model", "tiny-llama", "--json"]) == 0
    out = capsys.readouterr()
    parsed = json.loads(out.out)
    assert [rung["pool_blocks"] for rung in parsed["curve"]] == [200, 2000]
    assert parsed["curve"][1]["optimum"] == parsed["infinite"] > 0 and parsed["token_bytes"] > 0
    assert out.err.splitlines()[-1] == "pool sizes 2/2"


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.simulator import run

    assert run(["bounds", "-w", "zipf", "--pools", "1k,2k"]) == 0
    text = capsys.readouterr().out
    for word in ("1,000", "2,000", "optimum", "best known", "LRU", "infinite cache hits"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "-w WORKLOAD and --trace FILE"),
        (["-w", "rounds", "--trace", "x"], "--trace is not read with --workload"),
        (["--trace", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["-w", "rounds", "--pools", "many"], "--pools"),
        (["-w", "rounds", "--model", "nobody"], "nobody"),
    ],
)
def test_bad_input_is_two_lines(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.simulator import run

    assert run(["bounds", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 2 and "next:" in error


def test_prompts_shorter_than_a_block_have_nothing_to_hit() -> None:
    workload = build("decode:requests=4,prompt=16,output=8")
    paths = paths_of(workload, 128)
    assert paths.nodes == [0, 0, 0, 0] and paths.pieces == [[], [], [], []]
    for pools in ([], [100]):
        result = bounds(workload, pools, block_tokens=128)
        assert result.infinite == 0.0
