"""How long requests waited and how fast tokens came: Run -> Latency. Pure.

First-token and end-to-end times count from when the request was sent. `send_lag_ms`: how much later than planned a
request was sent. Large lags show that the front end cannot keep up with an open-loop load. A replay at a nominal step
cost has no times (`untimed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.types import Run, Table, untimed
from kvtune.reading.analysis.spread import Spread, Values, spread


@dataclass(frozen=True, slots=True)
class Latency:
    """`requests` were sent, `finished` of them ended normally (length or stop). Rates are None without times."""

    requests: int
    finished: int
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    throughput_tok_s: float | None
    prompt_tok_s: float | None
    requests_s: float | None
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    send_lag_ms: Spread


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of each request in milliseconds (NaN if it has no such time). A gap is the time between two of its tokens.

    Tokens that came in one piece (several per step) share their gap evenly, so the mean gap is time per token.
    """

    ttft_ms: Values
    e2e_ms: Values
    gap_ms: Values
    gap_request: NDArray[np.int64]

    def gap_sums_ms(self) -> tuple[Values, Values]:
        """Return, for each request, the sum of its gaps and their number (both 0 without gaps)."""
        rows = len(self.ttft_ms)
        sums = np.bincount(self.gap_request, weights=self.gap_ms, minlength=rows)
        return sums.astype(np.float64), np.bincount(self.gap_request, minlength=rows).astype(np.float64)


def request_times(run: Run) -> RequestTimes:
    gap_request, gap_ms = _gaps(run)
    return RequestTimes(ttft_ms(run), e2e_ms(run), gap_ms, gap_request)


def of_server_ms(looks: Table) -> tuple[float | None, int]:
    """Return the mean time until the first token by a server's own histogram, and of how many requests."""
    counted, seconds = float(looks["first_tokens"].sum()), float(looks["first_token_s"].sum())
    counted_all = np.isfinite(counted + seconds) and counted > 0
    return (1000.0 * seconds / counted, round(counted)) if counted_all else (None, 0)


def _of_server(looks: Table) -> Spread:
    mean, requests = of_server_ms(looks)
    return Spread(mean=mean, count=requests)


def latency(run: Run, times: RequestTimes) -> Latency:
    requests = run.table("requests")
    sent = np.isfinite(requests["sent_s"])
    finished = _ended(run)
    prompt = int(requests["prompt_tokens"][sent].sum())
    output = int(requests["output_tokens"][sent].sum())
    wall_s = _work_s(run)
    timed_s = 0.0 if untimed(run.header) else wall_s
    lag = (requests["sent_s"] - requests["planned_s"]) * 1000.0
    return Latency(
        requests=int(sent.sum()),
        finished=int(finished.sum()),
        prompt_tokens=prompt,
        output_tokens=output,
        wall_s=wall_s,
        throughput_tok_s=_rate(output, timed_s),
        prompt_tok_s=_rate(prompt, timed_s),
        requests_s=_rate(int(finished.sum()), timed_s),
        ttft_ms=spread(times.ttft_ms) if np.isfinite(times.ttft_ms).any() else _of_server(run.table("looks")),
        itl_ms=spread(times.gap_ms),
        e2e_ms=spread(times.e2e_ms),
        send_lag_ms=spread(np.maximum(lag, 0.0) if not untimed(run.header) else np.full(len(lag), np.nan)),
    )


def _work_s(run: Run) -> float:
    """Return the seconds of the run's work. A recording may be longer than the traffic of its log: the log's then."""
    requests = run.table("requests")
    ends = requests["finished_s"][np.isfinite(requests["finished_s"])]
    if run.header.source != "server" or not len(ends):
        return run.header.wall_s
    return float(ends.max() - np.nanmin(requests["sent_s"]))


def ttft_ms(run: Run) -> Values:
    """Return the time to the first token of each request; NaN if it got none."""
    waits = waits_ms(run.table("requests"))
    return np.full(len(waits), np.nan) if untimed(run.header) else waits


def waits_ms(requests: Table) -> Values:
    """Return `ttft_ms` of a table of requests, which needs only the columns `sent_s` and `first_token_s`."""
    return np.asarray((requests["first_token_s"] - requests["sent_s"]) * 1000.0, dtype=np.float64)


def e2e_ms(run: Run) -> Values:
    """Return the time to the end of each request that ended normally; NaN for others."""
    requests = run.table("requests")
    whole = (requests["finished_s"] - requests["sent_s"]) * 1000.0
    return np.where(_ended(run) & (not untimed(run.header)), whole, np.nan)


def itl_ms(run: Run) -> Values:
    """Return the gaps between consecutive tokens of all requests together, in no special order."""
    return _gaps(run)[1]


def token_gaps_ms(run: Run) -> tuple[Values, Values]:
    """Return, for each request, the sum of its gaps between tokens and their number."""
    return request_times(run).gap_sums_ms()


def _gaps(run: Run) -> tuple[NDArray[np.int64], Values]:
    tokens = run.table("tokens")
    if untimed(run.header):
        return np.empty(0, np.int64), np.empty(0)
    request, t_s, count = tokens["request"].astype(np.int64), tokens["t_s"], tokens["count"]
    if not _in_order(request, t_s):  # sort only if needed: there can be millions of rows
        order = np.lexsort((t_s, request))
        request, t_s, count = request[order], t_s[order], count[order]
    count = np.maximum(count, 0)[1:]
    follows = (request[1:] == request[:-1]) & (count > 0)
    count = count[follows]
    gap = np.diff(t_s)[follows] * 1000.0 / count
    return np.repeat(request[1:][follows], count), np.repeat(gap, count)


def _in_order(request: NDArray[np.int64], t_s: Values) -> bool:
    later = (request[1:] > request[:-1]) | ((request[1:] == request[:-1]) & (t_s[1:] >= t_s[:-1]))
    return bool(later.all())


def _ended(run: Run) -> NDArray[np.bool_]:
    requests = run.table("requests")
    ended: NDArray[np.bool_] = np.isin(requests["finish"], ("length", "stop"))
    ended &= np.isfinite(requests["finished_s"])
    return ended


def _rate(amount: int, timed_s: float) -> float | None:
    return amount / timed_s if timed_s > 0 else None


def goodput(run: Run, request_times: RequestTimes) -> dict[str, Any] | None:
    """Return the number, share and rate of the requests that met all limits; None without limits or times.

    A request that did not finish meets no limit. A request with a single token meets every `tpot`.
    """
    slo = run.header.extra.slo
    if not slo or untimed(run.header):
        return None
    sums, counts = request_times.gap_sums_ms()
    tpot = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    times = {"ttft": request_times.ttft_ms, "tpot": tpot, "e2e": request_times.e2e_ms}
    sent = np.isfinite(run.table("requests")["sent_s"])
    met = sent & np.isfinite(times["e2e"])
    for name, limit in slo.items():
        with np.errstate(invalid="ignore"):  # NaN meets no limit
            met &= times[name] <= limit
    requests, wall_s = int(sent.sum()), run.header.wall_s
    return {
        "slo": dict(slo),
        "requests": int(met.sum()),
        "share": float(met.sum() / requests) if requests else None,
        "requests_s": float(met.sum() / wall_s) if wall_s > 0 else None,
    }
