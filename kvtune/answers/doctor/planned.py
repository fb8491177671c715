"""Facts that the planner (`kvtune.data.layout`) works out from a config.json, with or without vLLM's answers.

Beside vLLM's answers the arithmetic counts only where it gives vLLM's own block (`agreed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvtune.answers.doctor.facts import Facts, Group, ModelFacts
from kvtune.base import children
from kvtune.base.errors import UsageError
from kvtune.data.flags import draft_settings, flag_number, flag_texts, flag_value, settings_given
from kvtune.data.installed import keeps_states_in_chunks
from kvtune.data.layout.config import FAMILIES, family_of, only_vllm, shape_of
from kvtune.data.layout.fields import Fields, text_config
from kvtune.data.layout.model_config import model_config
from kvtune.data.layout.models import engine_defaults
from kvtune.data.layout.plan import (
    CPU,
    GPU,
    Backend,
    BlockPlan,
    ModelShape,
    backend_of,
    gpu_backend,
    plan_per_layer,
)
from kvtune.data.platforms import MIB, Platform, cpu, defaults, origins
from kvtune.lab.setup.platform import gpus
from kvtune.lab.setup.resolve import ranks, tensor_parallel

SOME_GPU = Platform("cuda", "a GPU")
"""A GPU of unknown kind: vLLM's defaults for tokens and requests in a step are not known."""

ASSUMED = {
    None: "a GPU, states of the config's type",
    True: "this machine's CPU, with AVX-512 BF16, so recurrent states in float32",
    False: "this machine's CPU, without AVX-512 BF16",
}
"""The machine in words, by whether its CPU has AVX-512 BF16; None: no CPU."""


def planners_backend(facts: Facts) -> Backend:
    """Return the planner's description of the device."""
    return CPU if facts.device.startswith("cpu") else replace(GPU, delta_step=facts.state_step)


def agreed(facts: Facts) -> tuple[ModelShape, Backend] | None:
    """Return shape and backend of a model with states by arithmetic; None if its block is not that of the facts."""
    if not facts.hybrid or not facts.config:
        return None
    backend, asked = planners_backend(facts), facts.given.get("mamba-ssm-cache-dtype", "auto")
    shape, block = _shape_and_block(facts, backend, asked, float32_states=bool(facts.avx512_bf16))
    return (shape, backend) if shape is not None and block == facts.block_tokens else None


def _shape_and_block(
    facts: Facts, backend: Backend, state_dtype: str = "auto", *, float32_states: bool = False
) -> tuple[ModelShape | None, int]:
    """Return what the arithmetic makes of the model of these facts on any backend; None and 0 if it does not know."""
    try:
        shape = shape_of(
            facts.config,
            facts.model,
            dtype=facts.dtype or "auto",
            kv_cache_dtype=facts.kv_cache_dtype or "auto",
            state_dtype=state_dtype,
            float32_states=float32_states,
            tensor_parallel=flag_number(facts.given, "tensor-parallel-size", 1),
            drafts=facts.draft_tokens,
        )
        return shape, plan_per_layer(shape, backend, requested_block(facts)).block_tokens
    except UsageError:
        return None, 0


def requested_block(facts: ModelFacts) -> int | None:
    return flag_number(facts.given, "block-size", None)


def assumed_platform() -> Platform:
    """Return the platform to assume without vLLM: a GPU if `nvidia-smi` is on PATH, else this machine's CPU."""
    if not children.program("nvidia-smi"):
        return cpu()
    first = next(iter(gpus()), None)
    return Platform("cuda", first.name, first.total * MIB, first.capability) if first else SOME_GPU


def with_origins(facts: Facts, platform: Platform, engine_args: Sequence[str]) -> Facts:
    """Add the origins of max_num_batched_tokens, max_num_seqs and block_size.

    If vLLM was not asked, also add the first two values: from the flags, else vLLM's defaults.
    """
    taken = defaults(platform, ranks(engine_args))
    decided = origins(settings_given(engine_args), frozenset(), platform.title)
    words = {
        name: why if why == "flag" else f"{why}, by {taken[name].source}" for name, why in decided.items()
    }
    facts = msgspec.structs.replace(facts, origins=words)
    if facts.source == "vllm" or platform == SOME_GPU:
        return facts
    tokens, requests = (
        flag_number(facts.given, name.replace("_", "-"), int(taken[name].value))
        for name in ("max_num_batched_tokens", "max_num_seqs")
    )
    batches = 2 if taken["async_scheduling"].value and "no-async-scheduling" not in facts.given else 1
    return msgspec.structs.replace(
        facts,
        batched_tokens=tokens,
        max_requests=requests,
        in_flight_tokens=batches * tokens,
    )


def read_config(model: str, engine_args: Sequence[str], platform: Platform | None = None) -> Facts:
    """Return facts planned from config.json alone, for `platform` or else an assumed one; `Facts.assumed` names it."""
    platform = platform or assumed_platform()
    device = platform.runs_on
    file, given = model_config(model, flag_value(engine_args, "revision")), flag_texts(engine_args)
    if not file.fields:
        raise UsageError(file.why, "without vLLM, doctor reads config.json: give a folder that has one")
    config, flags = file.fields, {**engine_defaults(model, device), **given}
    caching = "no-enable-prefix-caching" not in flags
    backend = backend_of(platform, flags.get("attention-backend", ""))
    if not caching or flags.get("gdn-prefill-backend", "auto") not in ("auto", "flashinfer"):
        backend = replace(backend, delta_step=1)
    if ranks(engine_args) > tensor_parallel(engine_args):
        raise only_vllm(model, "which layers each rank of --pipeline-parallel-size holds is vLLM's choice")
    drafts = drafts_of(model, engine_args)
    shape = shape_of(
        config,
        model,
        tensor_parallel=tensor_parallel(engine_args),
        dtype=flags.get("dtype", "auto"),
        kv_cache_dtype=flags.get("kv-cache-dtype", "auto"),
        state_dtype=flags.get("mamba-ssm-cache-dtype", "auto"),
        float32_states=platform.float32_states,
        drafts=drafts,
    )
    bf16_on_hopper = (platform.capability[0], shape.kv_element_bytes) == (9, 2)
    if shape.latent and not bf16_on_hopper and "block-size" not in flags:
        raise only_vllm(model, f"the block of its attention (MLA) on {platform.title} is not known")
    plan = plan_per_layer(shape, backend, flag_number(flags, "block-size", None))
    # Mamba-2 exports a state from inside a chunk, to a block more.
    chunked = any(tensor.name == "ssm" and len(tensor.shape) == 3 for tensor in shape.states)
    bf16 = platform.float32_states if device == "cpu" else None
    step = backend.state_step(shape)
    text = Fields(text_config(config), model)
    return Facts(
        source="config",
        model=model,
        architecture=", ".join(map(str, Fields(config, model).items("architectures"))),
        device=f"{device} (assumed)",
        dtype=flags.get("dtype") or (text.text("dtype") or text.text("torch_dtype")),
        avx512_bf16=bf16,
        assumed=ASSUMED[bf16] + (", blocks as in vLLM 0.33" if step > 1 else ""),
        state_dtype=shape.state_dtype,
        given=given,
        max_model_len=flag_number(
            flags, "max-model-len", text.number("max_position_embeddings", default=0, least=0)
        ),
        caching=caching,
        block_tokens=plan.block_tokens,
        default_block_tokens=backend.default,
        state_step=step,
        state_mode="align" if shape.hybrid else "",
        match_unit=flag_number(flags, "prefix-match-unit", 0),
        retention=0,
        hash_tokens=plan.block_tokens,
        hit_tokens=plan.block_tokens,
        groups=_planned_groups(shape, plan, (2 + chunked if caching else 1) + drafts),
        group_layers=plan.group_layers,
        draft_tokens=drafts,
        config=config,
    )


def drafts_of(model: str, engine_args: Sequence[str]) -> int:
    """Return how many tokens the model's own MTP layer drafts. UsageError for another drafter."""
    drafts = draft_settings(engine_args) or {}
    method = drafts.get("method", "none")
    if method in ("mtp", "none"):
        return int(str(drafts.get("num_speculative_tokens", 0)))
    if method in ("ngram", "ngram_gpu", "suffix"):
        return 0
    raise only_vllm(model, f"what the drafter of method {str(method)[:40]!r} keeps is not known")


def _planned_groups(shape: ModelShape, plan: BlockPlan, state_blocks: int) -> list[Group]:
    page = plan.block_tokens * shape.layer_token_bytes
    kinds = (
        ("full attention", plan.attention_groups, shape.attention_layers, page, 0),
        ("sliding window", plan.window_groups, shape.window_layers, page, shape.window),
        ("state", plan.state_groups, shape.state_layers, shape.state_bytes, 0),
    )
    return [
        Group(
            kind=kind,  # type: ignore[arg-type]
            layers=len(range(number, layers, groups)),
            block_tokens=plan.block_tokens,
            page_bytes=page,
            used_bytes=used,
            window=window,
            specs=["MLAAttentionSpec"] if shape.latent and kind == "full attention" else [],
            request_blocks=state_blocks * (kind == "state"),
        )
        for kind, groups, layers, used, window in kinds
        for number in range(groups)
    ]


def with_gpu_block(facts: Facts) -> Facts:
    """Add the block size on a GPU, if this host has no GPU and the planner supports the model."""
    if not facts.hybrid or facts.device.startswith(("cuda", "gpu")) or not facts.config:
        return facts
    of_config = msgspec.structs.replace(facts, dtype="", kv_cache_dtype="")
    return msgspec.structs.replace(facts, gpu_block_tokens=_shape_and_block(of_config, GPU)[1])


def with_next_block(facts: Facts, platform: Platform) -> Facts:
    """Add the block size in vLLM 0.33 on this GPU, if the installed vLLM has another rule for it."""
    if platform.kind != "cuda" or not facts.hybrid or not facts.config or keeps_states_in_chunks():
        return facts
    backends = (gpu_backend("", platform.capability[0], chunks=chunks) for chunks in (False, True))
    now, then = (_shape_and_block(facts, backend)[1] for backend in backends)
    return msgspec.structs.replace(facts, next_block=then) if now == facts.block_tokens != then else facts


def with_state_rule(facts: Facts) -> Facts:
    """If the CPU's float32 states raise the block size, add the block size without them, and the flag for it."""
    if not facts.avx512_bf16 or agreed(facts) is None:
        return facts
    _, smaller = _shape_and_block(facts, CPU)
    if not 0 < smaller < facts.block_tokens:
        return facts
    model_dtype = facts.dtype if facts.dtype in ("float16", "bfloat16") else "bfloat16"
    counts = FAMILIES[family_of(facts.config)].flag_counts
    flag = f"--mamba-ssm-cache-dtype {model_dtype}" if counts else ""
    return msgspec.structs.replace(facts, model_state_block_tokens=smaller, state_dtype_flag=flag)
