"""What vLLM's own tests read of a hub, made here: configurations, and a tokenizer with Llama 3's special tokens."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_FROM = 128_000
"""The first special token of Llama 3; tests name some of them by their numbers."""

SPECIAL = {128_000: "<|begin_of_text|>", 128_001: "<|end_of_text|>", 128_009: "<|eot_id|>"}


def put_configs(home: Path) -> None:
    """The scheduler's tests want a configuration alone; transformers has it as the defaults of OPTConfig."""
    from transformers import OPTConfig

    config = OPTConfig(architectures=["OPTForCausalLM"], dtype="float16").to_dict()
    (snapshot_of(home, "facebook/opt-125m") / "config.json").write_text(json.dumps(config))


def put_tokenizer(home: Path, name: str, prose: list[str]) -> None:
    """A byte-level tokenizer of `prose` with as many tokens as Llama 3's, and a small Llama's configuration."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer, Tokenizer
    from tokenizers.models import BPE
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(prose, vocab_size=1000)
    model = json.loads(trained.to_str())["model"]
    vocab: dict[str, int] = dict(model["vocab"])
    vocab |= {f"<|unused {number}|>": number for number in range(len(vocab), SPECIAL_FROM)}
    tokenizer = Tokenizer(BPE(vocab, [tuple(merge) for merge in model["merges"]]))
    tokenizer.pre_tokenizer, tokenizer.decoder = trained.pre_tokenizer, trained.decoder
    names = [SPECIAL.get(number, f"<|reserved {number}|>") for number in range(SPECIAL_FROM, 128_256)]
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[128_001])
    folder = snapshot_of(home, name)
    fast.save_pretrained(str(folder))
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128_256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        dtype="float16",
    ).save_pretrained(str(folder))


def snapshot_of(home: Path, name: str) -> Path:
    """The folder of a model in a hub's cache."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return snapshot
