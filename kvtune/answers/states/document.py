"""Words and draws `States`: one table, the sentence that names the winner, what does nothing here."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.answers.states.table import Row, States
from kvtune.base.units import count, percent, size
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, cell, grid_of
from kvtune.data.show.terminal import Column


def document(states: States) -> Document:
    return Document(
        name="kvtune sweep",
        subject=states.model,
        headline=f"{states.model}: {sentence(states)}",
        sections=(section(states),),
        identity=identity("states", states.model, {"workload": states.workload}),
        title=f"{states.model} · states · kvtune",
    )


def sentence(states: States) -> str:
    """Return the winner in one sentence, or that there is none."""
    now = percent(states.rows[0].hit_tokens or 0, states.query_tokens)
    if states.winner is None:
        return f"{now} of the prompt tokens hit as it is; {states.why}"
    best = states.best
    hits = percent(best.hit_tokens or 0, states.query_tokens)
    return f"{hits} of the prompt tokens hit with {' '.join(best.flags)}, {now} without ({states.why})"


def section(states: States) -> Section:
    legend = (
        "visit 2, visit 3: share of the tokens that hit in prompts whose beginning came once, twice before. states a "
        f"session, sessions fit, tail: of a prompt of {count(states.prompt_tokens)} tokens, alone: the states that it "
        "leaves, how many such the pool keeps hittable, the tokens at its end that are computed again when it is sent "
        "again."
    )
    return Section(
        "states",
        "Recurrent states",
        lead=f"{states.workload}: {count(states.query_tokens)} prompt tokens; each row is replayed by vLLM's own "
        f"scheduler. A state's block is {count(states.block_tokens)} tokens.",
        tables=(grid_of(_cells(row, states) for row in states.rows if not row.why_not).filled(),),
        notes=(f"{sentence(states)}.", legend, *_inert(states)),
        commands=(states.serve,),
    )


def _cells(row: Row, states: States) -> dict[str | Column, object]:
    second, third = (
        percent(hits, tokens) if tokens else "–"
        for hits, tokens in zip(row.visits[1:3], states.visit_tokens[1:3], strict=True)
    )
    return {
        Column("states kept", folds=True, least=18): row.kept,
        "visit 2": second,
        "visit 3": third,
        "all hits": percent(row.hit_tokens or 0, states.query_tokens),
        Column("states a session", rank=2): cell(row.state_bytes, size),
        Column("sessions fit", rank=1): cell(row.fit, count),
        Column("tail", rank=1): cell(row.tail_tokens, count),
        Column("flags", right=False, folds=True, least=20): " ".join(row.flags) or "–",
        Column("price", right=False, folds=True, rank=3, least=16): row.price or "–",
    }


def _inert(states: States) -> Iterator[str]:
    for row in states.rows:
        if row.why_not:
            yield f"{row.flags[0] if len(row.flags) < 3 else ' '.join(row.flags)}: {row.why_not}"
