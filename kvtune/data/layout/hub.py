"""Names that models have on the hub, and the built-in layouts that stand for them: by family and size, assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvtune.data.layout.models import builtin

QUANTIZED = re.compile(
    r"fp8|nvfp4|mxfp4|awq|gptq|auto-?round|exl3|bnb|w\da\d+|int-?[468]|(?<![a-z\d])[468]-?bit|\dbpw|gguf|q\d_"
)
"""What a name says of weights that are not stored in 16 bits."""
NAMED = tuple(
    (re.compile(pattern), layout)
    for pattern, layout in (
        (r"qwen3\.8-flash-next|qwen4-?exp", "qwen3.8-flash-next"),
        (r"qwen3\.[5-8]-(27b)", "qwen3.5-27b"),
        (r"qwen(3\.[5-6]|-agentworld)-35b-a3b", "qwen3.6-35b-a3b"),
        (r"qwen3\.[5-8]-(0\.8b|2b|4b|9b|122b-a10b|397b-a17b)", r"qwen3.5-\1"),
        (r"qwen3-(next-80b|coder-next)", "qwen3-next-80b"),
        (r"qwen3-(?:coder-|vl-|omni-)?30b-a3b.*fp8", "qwen3-30b-a3b-fp8"),
        (r"qwen3-(?:coder-|vl-|omni-)?(30b-a3b|235b-a22b|480b-a35b)", r"qwen3-\1"),
        (r"qwen3-(?:vl-)?(0\.6b|1\.7b|4b|8b|14b|32b)", r"qwen3-\1"),
        (
            r"qwen2\.5-(?:coder-|vl-|math-)?(0\.5b|1\.5b|3b|7b|14b|32b|72b)|(?:r1-)?distill-qwen-(7b|14b|32b)",
            r"qwen2.5-\1\2",
        ),
        (r"qwq-32b", "qwen2.5-32b"),
        (r"llama-?3\.1-8b|distill-llama-8b", "llama-3.1-8b"),
        (r"llama-?3\.[13]-70b|distill-llama-70b", "llama-3.1-70b"),
        (r"llama-?3\.2-(1b|3b)", r"llama-3.2-\1"),
        (r"llama-3-8b", "llama-3-8b"),
        (r"llama-4-scout", "llama-4-scout"),
        (r"gpt-oss-(20b|120b)", r"gpt-oss-\1"),
        (r"gemma-3-(4b|27b)", r"gemma-3-\1"),
        (r"gemma-4-(12b|26b|31b)", r"gemma-4-\1"),
        (r"deepseek-v3\.2", "deepseek-v3.2"),
        (r"deepseek-v4\.1-flash", "deepseek-v4.1-flash"),
        (r"deepseek-v4-flash", "deepseek-v4-flash"),
        (r"deepseek-(v3|r1)(?!.*distill)", "deepseek-v3"),
        (r"kimi-(k2|k3|linear)", r"kimi-\1"),
        (r"glm-5\.3-flash", "glm-5.3-flash"),
        (r"glm-5\.2(?!-flash)", "glm-5.2"),
        (r"glm-4\.[67](?!v|-?flash)", "glm-4.6"),
        (r"minimax-m2(?:\.\d)?", "minimax-m2.5"),
        (r"minimax-m3", "minimax-m3"),
        (r"mimo-v2-flash", "mimo-v2-flash"),
        (r"(mistral|devstral)-small(?!-4)", "mistral-small-3.1"),
        (r"mistral-large-3", "mistral-large-3"),
        (r"mistral-7b|mistral-nemo-minitron", "mistral-7b"),
        (r"nemotron-3(?:\.5)?-(?:nano|lightning)-30b", "nemotron-3-nano"),
        (r"nemotron-3-(super|ultra)", r"nemotron-3-\1"),
        (r"granite-4\.0-h-(tiny|small)", r"granite-4.0-h-\1"),
        (r"lfm2\.5-8b-a1b", "lfm2.5-8b-a1b"),
        (r"longcat-flash(?!-lite)", "longcat-flash"),
        (r"zamba2-2\.7b", "zamba2-2.7b"),
        (r"opt-125m", "opt-125m"),
    )
)
"""What names have in them, and the layout; of several that match, the first."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """A built-in layout that stands for a model. `weights`: whether the model's weights are stored as the layout's."""

    name: str
    layout: str
    weights: bool

    @property
    def said(self) -> str:
        differs = "" if self.weights else ", and its weights are quantized, of a size that is not known"
        return f"layout of {self.layout}, assumed for {self.name}: its config.json was not read{differs}"


def assumed(model: str) -> Assumed | None:
    """Return the built-in layout that a name on the hub, or a folder's, stands for; None if none does."""
    name = model.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    for pattern, layout in NAMED:
        if found := pattern.search(name):
            known = found.expand(layout)
            if builtin(known) is None:
                return None
            quantized = QUANTIZED.search(name) is not None and not known.endswith("-fp8")
            return Assumed(model, known, not quantized)
    return None
