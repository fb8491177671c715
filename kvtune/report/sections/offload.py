"""A tier of host memory: hits by tier, copies each way, what they were for. Drawn only for runs that have one."""

from __future__ import annotations

from dataclasses import asdict

from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Section, grid
from kvtune.report.console.offload import offload_rows, offload_title
from kvtune.units import percent


def section(analysis: RunAnalysis) -> Section | None:
    tier = analysis.offload
    if tier is None:
        return None
    rows = offload_rows(asdict(tier))
    title = offload_title(asdict(tier))
    hits = percent(tier.tier_hit_tokens, tier.prompt_tokens)
    lead = f"The second tier, in host memory, gave back {hits} of the prompt tokens."
    if tier.copies is not None and tier.copies.stored_chunks:
        unread = percent(tier.copies.unread_chunks, tier.copies.stored_chunks)
        lead += f" Of what was stored in it, {unread} was not read again in this run."
    return Section(
        id="offload",
        title="KV cache tier in host memory",
        lead=lead,
        template="memory.html",
        values={"table": grid((title, "amount", "share or time"), rows, title), "devices": None},
    )
