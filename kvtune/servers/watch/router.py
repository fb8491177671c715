"""The hits that a router expected, by its /metrics, beside those that the servers' engines counted meanwhile.

In: the router's URL, and looks at the servers. Out: a `RouterView`. sglang's router counts in blocks, Dynamo's in
tokens (before: a ratio of each request), llm-d's endpoint picker a ratio of each request. What cannot be compared is
None, and named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvtune.base.errors import KvtuneError
from kvtune.data.run.ranges import Number
from kvtune.data.show.terminal import one_line
from kvtune.data.tally import Hits
from kvtune.servers.watch.client import Client
from kvtune.servers.watch.metrics import MOST, UNREADABLE, WrongValue, samples

ASK_S = 0.9
"""Shortest time in seconds between two scrapes."""
UNIT = "kv_block_size"
MOST_UNIT = 1 << 20
_RATIOS = {"ratios": "prefix_indexer_hit_ratio_sum", "rated": "prefix_indexer_hit_ratio_count"}
_EPP = {**_RATIOS, "requests": "request_total"}
KINDS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "sglang router",
        "sgl_router_",
        {
            "query": "cache_aware_query_blocks_total",
            "thought": "selected_overlap_blocks_total",
            "best": "matched_overlap_blocks_total",
            "requests": "worker_requests_total",
            UNIT: UNIT,
        },
    ),
    (
        "Dynamo router",
        "dynamo_component_router_",
        {
            "query": "input_sequence_tokens_sum",
            "thought": "kv_selected_cached_prefix_tokens_total",
            "best": "kv_best_eligible_cached_prefix_tokens_total",
            "ratios": "kv_hit_rate_sum",
            "rated": "kv_hit_rate_count",
            "requests": "requests_total",
        },
    ),
    # today's names of the endpoint picker, and two before
    *(
        ("llm-d endpoint picker", prefix, _EPP)
        for prefix in ("llm_d_epp_", "llm_d_router_epp_", "inference_extension_")
    ),
)
"""Each router's name, the prefix of its series, and which of them say what. Those in blocks have a size, `UNIT`."""
WANTED = tuple(prefix + name for _, prefix, names in KINDS for name in names.values())
OTHER_PHASE = "decode"
"""The phase of Dynamo's router in which no prompt is computed."""


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """Since `since`, when both were looked at first. None: not published, or not to be compared; `unknown` says why.

    `thought`: prompt tokens, and those that the chosen server held, as the router expected; `best`: those that the
    best one held. `mean_rate`: the mean of the requests' expected ratios. `had`: what the engines counted.
    """

    url: str
    kind: str = ""
    since: Number = 0.0
    thought: Hits | None = None
    best: Hits | None = None
    mean_rate: float | None = None
    requests: int | None = None
    had: Hits | None = None
    unknown: list[str] = []


@dataclass(frozen=True, slots=True)
class Counted:
    """One scrape: the counters by what they say, and the tokens of one; 0: not known."""

    kind: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)
    unit: float = 1.0
    unknown: tuple[str, ...] = ()


def counted(text: str, model: str) -> Counted:
    """Read a router's /metrics. UNREADABLE if it is in another format, or has values that no router has."""
    rows = [row for row in samples(text, WANTED) if row[1].get("phase") != OTHER_PHASE]
    series = {name for name, _, _ in rows}
    kinds = ((kind, {prefix + name: what for what, name in names.items()}) for kind, prefix, names in KINDS)
    kind, whats = next((each for each in kinds if not series.isdisjoint(each[1])), ("", {}))
    if not kind:
        return Counted(unknown=("it has no series of sgl_router_, dynamo_component_router_, llm_d_epp_",))
    models = {_model(labels) for _, labels, _ in rows} - {""}
    if len(models) > 1 and model not in models:
        return Counted(kind, unknown=(f"it counts {len(models)} models, but not {one_line(model)}",))
    counts: dict[str, float] = {}
    for name, labels, value in rows:
        ours = len(models) < 2 or _model(labels) in ("", model)
        if name in whats and ours and labels.get("worker_url") != "":  # "": sent to no server
            what = whats[name]
            counts[what] = (
                max(counts.get(UNIT, 0.0), value) if what == UNIT else counts.get(what, 0.0) + value
            )
    in_blocks = UNIT in whats.values()
    unit = counts.pop(UNIT, 0.0) if in_blocks else 1.0
    unit = unit if unit <= MOST_UNIT else 0.0
    if "thought" in counts and not unit:
        unknown = "the size of its blocks is not known: they are not counted in tokens"
    elif "thought" in counts:
        unknown = "it counts look-ups, not requests, and part-blocks as whole ones" if in_blocks else ""
    elif "rated" in counts:
        unknown = "it publishes the mean of its requests' ratios, and no tokens: no engine counts that mean"
    else:
        unknown = "it publishes requests only: what it expected is not known"
    return Counted(kind, counts, unit, (unknown,) if unknown else ())


def _model(labels: Mapping[str, str]) -> str:
    return labels.get("model_id", labels.get("model", ""))


@dataclass
class Router:
    """Looks at a router's /metrics, and at what the servers counted since."""

    client: Client
    since: float = 0.0
    view: RouterView = field(init=False)
    _first: Counted = field(default_factory=Counted)
    _had: dict[str, Hits] = field(default_factory=dict)
    """What each server had counted at the first look."""
    _asked: float = 0.0

    def __post_init__(self) -> None:
        self.view = RouterView(url=self.client.base)

    def look(self, at: float, model: str, had: Mapping[str, Hits]) -> RouterView:
        """Look at it, at the time at which the servers of a model had counted so much."""
        now = time.monotonic()
        if now < self._asked + ASK_S:
            return self.view
        self._asked = now
        try:
            last = counted(self.client.get("/metrics").text, model)
        except (KvtuneError, *UNREADABLE) as error:
            why = error.message if isinstance(error, KvtuneError) else ""
            why = why or (str(error) if isinstance(error, WrongValue) else "no Prometheus' format")
            self.view = RouterView(url=self.client.base, unknown=[f"the router: {one_line(why)[:200]}"])
            return self.view
        anew = any(last.counts.get(name, 0.0) < count for name, count in self._first.counts.items())
        fell = any(each.query_tokens < self._had.get(url, each).query_tokens for url, each in had.items())
        if not self.since or anew or fell or last.kind != self._first.kind:
            self.since, self._first, self._had = at, last, dict(had)
        self.view = self._between(last, had)
        return self.view

    def _between(self, last: Counted, had: Mapping[str, Hits]) -> RouterView:
        gained = {name: count - self._first.counts.get(name, 0.0) for name, count in last.counts.items()}
        both = [url for url in had if url in self._had]
        own = Hits(
            sum(had[url].query_tokens - self._had[url].query_tokens for url in both),
            sum(had[url].hit_tokens - self._had[url].hit_tokens for url in both),
        )
        unknown = list(last.unknown)
        if missing := sorted(had.keys() ^ self._had.keys()):
            unknown.append(
                f"{', '.join(missing)}: not there all the time, so what the router sent it is in its sums"
            )
        tokens = {name: int(count * last.unit) for name, count in gained.items()}
        query, hits = tokens.get("query", -1), dict[str, Hits]()
        for name in ("thought", "best"):
            if last.unit and name in tokens and tokens[name] <= query <= MOST:
                hits[name] = Hits(query, tokens[name])
            elif last.unit and name in tokens:
                unknown.append("it counts more tokens as held than it looked up")
        rated, ratios = gained.get("rated", 0.0), gained.get("ratios", 0.0)
        if ratios > rated:
            unknown.append("its ratios are above 1")
        return RouterView(
            url=self.client.base,
            kind=last.kind,
            since=self.since,
            thought=hits.get("thought"),
            best=hits.get("best"),
            mean_rate=ratios / rated if rated and ratios <= rated else None,
            requests=int(gained["requests"]) if "requests" in gained else None,
            had=own,
            unknown=unknown,
        )
