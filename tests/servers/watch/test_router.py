"""What a router says that it expected, beside what the engines had: texts in its real format, over real HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtune.data.tally import Hits
from kvtune.servers.watch.client import Client
from kvtune.servers.watch.document import router_section
from kvtune.servers.watch.router import Router, RouterView, counted
from tests.servers.watch.played import Answers, counters, http
from tests.simulator import run


def sglang(query: int, matched: int, selected: int, size: int = 16, model: str = "tiny") -> str:
    """As sglang's experimental router prints it: blocks, by model and decision; a request that went to no worker."""
    rows = [
        ("cache_aware_query_blocks", query),
        ("matched_overlap_blocks", matched),
        ("selected_overlap_blocks", selected),
    ]
    lines = []
    for name, count in rows:
        lines += [f"# HELP sgl_router_{name}_total Blocks.", f"# TYPE sgl_router_{name}_total counter"]
        for decision, part in (("cache_hit", count - count // 4), ("no_candidates", count // 4)):
            lines.append(f'sgl_router_{name}_total{{model_id="{model}",decision="{decision}"}} {part}')
    lines += ["# TYPE sgl_router_kv_block_size gauge", f"sgl_router_kv_block_size {size}"]
    lines += [
        "# TYPE sgl_router_overlap_blocks histogram",
        f'sgl_router_overlap_blocks_bucket{{model_id="{model}",le="+Inf"}} 9',
    ]
    lines += ["# TYPE sgl_router_worker_requests_total counter"]
    for worker, requests in (("http://a", query // 10), ("", 7)):
        labels = f'worker_url="{worker}",model_id="{model}",mode="plain",outcome="success"'
        lines.append(f"sgl_router_worker_requests_total{{{labels}}} {requests}")
    return "\n".join([*lines, ""])


def dynamo(tokens: int, best: int, selected: int, phase: str = "aggregated") -> str:
    """As Dynamo's router prints it: tokens, by phase and model; the decode phase of the same requests."""
    both = 'dynamo_component="backend",router_id="291"'
    lines = [
        f"dynamo_component_router_kv_hit_rate_sum{{{both}}} 4.5",
        f"dynamo_component_router_kv_hit_rate_count{{{both}}} 10",
    ]
    lines += [f"dynamo_component_router_requests_total{{{both}}} 10"]
    for each, share in ((phase, 1), ("decode", 5)):
        labels = f'{{{both},model="tiny",phase="{each}"}}'
        lines.append(f"dynamo_component_router_input_sequence_tokens_sum{labels} {tokens * share}")
        lines.append(
            f"dynamo_component_router_kv_best_eligible_cached_prefix_tokens_total{labels} {best * share}"
        )
        lines.append(
            f"dynamo_component_router_kv_selected_cached_prefix_tokens_total{labels} {selected * share}"
        )
    return "\n".join([*lines, ""])


def epp(prefix: str, ratios: float, count: int) -> str:
    """As llm-d's endpoint picker prints it: a histogram of ratios, without a model."""
    name = f"{prefix}prefix_indexer_hit_ratio"
    labels = '{plugin_name="approx",plugin_type="approx-prefix-cache-producer"}'
    return (
        f"# HELP {name} [ALPHA] Ratio of prefix length matched to total prefix length.\n# TYPE {name} histogram\n"
        f'{name}_bucket{{plugin_name="approx",le="+Inf"}} {count}\n'
        f"{name}_sum{labels} {ratios}\n{name}_count{labels} {count}\n"
        f'{prefix}request_total{{model_name="tiny",target_model_name="tiny",priority="0"}} {count}\n'
    )


REQUESTS = 'llm_d_epp_request_total{model_name="tiny",target_model_name="tiny",priority="0"} '
OLDER_DYNAMO = (
    "dynamo_component_router_kv_hit_rate_sum{} %s\ndynamo_component_router_kv_hit_rate_count{} 10\n"
    "dynamo_component_router_requests_total 10\n"
)


def looked(first: str, then: str) -> RouterView:
    """What two looks say: between them the engine looked 1,000 tokens up and had 400."""
    answers = Answers(first)
    with http(answers) as url:
        router = Router(Client(url, {}, False))
        router.look(1.0, "tiny", {"http://a": Hits(5_000, 2_000), "http://b": Hits(0, 0)})
        answers.paths["/metrics"] = (200, then)
        router._asked = 0.0
        view = router.look(2.0, "tiny", {"http://a": Hits(5_900, 2_400), "http://b": Hits(100, 0)})
        router.client.close()
    return view


HAD = Hits(1_000, 400)


def test_sglangs_blocks_are_tokens_of_the_chosen_and_of_the_best_server() -> None:
    view = looked(sglang(100, 40, 20), sglang(160, 90, 50))
    assert view.kind == "sglang router" and view.requests == 6, "a request that went to no worker is none"
    assert (view.thought, view.best, view.had) == (Hits(960, 480), Hits(960, 800), HAD)
    assert view.mean_rate is None and view.unknown == [
        "it counts look-ups, not requests, and part-blocks as whole ones"
    ]
    shown = router_section(view)
    assert [row[1].text for row in shown.tables[0].rows][:3] == [
        "50.0 %, 480 of 960 tokens",
        "83.3 %, 800 of 960 tokens",
        "40.0 %, 400 of 1,000 tokens",
    ]


@pytest.mark.parametrize("phase", ["aggregated", "prefill"])
def test_dynamos_tokens_are_those_of_prompts_and_not_of_the_decode_phase(phase: str) -> None:
    view = looked(dynamo(100, 90, 80, phase), dynamo(1_100, 790, 480, phase))
    assert (view.kind, view.thought, view.best, view.had) == (
        "Dynamo router",
        Hits(1_000, 400),
        Hits(1_000, 700),
        HAD,
    )
    assert view.unknown == []


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        *(
            (epp(prefix, 3.0, 10), epp(prefix, 9.0, 20), "llm-d endpoint picker")
            for prefix in ("llm_d_epp_", "llm_d_router_epp_", "inference_extension_")
        ),
        (OLDER_DYNAMO % 0.0, (OLDER_DYNAMO % 6.0).replace(" 10\n", " 20\n"), "Dynamo router"),
    ],
)
def test_ratios_of_requests_are_a_mean_and_no_tokens(first: str, then: str, kind: str) -> None:
    view = looked(first, then)
    assert (view.kind, view.thought, view.best, view.had) == (kind, None, None, HAD)
    assert view.mean_rate == pytest.approx(0.6) and view.requests == 10
    assert view.unknown == [
        "it publishes the mean of its requests' ratios, and no tokens: no engine counts that mean"
    ]


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (REQUESTS + "5\n", REQUESTS + "9\n", "requests only"),
        (sglang(100, 40, 20, size=0), sglang(160, 90, 50, size=0), "size of its blocks is not known"),
        (
            sglang(100, 40, 20, size=1 << 52),
            sglang(160, 90, 50, size=1 << 52),
            "size of its blocks is not known",
        ),
        (sglang(100, 40, 20), sglang(101, 90, 50), "more tokens as held than it looked up"),
        (epp("llm_d_epp_", 1.0, 10), epp("llm_d_epp_", 90.0, 20), "ratios are above 1"),
        (
            sglang(9, 4, 2, model="x") + sglang(9, 4, 2, model="y"),
            sglang(9, 4, 2, model="x") + sglang(9, 4, 2, model="y"),
            "2 models, but not tiny",
        ),
        ("up 1\n", "up 1\n", "no series of sgl_router_"),
        ("", "", "no series of sgl_router_"),
        (dynamo(1, 1, 1), dynamo(1, 1, 1).replace("_sum{", "_sum{{"), "no Prometheus' format"),
        (dynamo(1, 1, 1), "dynamo_component_router_kv_hit_rate_sum NaN\n", "is nan"),
        (dynamo(1, 1, 1), "dynamo_component_router_kv_hit_rate_sum -4\n", "is -4"),
        (dynamo(1, 1, 1), "dynamo_component_router_kv_hit_rate_sum 1e300\n", "is 1e+300"),
        (dynamo(1, 1, 1), "dynamo_component_router_requests_total 1\n" * 60_000, "60,000 lines"),
        (dynamo(1, 1, 1), "sgl_router_kv_block_size " + "9" * (9 << 20), "MiB"),
        (sglang(100, 40, 20), sglang(160, 90, 50, model="\x1b[31m\u202e" + "x" * 999), "look-ups"),
    ],
    ids=range(15),
)
def test_what_cannot_be_compared_is_unknown_and_named(first: str, then: str, why: str) -> None:
    view = looked(first, then)
    assert view.thought is None or view.best is None or why == "look-ups"
    assert any(why in line for line in view.unknown), view.unknown
    assert all(line.isprintable() and len(line) < 300 for line in view.unknown)
    json.dumps(router_section(view).notes)


def test_a_router_that_starts_again_is_counted_from_there() -> None:
    view = looked(sglang(100, 40, 20), sglang(60, 30, 10))
    assert view.thought == Hits(0, 0) == view.had


def test_servers_that_come_or_start_again_are_named_or_begin_anew() -> None:
    with http(Answers(sglang(100, 40, 20))) as url:
        router = Router(Client(url, {}, False))

        def view(at: float, **had: int) -> RouterView:
            router._asked = 0.0
            return router.look(at, "tiny", {name: Hits(count, 0) for name, count in had.items()})

        assert view(1.0, a=50).had == Hits(0, 0)
        more = view(2.0, a=60, b=1_000)
        assert more.had == Hits(10, 0) and more.unknown[-1].startswith("b: not there all the time")
        assert view(3.0, a=5, b=1_000).since == 3.0, "it was started again"
        router.client.close()


def test_of_several_models_the_servers_own_is_counted() -> None:
    text = sglang(160, 90, 48) + sglang(1_000, 4, 4, model="other")
    assert counted(text, "tiny").counts["thought"] == 48.0


def test_watch_shows_both_and_a_dead_router_costs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def watched(*words: str) -> Any:
        assert run(["watch", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    looks: list[int] = []

    def metrics(_: Any) -> str:
        looks.append(1)
        return sglang(100 * len(looks), 50 * len(looks), 40 * len(looks))

    router = Answers("")
    router.paths["/metrics"] = (200, metrics)
    with http(Answers(counters(100, 40))) as server, http(router) as url:
        view = watched(server, "--router", f"{url}/metrics", "--seconds", "1.1")["router"]
        assert (
            view["thought"] == {"query_tokens": 1_600, "hit_tokens": 640} and view["kind"] == "sglang router"
        )
    with http(Answers(counters(100, 40))) as server:
        answer = watched(server, "--router", "http://127.0.0.1:9", "--seconds", "0.2")
    assert answer["query_tokens"] == 100 and answer["router"]["unknown"][0].startswith("the router: ")
