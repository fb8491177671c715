"""What the screen says of a request, as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtune.causes import CAUSES
from kvtune.tap.judging import Judged

GOOD = 200
LEFT = {
    "client": "the client left",
    "server": "the server broke off",
    "unread": "the rest is no readable HTTP/1.1",
}


def as_text(judged: Judged) -> Iterator[str]:
    one = judged.request
    head = f"#{one.number} {one.client}{f' {one.group}' if one.group else ''}"
    seconds = f"{max(0.0, one.ended - one.began):.1f} s"
    left = f", {LEFT[judged.how]}" if judged.how in LEFT else ""
    if judged.status and judged.status != GOOD:
        yield f"{head}  {judged.status} {judged.error}".rstrip() + f"  {seconds}{left}"
        return
    tokens = f" {one.tokens:,} tokens" if one.tokens >= 0 else ""
    yield f"{head}{tokens}  {_hit(judged)}  {seconds}{left}"
    if one.differs is not None:
        yield (
            f"  differs from #{one.differs.number} from token {one.differs.token:,} on; "
            f"{one.differs.after:,} tokens after it are in both"
        )
    missed = {cause: count for cause, count in judged.causes.items() if count}
    if missed:
        yield "  missed: " + ", ".join(f"{CAUSES[cause].title} {count:,}" for cause, count in missed.items())
    if judged.why:
        yield f"  not in the log: {judged.why}"


def _hit(judged: Judged) -> str:
    total = judged.request.tokens
    if judged.hit < 0:
        return "hit not reported"
    share = f"{judged.hit / total:.1%}, " if total > 0 else ""
    return f"hit {judged.hit:,} ({share}{judged.by})"


def as_json(judged: Judged) -> dict[str, Any]:
    one = judged.request
    differs = one.differs
    return {
        "number": one.number,
        "name": one.name,
        "client": one.client,
        "api": one.api,
        "session": one.group,
        "session_id": one.session,
        "t0": one.began,
        "t1": one.ended,
        "first_token": one.first or None,
        "status": judged.status,
        "ended": judged.how,
        "error": judged.error,
        "prompt_tokens": _known(one.tokens),
        "output_tokens": _known(one.output_tokens),
        "hit_tokens": _known(judged.hit),
        "hit_by": judged.by or None,
        "misses": judged.causes,
        "differs": None
        if differs is None
        else {"from": differs.number, "token": differs.token, "tokens_after": differs.after},
        "logged": judged.logged,
        "not_logged": judged.why,
    }


def _known(count: int) -> int | None:
    return count if count >= 0 else None
