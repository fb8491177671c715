"""What vLLM's own tests that start engines and servers want, made here: a model with tokenizer and chat template under
the names of a hub, a `vllm` command, fixtures that are coroutines, and a simulated device for a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvtune.fake_device.settings import constant, write_device
from tests.tools.contracts.stand_ins import put_tokenizer, snapshot_of

FILES = ("v1/engine/test_async_llm.py", "entrypoints/openai/completion/test_completion.py")
"""Under vLLM's tests. Others of the OpenAI server's tests were not tried: most want a model whose answers mean
something (tools, reasoning, structured output), logprobs, which the device does not have, LoRA weights, or pictures.
"""

MODELS = (
    "facebook/opt-125m",
    "meta-llama/Llama-3.2-1B-Instruct",
    "Qwen/Qwen2-VL-2B-Instruct",  # named when test_async_llm.py is imported; what starts it is left out
)
"""The models that they name; each is one small Llama with random weights, which a server looks for before it starts."""

REPLACED = {
    "v1/engine/test_async_llm.py": {
        "if not current_platform.is_cuda():": "if False:",
        'ImageAsset("stop_sign").pil_image': "None",
    },
}
"""A skip without CUDA, and a picture that is fetched when the file is imported, for a model that takes pictures."""

LEFT_OUT = "not (engine_args1 or VISION)"
"""As pytest's -k: what wants a model that takes pictures, with its processor."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)

SERVE = Path(__file__).parents[2] / "engine" / "serve_on_host.py"
SCRIPT = """#!/bin/sh
# `vllm serve ..` on a simulated device, whose memory has to be said.
shift
exec "{python}" "{serve}" "$@" --kv-cache-memory-bytes 1073741824
"""

ASYNC_FIXTURES = '''
"""In the place of pytest-asyncio: a fixture that is a coroutine gives what it yields first."""
import asyncio
import functools
import inspect
import pytest

kept = []

def fixture(function=None, **options):
    if function is None:
        return functools.partial(fixture, **options)
    options.pop("loop_scope", None)

    @functools.wraps(function)
    def made(*args, **named):
        begun = function(*args, **named)
        loop = asyncio.new_event_loop()
        kept.append((loop, begun))  # a generator that ends closes what it gave
        return loop.run_until_complete(anext(begun) if inspect.isasyncgen(begun) else begun)

    return pytest.fixture(made, **options)
'''

PLUGIN = "on_device"
ON_DEVICE = '''
"""AsyncLLM's engines of a test process run on a simulated device, as those of `vllm serve` do."""
from kvtune.fake_device.settings import read_device
from kvtune.fake_device.shape import shape
from vllm.engine.arg_utils import AsyncEngineArgs

create = AsyncEngineArgs.create_engine_config

def shaped(self, *args, **options):
    self.kv_cache_memory_bytes = self.kv_cache_memory_bytes or 1 << 30  # a device without memory has no answer
    config = create(self, *args, **options)
    shape(config, read_device())
    return config

AsyncEngineArgs.create_engine_config = shaped
'''
STEP_US = 1000.0


def prepare(root: Path, home: Path, prose: list[str]) -> dict[str, str]:
    """Put everything beside vLLM's tests in `root`, models into the hub's cache; the environment of the tests."""
    put_models(home, prose)
    for name, texts in REPLACED.items():
        path = root / "tests" / name
        text = path.read_text()
        for old, new in texts.items():
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        path.write_text(text)
    (root.parent / "pytest_asyncio.py").write_text(ASYNC_FIXTURES)
    (root.parent / f"{PLUGIN}.py").write_text(ON_DEVICE)
    (root.parent / "bin").mkdir()
    script = root.parent / "bin" / "vllm"
    script.write_text(SCRIPT.format(python=sys.executable, serve=SERVE))
    script.chmod(0o755)
    write_device(constant(STEP_US), root.parent)
    path = os.pathsep.join([str(script.parent), os.environ.get("PATH", "")])
    return {"KVTUNE_RUN_DIR": str(root.parent), "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PATH": path}


def put_models(home: Path, prose: list[str]) -> None:
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    torch.manual_seed(0)
    first, *others = MODELS
    put_tokenizer(home, first, prose)
    folder = snapshot_of(home, first)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    config = AutoConfig.from_pretrained(str(folder))
    config.max_position_embeddings = 8192
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(str(folder))
    for name in others:
        other = snapshot_of(home, name)
        for path in folder.iterdir():
            (other / path.name).symlink_to(path)
