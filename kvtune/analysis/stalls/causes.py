"""The causes of late tokens, in words, and what can be tried against each."""

from __future__ import annotations

CAUSES = {
    "preemption": "the request was preempted and computed again",
    "collection": "a garbage collection",
    "off_cpu": "a process waited for a CPU",
    "prefill": "prefill of other requests in the same step",
    "batch": "more or longer requests in the step",
    "device": "the step took longer than its work",
    "engine_wait": "EngineCore took long between two steps",
    "front_end": "the front end took the tokens late",
    "client": "the client took its tokens late",
    "unknown": "not explained",
}
"""The causes. If two have equal parts, the first one counts."""

LEAST_SHARE = 0.0005
"""A cause with a smaller share of the time is not shown: it would read 0."""

COLUMN = {cause: column for column, cause in enumerate(CAUSES)}

LOST = ("off_cpu", "device", "engine_wait", "front_end", "client")
"""Causes during which no process works for a request. Collections and preemptions are separate limits (verdict.py)."""

ADVICE = {
    "preemption": "Let fewer requests run at once (--max-num-seqs), or give the engine more blocks.",
    "collection": "Run with kvtune's core, which collects less; if it runs already, see which objects: --probe types.",
    "off_cpu": "Give the engine's processes cores that nothing else uses (taskset, cpusets), and look who runs there.",
    "prefill": "Compute prompts in smaller chunks (--max-num-batched-tokens): steps get shorter, prompts take longer.",
    "batch": "Fewer requests at once (--max-num-seqs) make each step shorter.",
    "device": "Repeat the run: a step that takes longer again at the same place is the model's, not the machine's.",
    "engine_wait": "See what EngineCore does between steps: sample its stacks (--stacks).",
    "front_end": "See what the front end does: sample its stacks (--stacks), or give it a core.",
    "client": "The engine had the tokens: look at the client, or at how many share the front end's loop.",
    "unknown": "Record more: --probe light has every figure that this account uses.",
}
