"""How many idle conversations a pool keeps: what doctor says, against replays through vLLM's own scheduler and cache.

N conversations are sent one after another, then each once more: all hit at N, and not all at N + 1.
"""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.doctor.model import ask_vllm
from kvtune.data.layout.idle import Footprint, Idle, conversations_kept
from kvtune.data.platforms import BY_MEMORY, DEVICES
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from tests.lab.sim.test_replay import replays
from tests.simulator import run

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
FAMILIES: list[Any] = [
    pytest.param("gpt-oss-20b", 2_000, (), id="windows"),
    *(
        pytest.param(model, blocks, flags, id=name, marks=pytest.mark.full)
        for name, model, blocks, flags in (
            ("full-attention", "llama-3.1-8b", 1_537, ()),
            ("full-attention-tight", "llama-3.1-8b", 513, ()),
            ("windows-of-1024", "gemma-3-27b", 5_001, ()),
            ("windows-kept-every-512", "gpt-oss-20b", 4_000, ("--prefix-cache-retention-interval", "512")),
            ("states", "qwen3-next-80b", 60, ()),
            ("states-mamba", "granite-4.0-h-tiny", 60, ()),
            ("draft", "qwen3.5-27b", 60, MTP),
        )
    ),
]


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```\n(.*?)^```", text, re.M | re.S)


def hits_again(simulators: Simulators, wanted: Setup, idle: Idle, number: int) -> list[int]:
    """What each of so many conversations hits when it is sent again."""
    load = f"rounds:prefixes={number},prefix={idle.prompt_tokens},suffix=0,output=2,rounds=2"
    (replay,) = replays(simulators, load, [wanted])
    return [int(tokens) for tokens in replay.table("requests")["hit_tokens"][number:]]


@pytest.mark.vllm
@pytest.mark.parametrize(("model", "blocks", "flags"), FAMILIES)
def test_so_many_idle_conversations_hit_and_not_one_more(
    simulators: Simulators, model: str, blocks: int, flags: tuple[str, ...]
) -> None:
    args = ["--max-model-len", "4200", "--num-gpu-blocks-override", str(blocks), *flags]
    asked = Setup(model=model, engine_args=args, platform=DEVICES["h100"])
    facts = ask_vllm(asked)
    (idle,) = facts.idle  # longer ones exceed max_model_len
    assert facts.pool_blocks == blocks and idle.prompt_tokens == 4096
    assert idle.conversations is not None and 1 < idle.conversations < 20
    assert 0 < sum(idle.blocks) <= idle.running_blocks
    assert 0 < idle.hit_tokens < 4096 and len(idle.blocks) == len(facts.groups)
    wanted = Setup(
        model=model, engine_args=args, core="stock", device=Simulated(), platform=DEVICES["h100"]
    ).sized()
    number = idle.conversations
    assert hits_again(simulators, wanted, idle, number) == [idle.hit_tokens] * number
    assert min(hits_again(simulators, wanted, idle, number + 1)) < idle.hit_tokens


@pytest.mark.full
@pytest.mark.vllm
def test_a_devices_memory_sizes_the_pool_and_doctor_says_what_it_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "llama-3.1-8b", "--like-device", "h100", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["pool_blocks"] == 29_858 and model["pool_why"].endswith(BY_MEMORY)
    assert [each["prompt_tokens"] for each in model["idle"]] == [4_096, 32_768, 131_070]
    for each in model["idle"]:
        # One group of full attention: what vLLM prints is what stays, up to one conversation.
        assert (
            0 <= model["tokens_fit"] - each["conversations"] * each["hit_tokens"] < 2 * each["prompt_tokens"]
        )


@pytest.mark.vllm
@pytest.mark.full
def test_the_page_shows_what_doctor_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    (block,) = [each for each in blocks_of(PAGE.read_text()) if "kvtune doctor gpt-oss-20b" in each]
    words, *lines = block.strip().splitlines()
    run(words.removeprefix("$ kvtune ").split())
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line != "..." and line not in printed] == []


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.parametrize("model", ["llama-3.1-70b", "mistral-small-3.1"])
def test_a_device_that_is_too_small_is_a_pool_unknown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """70B's weights do not fit; the other's do, and beside them no request of max_model_len."""
    device = {"llama-3.1-70b": "h100", "mistral-small-3.1": "52GiB"}[model]
    assert run(["doctor", model, "--like-device", device, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["model"]
    assert said["pool_blocks"] == 0 and said["pool_why"].startswith("unknown: ")
    assert said["idle"] and all(each["conversations"] is None for each in said["idle"])


def test_a_queue_of_blocks_keeps_what_the_arithmetic_says() -> None:
    """An LRU queue of blocks, by hand: `spare` blocks of each conversation come first in it and are not needed."""
    for kept in range(2, 6):
        for spare in range(kept - 1):
            for more in range(3):
                for again in range(3):
                    footprint = Footprint(kept, spare, kept + more, kept + again, kept + spare)
                    for usable in range(kept + max(more, again), 40):
                        number = conversations_kept(footprint, usable)
                        assert all_hit(footprint, usable, number)
                        assert not all_hit(footprint, usable, number + 1)


def all_hit(footprint: Footprint, usable: int, number: int) -> bool:
    """Whether `number` conversations, sent one after another and then again, all find the blocks that they need."""
    kept, spare = footprint.kept, footprint.spare
    free: deque[tuple[int, int] | None] = deque([None] * usable)

    def take(count: int) -> bool:
        if count > len(free):
            return False
        for _ in range(count):
            free.popleft()
        return True

    for conversation in range(number):
        if not take(footprint.most):
            return False
        free.extendleft([None] * (footprint.most - kept))
        free.extend((conversation, block) for block in range(kept))
    for conversation in range(number):
        needed = [(conversation, block) for block in range(spare, kept)]
        if not set(needed) <= set(free):
            return False
        for block in needed:
            free.remove(block)
        new = footprint.again_most - kept
        left = footprint.again_kept - kept
        if not take(max(new, left)):
            return False
        free.extendleft([None] * (max(new, left) - left))
        free.extend((conversation, kept + block) for block in range(left))
        free.extend(needed)
    return True
