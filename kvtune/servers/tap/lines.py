"""What the screen says of a request, as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from kvtune.data.causes import CAUSES
from kvtune.data.tally import Tally
from kvtune.requests.log.logged import short
from kvtune.requests.text.edits import Edit
from kvtune.requests.text.kinds import KINDS
from kvtune.servers.tap.judging import Differs, Request

GOOD = 200
MOST_SHOWN = 3
"""Differences of a request that the screen shows."""
LONGEST = 60
"""Characters of a text that it shows."""
LEFT = {
    "client": "the client left",
    "server": "the server broke off",
    "tap": "the tap ended",
    "unread": "the rest is no readable HTTP/1.1",
}


def as_text(request: Request) -> Iterator[str]:
    head = f"{request.label} {request.row.kind}{f' {request.group}' if request.group else ''}"
    seconds = f"{max(0.0, (request.row.t1 or 0.0) - (request.row.t0 or 0.0)):.1f} s"
    left = f", {LEFT[request.how]}" if request.how in LEFT else ""
    if request.status and request.status != GOOD:
        yield f"{head}  {request.status} {request.error}".rstrip() + f"  {seconds}{left}"
        return
    tokens = f" {request.tokens:,} tokens" if request.tokens >= 0 else ""
    where = f"  at {request.row.replica}" if request.row.replica else ""
    yield f"{head}{tokens}  {_hit(request)}  {seconds}{where}{left}"
    if request.differs is not None:
        yield from _differs(request.differs)
    if request.tally is not None and (missed := request.tally.misses):
        yield "  missed: " + ", ".join(f"{CAUSES[cause].title} {count:,}" for cause, count in missed.items())
    if request.trouble:
        yield f"  not analysed: {request.trouble}"
    if request.why or request.unwritten:
        yield f"  not in the log: {request.why or request.unwritten}"


def _differs(differs: Differs) -> Iterator[str]:
    most = differs.token + differs.after
    count = f"; {differs.after:,} tokens after it are the same: mended, up to {most:,} would hit"
    count = count if differs.after > 0 else ""
    head = f"  differs from #{differs.number} from token {differs.token:,} on"
    if not differs.edits and differs.alike:
        yield f"{head}: the requests are the same there, the server renders them differently{count}"
    elif not differs.edits:
        yield f"  {differs.after:,} of its tokens are also in #{differs.number}, after other text"
    edits = _telling(differs)
    for number, edit in enumerate(edits[:MOST_SHOWN]):
        kind = KINDS[edit.kind]
        where = f"{edit.place} line {edit.line}"
        what = f"«{_short(edit.old)}» «{_short(edit.new)}» ({kind.title})"
        yield f"{head if number == 0 else '  and'}, in {where}: {what}{count if number == 0 else ''}"
        yield f"    mend: {kind.mend}"
    if len(edits) > MOST_SHOWN:
        yield f"  and {len(edits) - MOST_SHOWN} more differences"


def _telling(differs: Differs) -> Sequence[Edit]:
    """Return the edits that tell something: of another application's prompt only where it begins to differ."""
    others = sum(edit.kind == "other" for edit in differs.edits)
    return differs.edits[:1] if not differs.alike and 2 * others > len(differs.edits) else differs.edits


def in_blocks(request: Request) -> Iterator[str]:
    """Show a prompt from its first to its last token: what hit, why the rest missed, the texts that differ."""
    head = f"{request.label} {request.row.kind} {request.group} {request.api}"
    tokens = f"{request.tokens:,}" if request.tokens >= 0 else "an unknown number of"
    yield f"{head}: {tokens} tokens, {_hit(request)}"
    tally = request.tally or Tally()
    spans = [("hit", tally.hit_tokens), *((CAUSES[cause].title, n) for cause, n in tally.misses.items())]
    begin = 0
    for title, count in spans:
        if count > 0:
            yield f"  {begin:>9,} to {begin + count:>9,}  {title}"
            begin += count
    if request.differs is None:
        return
    for edit in request.differs.edits:
        yield f"  {edit.place} line {edit.line}, {edit.role}: {KINDS[edit.kind].title}"
        yield f"    in #{request.differs.number}: {edit.old!r}"
        yield f"    here: {edit.new!r}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.."


def _hit(request: Request) -> str:
    total, tally = request.tokens, request.tally
    if tally is None:
        return "hit not reported"
    share = f"{tally.hit_tokens / total:.1%}, " if total > 0 else ""
    return f"hit {tally.hit_tokens:,} ({share}{request.by})"


class EditLine(Struct, frozen=True, kw_only=True):
    kind: Annotated[str, Meta(description="What was changed, such as a time.")]
    place: Annotated[str, Meta(description="Where in the body, such as system[0].")]
    role: Annotated[str, Meta(description="The role of that message.")]
    line: Annotated[int, Meta(description="Line of the text there, from 1.")]
    mend: Annotated[str, Meta(description="What helps against this kind.")]
    label: Annotated[str, Meta(description="With --with-text: how its line begins.")] | UnsetType = UNSET
    old: Annotated[str, Meta(description="With --with-text: the earlier text.")] | UnsetType = UNSET
    new: Annotated[str, Meta(description="With --with-text: this text.")] | UnsetType = UNSET


class DiffersLine(Struct, frozen=True, kw_only=True, rename={"number": "from"}):
    """`from`: the earlier request that it is compared with. No `edits`: the server renders the two differently."""

    number: int
    token: Annotated[int, Meta(description="The first token that differs.")]
    tokens_after: Annotated[int | None, Meta(description="Tokens after it that both have.")]
    edits: list[EditLine]


class Line(Struct, frozen=True, kw_only=True):
    """A request, or one prompt of it. Times are seconds since 1970; null: not known."""

    number: Annotated[int, Meta(description="Counts the requests of this tap, from 1.")]
    name: Annotated[str, Meta(description="Its name in the log.")]
    client: Annotated[str, Meta(description="The client's name, of its user agent.")]
    api: Annotated[str, Meta(description="The API's path.")]
    session: Annotated[str, Meta(description="The same where messages grow one from another.")]
    session_id: Annotated[str, Meta(description="That the server saw; of a long one its hash.")]
    t0: Annotated[float, Meta(description="When its head came.")]
    t1: Annotated[float, Meta(description="When its answer ended.")]
    first_token: Annotated[float | None, Meta(description="When a stream's first byte came.")]
    status: Annotated[int, Meta(description="The answer's HTTP status; 0: none came.")]
    ended: Annotated[
        str, Meta(extra_json_schema={"enum": ["whole", *LEFT]}, description="How, or who ended it.")
    ]
    error: Annotated[str, Meta(description="The server's words, without secrets.")]
    prompt_tokens: Annotated[int | None, Meta(description="As the server counts them.")]
    output_tokens: int | None
    hit_tokens: Annotated[int | None, Meta(description="Prompt tokens that were cached.")]
    hit_by: Annotated[str | None, Meta(description="Who counted the hit: `usage`, or KV `events`.")]
    misses: Annotated[dict[str, int], Meta(description="Computed prompt tokens by cause.")]
    differs: Annotated[DiffersLine | None, Meta(description="Where it differs from an earlier request.")]
    logged: Annotated[bool, Meta(description="Whether it is in the log.")]
    not_logged: Annotated[str, Meta(description="Why its tokens are not known, or not in the log.")]
    not_analysed: Annotated[str, Meta(description="Why it was not analysed, or not whole.")]
    replica: Annotated[
        str, Meta(description="With --replica-header: who served it, of a long name its hash.")
    ] = ""
    part: Annotated[int, Meta(description="Which of several prompts, from 1.")] | UnsetType = UNSET


def as_json(request: Request, with_text: bool = False) -> Line:
    """Return the request for `--json`; its texts that differ only `with_text`."""
    differs = request.differs
    return Line(
        number=request.number,
        name=request.row.name,
        client=request.row.kind,
        api=request.api,
        session=request.group,
        session_id=short(request.row.session),
        t0=request.row.t0 or 0.0,
        t1=request.row.t1 or 0.0,
        first_token=request.row.cached_at if request.row.ttft is not None else None,
        status=request.status,
        ended=request.how,
        error=request.error,
        prompt_tokens=_known(request.tokens),
        output_tokens=_known(request.row.output_tokens),
        hit_tokens=request.tally.hit_tokens if request.tally is not None else None,
        hit_by=request.by or None,
        misses=request.tally.misses if request.tally is not None else {},
        differs=None
        if differs is None
        else DiffersLine(
            number=differs.number,
            token=differs.token,
            tokens_after=_known(differs.after),
            edits=[_edit(edit, with_text) for edit in _telling(differs)],
        ),
        logged=request.logged,
        not_logged=request.why or request.unwritten,
        not_analysed=request.trouble,
        replica=request.row.replica,
        part=request.part or UNSET,
    )


def _edit(edit: Edit, with_text: bool) -> EditLine:
    texts = {"label": edit.label, "old": edit.old, "new": edit.new} if with_text else {}
    mend = KINDS[edit.kind].mend
    return EditLine(kind=edit.kind, place=edit.place, role=edit.role, line=edit.line, mend=mend, **texts)


def _known(count: int) -> int | None:
    return count if count >= 0 else None
