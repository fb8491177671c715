"""What doctor is asked in a launch line's place: a layout that is known and the flags that decide its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtune.answers.doctor.boot import Boot, read_log
from kvtune.answers.doctor.finding import Finding, Level
from kvtune.answers.doctor.line import LaunchLine, checked, read_line, serve_flags
from kvtune.base.errors import UsageError, did_you_mean
from kvtune.data.file_flags import FLAGS, on_the_list
from kvtune.data.flags import SPECULATION, draft_settings, flag_number, flag_texts, flag_value, with_flag
from kvtune.data.layout.fields import text_config
from kvtune.data.layout.hub import assumed
from kvtune.data.layout.model_config import config_at_hand, model_config
from kvtune.data.platforms import LARGE_GPU, Platform
from kvtune.data.run.file import read_run
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.device.fit import fit
from kvtune.lab.setup.offload_flags import GIB, SIZE, tier_given, without_tier
from kvtune.lab.setup.platform import engines
from kvtune.lab.setup.setup import Pool

SPREAD = ("data-parallel-size", "enable-expert-parallel")
"""Flags that spread a model's experts over engines: each engine's cache is the same without them."""
OF_WEIGHTS = ("quantization", "load-format")
OWN_DRAFTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Fields of a config whose model has MTP layers."""


class Asked(NamedTuple):
    """What doctor is asked about: a model under flags, on the device of --like-device or this one.

    `pool`: what the flags do not say of it. `findings`: of the launch line. `boot`: a log to compare with. `tier`: the
    bytes of one, and `cost`: of its steps.
    """

    model: str | None
    flags: Sequence[str] = ()
    like: Platform | None = None
    pool: Pool = Pool()
    findings: tuple[Finding, ...] = ()
    boot: Boot | None = None
    tier: int = 0
    cost: StepCost = NOMINAL


def with_tier(asked: Asked, tier: str, like: Path | None = None) -> Asked:
    """Take a tier's flags out, and add its bytes: those of --tier, else those of the flags; the steps of a run."""
    given = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(GiB)?", tier or flag_value(asked.flags, SIZE) or "0")
    if given is None:
        raise UsageError(f"--tier {tier!a} is no size of host memory", "for instance 500GiB or 0.5GiB")
    size_bytes = int(float(given[1]) * GIB)
    odd = ", ".join(tier_given(asked.flags).keys() - {"eviction_policy"})
    if odd and size_bytes:
        unknown = Finding("warning", "tier", f"what it stores with {odd} is not known", "leave it out")
        asked, size_bytes = asked._replace(findings=(*asked.findings, unknown)), 0
    cost = fit(read_run(like)) if like else NOMINAL
    return asked._replace(flags=without_tier(asked.flags), tier=size_bytes, cost=cost)


def asked_of(model: str | None, words: Sequence[str], log: Path | None, like: Platform | None) -> Asked:
    """Return what to ask, from what follows `--` (MODEL's flags, or a launch line) or from a server's log."""
    if log is None and (not words or words[0].startswith("-")):
        if words and model is None:
            why = "what follows -- is read only with MODEL: flags are for one, a launch line begins with its program"
            raise UsageError(why, "add MODEL, or leave what follows -- out")
        return Asked(model, words, like)
    boot = read_log(log) if log is not None else None
    line = read_line(words) if boot is None else boot.line
    return of_line(line if model else checked(line), model, like, boot)


def of_line(line: LaunchLine, named: str | None, like: Platform | None, boot: Boot | None = None) -> Asked:
    """Return what to ask of a line. `named`: the layout that the user names."""
    findings: list[Finding] = []

    def say(topic: str, text: str, hint: str = "", level: Level = "note") -> None:
        findings.append(Finding(level, topic, text, hint))

    say("line", f"{line.form}: {line.model}{f', vLLM {line.version}' if line.version else ''}")
    flags, others = on_the_list(line.flags)
    spread = [f"--{name}" for name in SPREAD if name in flag_texts(flags)]
    for name in (*SPREAD, "distributed-executor-backend"):
        flags = with_flag(flags, name, None)
    at_hand = named is None and config_at_hand(line.model, folders=True).fields
    layout = None if named or at_hand else assumed(line.model)
    model = layout.layout if layout else named or line.model
    if layout is not None:
        say("layout", layout.said, "name another: kvtune doctor MODEL -- ..")
    if model != line.model:
        flags = _fitted(model, flags)
        if re.match(r"nvidia/.*nvfp4", line.model.lower()) and "kv-cache-dtype" not in flag_texts(flags):
            flags = with_flag(flags, "kv-cache-dtype", "fp8")
            say("kv type", "fp8, as NVIDIA's NVFP4 checkpoints ask (kv_cache_quant_algo)")
    drafter = draft_settings(line.flags) or {}
    number = drafter.get("num_speculative_tokens")
    if number and f"--{SPECULATION}" in others:
        fields = model_config(model).fields
        has_own = any((text_config(fields) | fields).get(name) for name in OWN_DRAFTS)
        own = {"method": "mtp", "num_speculative_tokens": number}
        flags = with_flag(flags, SPECULATION, json.dumps(own)) if has_own else flags
        stands = "the model's own MTP layer stands for it" if has_own else "left out"
        say("drafter", f"{json.dumps(drafter)}: {stands}", "its KV group is not counted")
    takes, matter = serve_flags()
    for word in (word for word in line.flags if word.startswith("--") and word[2:] not in takes):
        hint = f"{did_you_mean(word[2:], takes)}leave it out"
        say("flag", f"{word}: the server of vLLM 0.32 has no such flag and does not start", hint, "warning")
    deciding = (matter | FLAGS.keys()) - {*OF_WEIGHTS}
    unread = [
        word for word in (*others, *line.unknown) if word.split()[0][2:].removeprefix("no-") in deciding
    ]
    if unread:
        text = f"{', '.join(unread)}: what it does to the cache is not in this report"
        say("not read", text, "put values in place", "warning")
    unnamed = like is None and engines().kind == "cpu"  # an H100 stands for the device, of any memory
    unknown = "no --like-device names the memory" if unnamed or boot is not None else ""
    if unnamed:
        say("device", f"as on {LARGE_GPU.title}, whose memory is not assumed", "--like-device NAME")
    if spread:
        unknown = f"{', '.join(spread)}: how many of the experts each engine holds is not asked"
    if named is not None:
        unknown = f"{named} stands for {line.model}, whose weights are not known"
    if layout is not None and not layout.weights:
        unknown = layout.said
    return Asked(model, flags, LARGE_GPU if unnamed else like, Pool(unknown=unknown), tuple(findings), boot)


def _fitted(layout: str, flags: Sequence[str]) -> list[str]:
    """Return the flags for a layout that stands for another model, whose weights and longest length it has not."""
    fields = model_config(layout).fields
    asked = list(flags)
    for name in OF_WEIGHTS:
        asked = with_flag(asked, name, None)
    longest = flag_number(flag_texts(asked), "max-model-len", 0)
    if longest > int(text_config(fields).get("max_position_embeddings", longest)):
        longer: dict[str, Any] = {"max_position_embeddings": longest}
        longer = {"text_config": longer} if "text_config" in fields else longer
        asked = with_flag(asked, "hf-overrides", json.dumps(longer))
    return asked
