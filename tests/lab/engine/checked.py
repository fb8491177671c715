"""Servers for `kvtune check`: one of each layout that stock vLLM serves on a CPU; faults planted in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvtune.data.layout.models import builtin, engine_defaults
from tests.faults.kvtune_test_faults import VARIABLE
from tests.lab.engine.serving import served
from tests.lab.engine.twins import EXACT_ROTARY, TWINS, drafting, written
from tests.weights.kvtune_test_weights import LOAD_FORMAT

ROOT = Path(__file__).parents[3]
PLANTS = str(ROOT / "tests" / "faults")


class Served(NamedTuple):
    """A model by its name, the blocks of its pool, and flags. `draft`: the method of its draft model."""

    model: str
    blocks: int
    flags: Mapping[str, str] = {}
    draft: str = ""


TOKENS = "4"
OF_32 = {"block-size": "32"}
LONG = {"max-model-len": "4096"}
"""Room for prompts of several chunks."""
STATES = LONG | {"block-size": "384"}
"""Blocks that vLLM makes of this size anyway. If they are not given, an EngineCore on a CPU forgets their size."""
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'
SERVERS: dict[str, Served] = {
    "full": Served("tiny-opt", 450, OF_32),
    "full, blocks of 128": Served("tiny-llama", 120, LONG | {"block-size": "128"}),
    "windows": Served("tiny-gemma3", 900, LONG | OF_32),
    "windows, experts": Served("gptoss", 900, OF_32),
    "windows of other heads": Served("gemma4", 450, {"block-size": "64"}),
    "chunks": Served("llama4", 900, OF_32),
    "states (GDN)": Served("tiny-qwen3next", 60, STATES),
    "states (convolutions), experts": Served("lfm2moe", 2000),
    "host tier": Served("tiny-llama", 450, LONG | OF_32 | {"kv-offloading-size": "0.2"}),
    "ngram drafts": Served("tiny-llama", 450, LONG | OF_32 | {"speculative-config": NGRAM}),
    "draft model": Served("llama", 450, OF_32, draft="eagle3"),
}
"""Layouts that stock vLLM caches and a check is run on."""
ADAPTERS, FORGOTTEN, ROUNDED = "adapters", "states (GDN), no block size", "states (GDN), hits of 32"
OTHERS: dict[str, Served] = {
    "states (Mamba-2)": Served("tiny-granite", 400, LONG),
    FORGOTTEN: Served("tiny-qwen3next", 60, LONG),
    ROUNDED: Served("tiny-qwen3next", 60, STATES | {"prefix-match-unit": "32"}),
    ADAPTERS: Served("tiny-llama", 450, OF_32 | {"enable-lora": "", "max-lora-rank": "8"}),
}
"""What stock caches on a CPU only with `packed` of the core; vLLM's fault and rounding; what a check does not ask."""
FAULTS: dict[str, tuple[str, ...]] = {
    "full": ("other", "late", "one_in_20", "salt", "scale"),
    "windows": ("layer", "window"),
    "states (GDN)": ("state",),
}
"""Faults that a check sees, by the layout in which each is planted."""


@contextmanager
def server(folder: Path, name: str, core: str = "stock", **more: str) -> Iterator[str]:
    """`vllm serve` with weights that make answers depend on the whole prompt. `more`: environment variables.

    Faults can be planted in it if `plant` was called before.
    """
    asked = (SERVERS | OTHERS)[name]
    draft: list[str] = []
    if asked.draft:
        model, draft = drafting(asked.model, asked.draft, folder)
    else:
        model = written(asked.model, folder) if asked.model in TWINS else str(builtin(asked.model))
    own = asked.model in TWINS or bool(asked.draft)
    usual = engine_defaults("tiny-llama" if own else asked.model)
    chosen = {**usual, "load-format": LOAD_FORMAT, "max-model-len": "2048", "model": model}
    del chosen["kv-cache-memory-bytes"]
    chosen |= {"num-gpu-blocks-override": str(asked.blocks), "enable-prompt-tokens-details": ""}
    chosen |= {"served-model-name": asked.model, **asked.flags}
    chosen |= {"lora-modules": f"adapter={adapter(folder)}"} if name == ADAPTERS else {}
    chosen.pop("no-enable-prefix-caching", None)
    fault = folder / "fault"
    path = os.pathsep.join([str(ROOT), PLANTS, os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path,
        "KVTUNE_CORE": core,
        VARIABLE: str(fault) if fault.exists() else "",
        "KVTUNE_STRICT": "1",
    }
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        **more,
    }
    flags = [word for name, value in chosen.items() for word in (f"--{name}", value) if word]
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    with served(folder, command, [*flags, *(EXACT_ROTARY if own else []), *draft], environment) as base:
        yield base


def plant(folder: Path, fault: str) -> None:
    """Plant a fault in the server of this folder, in place of the one before; none if it is empty."""
    new = folder / "new"
    new.write_text(fault)
    new.replace(folder / "fault")


def check(base: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `kvtune check`; its exit code, and its answer."""
    command = [sys.executable, "-m", "kvtune", "check", base, "--yes", "--json", "--tokens", TOKENS, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def wrong(answer: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the wrong hits and all hits of each path that was shown."""
    return {each["name"]: (each["wrong"], each["hits"]) for each in answer["paths"] if each["hits"]}


def adapter(folder: Path) -> str:
    """Write an adapter of tiny-llama's queries, with random weights; its folder."""
    import torch
    from safetensors.torch import save_file

    made = folder / "adapter"
    made.mkdir()
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (made / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": ""}))
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.randn(
            (8, 128) if half == "A" else (128, 8), generator=generator
        )
        for layer in range(2)
        for half in "AB"
    }
    save_file(weights, str(made / "adapter_model.safetensors"))
    return str(made)
