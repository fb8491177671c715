"""Warnings at the top of a page: a partial run, distorted times, an inactive core."""

from __future__ import annotations

from kvtune.base.units import count
from kvtune.data.installed import INSTEAD
from kvtune.data.run.types import Run, untimed
from kvtune.data.show.parts import Banner

NO_STATES = "the model has no recurrent states beside attention that blocks could hold"
NOTES = "Notes on this run."


def _sentence(text: str) -> str:
    text = text.strip() or "No reason was recorded."
    first = text[:1].upper() if text.split()[0].islower() else text[:1]  # `vLLM` is not capitalized
    return f"{first}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def banners(run: Run) -> list[Banner]:
    h = run.header
    shown = []
    if h.state == "failed":
        shown.append(Banner("bad", "This run failed.", _sentence(h.why)))
    if h.state == "partial":
        text = f"{_sentence(h.why)} What was measured until then is shown."
        shown.append(Banner("bad", "This run is partial.", text))
    if h.source == "sim":
        times = untimed(h)
        text = "These numbers come from replaying the workload through vLLM's scheduler without a model, " + (
            "at a nominal speed. Hits in a pool that is nearly full depend on the speed; times would mean nothing."
            if times
            else "at the speed of a recorded run. Times are estimates."
        )
        shown.append(Banner("info", "Predicted, not measured.", text))
    if h.source == "host":
        text = (
            f"vLLM's real processes and scheduler on a simulated device ({h.engine.device_name}): what the "
            "host costs is measured, tokens mean nothing, and no worker prepared inputs or launched kernels."
        )
        shown.append(Banner("info", "The host alone, without a model.", text))
    if h.source != "sim" and not h.valid.timings:
        shown.append(Banner("warn", "Do not trust the times.", _sentence(h.valid.why)))
    if h.core.name == "kvtune" and not h.core.active:
        title = "kvtune's core was not active: this is stock vLLM."
        shown.append(Banner("warn", title, _sentence(h.core.why)))
    left_out = next((n for n in h.notes if INSTEAD in n), "")
    if left_out and h.core.active:
        shown.append(Banner("warn", "Parts of kvtune's core were not loaded.", _sentence(left_out)))
    if h.core.parts.get("packed") is False and not left_out:
        why = next((n for n in h.notes if n.startswith("packed: ")), NO_STATES)
        shown.append(Banner("warn", "Blocks stayed vLLM's own: packed is not in force.", _sentence(why)))
    for process, why in h.probe.disabled.items():
        shown.append(Banner("warn", f"A probe switched itself off in {process}.", why))
    lost = {process: n for process, n in h.probe.lost_records.items() if n}
    if lost:
        text = ", ".join(f"{process}: {count(n)}" for process, n in lost.items())
        shown.append(Banner("warn", "Records were overwritten, the oldest first.", text))
    if h.notes:
        shown.append(Banner("info", NOTES, f"{count(len(h.notes))} of them.", tuple(h.notes)))
    return shown
