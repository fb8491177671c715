"""vLLM's own renderer in a child: families that no chat template renders, and models that vLLM cannot load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.requests.log import rendering
from kvtune.requests.log.bodies import DATE, REMINDER, Rendered, body_of
from kvtune.requests.log.render_loop import LOAD
from kvtune.requests.log.rendering import Renderer, Rendering, renderer
from kvtune.requests.log.requests_log import read_log
from tests.tokenizers import make_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.full]
pytest.importorskip("vllm")

ASKED = {"role": "user", "content": "Hi"}
YO = {"role": "assistant", "content": "Yo"}
LEFT = {"role": "system", "content": "5 tokens left"}
TOOL = {"name": "weather", "description": "w", "input_schema": {"type": "object", "properties": {}}}
FUNCTION = {"name": "weather", "description": "w", "parameters": {"type": "object", "properties": {}}}
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}
BODIES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "system", "content": "Be brief."}, ASKED]},
    {"messages": [ASKED, YO, ASKED], "tools": [{"type": "function", "function": FUNCTION}]},
    {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abc123def", "content": "sun"},
        ]
    },
    {
        "messages": [ASKED],
        "system": [{"type": "text", "text": "Be brief."}],
        "max_tokens": 9,
        "tools": [TOOL],
    },
    {
        "messages": [ASKED],
        "system": "Be brief.",
        "max_tokens": 9,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    },
    {"messages": [ASKED, YO, LEFT, ASKED], "system": "Be brief.", "max_tokens": 9},
    {"input": "Hi", "instructions": "Be brief."},
    {"prompt": "Hi 東京"},
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def model(folder: Path, config: dict[str, Any], template: str = "chatml") -> Path:
    make_tokenizer(folder, template)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text(by: Renderer, **body: Any) -> str:
    return by.text(by.ids(body))


@pytest.fixture(scope="module")
def by_vllm(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    by = renderer(str(model(tmp_path_factory.mktemp("models") / "llama", LLAMA)))
    assert isinstance(by, Rendering)
    return by


def test_a_models_folder_is_rendered_by_vllm_to_the_ids_of_its_template(
    by_vllm: Rendering, tmp_path: Path
) -> None:
    by, template = by_vllm, Rendering(by_vllm.name)
    assert by.how.startswith("the renderer of vLLM ") and template.how == "the chat template, without vLLM"
    bodies = [body_of(body) for body in BODIES]
    for theirs, ours, body in zip(by.render(bodies), template.render(bodies), BODIES, strict=True):
        assert isinstance(theirs, Rendered) and isinstance(ours, Rendered), body
        assert list(theirs.ids) == list(ours.ids) and theirs.notes == ours.notes, body
    assert by.text(by.ids({"prompt": "Hi 東京"})) == "Hi 東京"
    log = tmp_path / "log.jsonl"
    picture = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    }
    log.write_text(json.dumps(BODIES[0]) + "\n" + json.dumps(picture) + "\n")
    with pytest.raises(UsageError, match=r"log\.jsonl, line 2 is refused by vLLM: .*multimodal"):
        list(read_log(log, by.render))


def test_what_vllm_cannot_load_is_rendered_by_the_template_and_says_why(
    by_vllm: Rendering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(model(tmp_path / "new", {"architectures": ["NewForCausalLM"], "model_type": "new"}))

    def made(tokenizer: str, module: str = rendering.CHILD) -> Rendering:
        """A process with vLLM is there already: it takes seconds to start."""
        if module == rendering.VLLM_CHILD:
            by_vllm._asked(LOAD, tokenizer.encode())
        return Rendering(tokenizer, module)

    monkeypatch.setattr(rendering, "Rendering", made)
    by = renderer(folder)
    assert by.how.startswith("the chat template, without vLLM (vLLM's renderer does not load the model: ")
    assert folder not in by.how
    assert text(by, messages=[ASKED]).startswith("<|im_start|>user\nHi")


def oss(folder: Path) -> Path:
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "head_dim": 64}
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    return model(
        folder, {**LLAMA, **shape, **layers, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    )


def deepseek(version: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        shape = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
        shape |= {
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "index_topk": 64,
            "index_n_heads": 2,
            "index_head_dim": 16,
        }
        name = f"{version.title().replace('_', '')}ForCausalLM"
        config = {**LLAMA, **shape, "architectures": [name], "model_type": version}
        return model(folder, config | ({"text_config": LLAMA | shape} if version == "deepseek_v41" else {}))

    return made


def kimi(folder: Path) -> Path:
    """Kimi K3 with a chat template. The published tokenizer renders by code in its repository, which is not run."""
    text = {**LLAMA, "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    text["linear_attn_config"] = None
    name = "KimiK3ForConditionalGeneration"
    model(folder, {"architectures": [name], "model_type": "kimi_k3", "text_config": text})
    limits = dict.fromkeys(("in_patch_limit", "in_patch_limit_each_frame", "in_patch_limit_video"), 4096)
    images = {"patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4} | limits
    images |= {"patch_limit_on_one_side": 512, "fixed_output_tokens": None}
    images |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": images}))
    return folder


def mistral(folder: Path) -> Path:
    import mistral_common

    model(
        folder,
        {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 131_072},
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    data = Path(str(mistral_common.__file__)).parent / "data" / "tekken_240911.json"
    (folder / "tekken.json").symlink_to(data)
    (folder / "consolidated.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "begins", "moves"),
    [
        (oss, "<|start|>system<|message|>You are ChatGPT", False),
        (deepseek("deepseek_v32"), "<\uff5cbegin\u2581of\u2581sentence\uff5c>", True),
        (deepseek("deepseek_v4"), "<\uff5cbegin\u2581of\u2581sentence\uff5c>", True),
        (deepseek("deepseek_v41"), "<\uff5cbegin\u2581of\u2581sentence\uff5c>", True),
        (kimi, "<|im_start|>", True),
        (mistral, "<s>", True),
    ],
    ids=["gpt-oss", "deepseek-v3.2", "deepseek-v4", "deepseek-v4.1", "kimi-k3", "mistral"],
)
def test_families_that_vllm_renders_by_code(
    made: Callable[[Path], Path], begins: str, moves: bool, tmp_path: Path
) -> None:
    by = renderer(str(made(tmp_path / "model")))
    assert by.how.startswith("the renderer of vLLM "), by.how
    for body in BODIES[:-1]:
        (one,) = by.render([body_of(body, sent=1.75e9)])
        assert isinstance(one, Rendered), (body, one)
        said = by.text(one.ids)
        assert said.startswith(begins) and "Hi" in said
        assert ("Be brief." in said) == ("Be brief." in json.dumps(body))
        assert ("weather" in said) == ("weather" in json.dumps(body))
        if LEFT in body.get("messages", ()):
            assert (REMINDER in {note.kind for note in one.notes}) == moves
            assert ("Be brief.5 tokens left" in said) == moves


@pytest.mark.full
def test_kimi_k3_as_published_is_refused_by_name_and_its_code_is_not_run(tmp_path: Path) -> None:
    folder = kimi(tmp_path / "k3")
    (folder / "tokenizer.json").unlink()
    classes = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (folder / "tokenization_kimi.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(KvtuneError) as refused:
        renderer(str(folder))
    assert "a tokenizer that is code in the model's repository, which is not run" in refused.value.message
    assert "return_token_ids" in refused.value.hint
    assert not (tmp_path / "ran").exists()


@pytest.mark.full
def test_gpt_oss_has_the_date_of_the_day_on_which_the_request_was_sent(tmp_path: Path) -> None:
    by = renderer(str(oss(tmp_path / "oss")))
    days = [body_of({"messages": [ASKED]}, sent=1.75e9 + day * 86_400) for day in (0, 0, 1)]
    first, same, next_day = (one for one in by.render(days) if isinstance(one, Rendered))
    assert list(first.ids) == list(same.ids) != list(next_day.ids)
    assert "Current date: 2025-06-1" in by.text(first.ids)
    assert [note.kind for note in first.notes] == [DATE]
    assert text(by, prompt="Hi") == "Hi"
