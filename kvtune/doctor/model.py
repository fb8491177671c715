"""What a model's settings come to: groups, blocks and why, bytes, waste, what can hit and from which visit on.

`examine_model` asks a child process that has vLLM (doctor_probe), or reads config.json where vLLM is missing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvtune.doctor.facts import Facts, Group, Visits
from kvtune.doctor.finding import Finding
from kvtune.engine.flags import flag_texts
from kvtune.engine.models import builtin, engine_defaults
from kvtune.engine.resolve import ENGINES, resolve
from kvtune.errors import KvtuneError, UsageError
from kvtune.layout.choice import Layouts, layouts_of, load_of
from kvtune.layout.config import StateTypes, family_of, keeps_asked_state_dtype, shape_of, state_dtype_of
from kvtune.layout.plan import (
    CPU,
    CPU_BF16,
    GPU,
    Backend,
    BlockPlan,
    ModelShape,
    cpu_backend,
    match_units,
    plan_per_layer,
)
from kvtune.run.cpu import avx512_bf16
from kvtune.run.scratch import scratch
from kvtune.units import count, size
from kvtune.workload.types import Workload

PROBE_TIMEOUT_S = 300.0
NOMINAL_POOL_BYTES = 16 << 30  # of the table of layouts, where only a started engine knows its memory
UNBUILDABLE = "cannot be built without weights"


@dataclass(frozen=True, slots=True)
class Floor:
    """The shortest beginning of a prompt that can be hit, and why no shorter one can."""

    tokens: int
    why: str
    first_visit: int  # that hits where each visit brings a new suffix; 0: none of the replayed did
    last_first_visit: int  # the same in the worst of the replayed cases


@dataclass(frozen=True, slots=True)
class ModelReport:
    facts: Facts
    floor: Floor | None
    layouts: Layouts | None = None  # of a model with states that the planner knows

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers that keep it for the whole sequence."""
        whole = [g for g in self.facts.groups if g.kind in ("full attention", "other")]
        return sum(g.layers * g.used_bytes // g.block_tokens for g in whole if g.block_tokens)

    @property
    def state_bytes(self) -> int:
        """All states of one sequence."""
        return sum(g.layers * g.used_bytes for g in self.facts.groups if g.kind == "state")

    @property
    def tail_bytes(self) -> int:
        """Lost on average in the last, half filled attention blocks of a sequence."""
        whole = [g for g in self.facts.groups if g.kind != "state"]
        return sum(g.layers * g.page_bytes // 2 for g in whole)

    def pad_share(self, group: Group) -> float:
        """Share of a group's blocks that holds nothing: page padding and layers that only fill the group up."""
        whole = self.facts.group_layers * group.page_bytes
        return 1.0 - group.layers * group.used_bytes / whole if whole else 0.0

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(self.facts)
        facts.pop("config")
        return {
            **facts,
            "block_bytes": self.facts.block_bytes,
            "token_bytes": self.token_bytes,
            "state_bytes": self.state_bytes,
            "tail_bytes": self.tail_bytes,
            "match_units": match_units(self.facts.block_tokens, 16) if self.facts.hybrid else [],
            "floor": None if self.floor is None else asdict(self.floor),
            "layouts": None if self.layouts is None else self.layouts.to_json(),
        }


def examine_model(
    model: str, engine_args: Sequence[str], workload: Workload | None = None
) -> tuple[ModelReport, tuple[Finding, ...]]:
    """The report on a model under vLLM's flags, and the findings about its settings; `workload` weighs layouts."""
    from kvtune.doctor.environment import installed
    from kvtune.doctor.rules import settings_findings

    notes: tuple[Finding, ...] = ()
    if not any(installed(name) for name in ENGINES):
        facts = read_config(model, engine_args)
    else:
        try:
            facts = ask_vllm(model, engine_args)
        except KvtuneError as error:
            # A model may need kernels that this machine's vLLM has not: its config still says a lot.
            if UNBUILDABLE not in error.message:
                raise
            facts = read_config(model, engine_args, "gpu")
            notes = (Finding("note", "model", error.message, "what is said here is planned for a GPU"),)
    facts = with_state_rule(_with_gpu(facts))
    layouts = layouts_for(facts, workload)
    if layouts is not None and layouts.recommended:
        row = layouts.rows[layouts.recommended]
        chosen = f"--set core.packed=true --set core.states_per_block={row.states} (experimental)"
        notes = (*notes, Finding("note", "layout", layouts.why, chosen))
    return ModelReport(facts, floor_of(facts), layouts), (*notes, *settings_findings(facts))


def layouts_for(facts: Facts, workload: Workload | None) -> Layouts | None:
    """Stock's layout and the packed ones; None where there are no states, or the planner knows other blocks."""
    if not facts.hybrid or not facts.config:
        return None
    backend = backend_of(facts)
    wanted = _asked_block(facts)
    try:
        shape = _shape(facts, backend)
        plan = plan_per_layer(shape, backend, wanted)
    except UsageError:
        return None
    if plan.block_tokens != facts.block_tokens:
        return None
    return layouts_of(
        shape,
        backend,
        facts.pool_bytes or NOMINAL_POOL_BYTES,
        load=load_of(workload) if workload is not None else None,
        asked_block=wanted,
        refusal=facts.packing_refusal,
    )


def ask_vllm(model: str, engine_args: Sequence[str]) -> Facts:
    """Facts from vLLM's own configuration and KV specs, in a process without weights."""
    resolve(model, dummy=True, engine_args=engine_args)  # what is wrong with it is said at once
    with scratch("doctor") as folder:
        answer = folder / "facts.json"
        question = {"model": model, "args": list(engine_args), "given": flag_texts(engine_args)}
        command = [sys.executable, "-m", "kvtune.doctor.child", str(answer)]
        try:
            done = subprocess.run(
                command, input=json.dumps(question), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise KvtuneError(
                f"vLLM did not settle the configuration of {model} within {PROBE_TIMEOUT_S:.0f} s",
                "a model by its hub name needs the network: give a folder with config.json",
            ) from error
        if not answer.exists():
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no message"]
            raise KvtuneError(
                f"the process that asks vLLM about {model} ended with code {done.returncode}: {lines[-1].strip()}",
                "run again with --debug and report it",
            )
        said = json.loads(answer.read_text())
    if "message" in said:
        raise KvtuneError(said["message"], said.get("hint", ""), int(said.get("exit_code", 1)))
    return msgspec.convert(said, Facts)


def backend_of(facts: Facts) -> Backend:
    """The planner's backend for the device of these facts."""
    return cpu_backend(bool(facts.avx512_bf16)) if facts.device.startswith("cpu") else GPU


def _shape(facts: Facts, backend: Backend, *, state_dtype: str = "") -> ModelShape:
    return shape_of(
        facts.config,
        facts.model,
        dtype=facts.dtype or "auto",
        kv_cache_dtype=facts.kv_cache_dtype or "auto",
        state_dtype=state_dtype or facts.given.get("mamba-ssm-cache-dtype", "auto"),
        float32_states=backend.float32_states,
    )


def _asked_block(facts: Facts) -> int | None:
    asked = facts.given.get("block-size", "")
    return int(asked) if asked.isdigit() else None


def read_config(model: str, engine_args: Sequence[str], device: Literal["", "cpu", "gpu"] = "") -> Facts:
    """Facts from config.json alone, by the planner's rule: what can be said without vLLM.

    `device` "": a GPU where `nvidia-smi` is on PATH, else this machine's CPU. The facts say which was assumed.
    """
    config = config_of(model)
    flags = {**engine_defaults(model), **flag_texts(engine_args)}
    device = device or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    float32 = device == "cpu" and avx512_bf16()
    backend = cpu_backend(float32) if device == "cpu" else GPU
    types: StateTypes = {
        "dtype": flags.get("dtype", "auto"),
        "state_dtype": flags.get("mamba-ssm-cache-dtype", "auto"),
        "float32_states": float32,
    }
    shape = shape_of(config, model, **types)
    asked = flags.get("block-size")
    plan = plan_per_layer(shape, backend, int(asked) if asked and asked.isdigit() else None)
    has = "with AVX-512 BF16, so recurrent states in float32" if float32 else "without AVX-512 BF16"
    assumed = f"this machine's CPU, {has}" if device == "cpu" else "a GPU, states as the config has them"
    text = config.get("text_config") or config
    length = flags.get("max-model-len", "")
    return Facts(
        source="config",
        model=model,
        architecture=", ".join(config.get("architectures", [])),
        device=f"{device} (assumed)",
        dtype=flags.get("dtype") or str(text.get("dtype") or text.get("torch_dtype") or ""),
        avx512_bf16=float32 if device == "cpu" else None,
        assumed=assumed,
        state_dtype=state_dtype_of(config, **types),
        given=flag_texts(engine_args),
        max_model_len=int(length) if length.isdigit() else int(text.get("max_position_embeddings") or 0),
        caching="no-enable-prefix-caching" not in flags,
        block_tokens=plan.block_tokens,
        default_block_tokens=backend.default,
        state_mode="align" if shape.hybrid else "",
        match_unit=int(flags["prefix-match-unit"]) if flags.get("prefix-match-unit", "").isdigit() else 0,
        retention=0,
        hash_tokens=plan.block_tokens,
        hit_tokens=plan.block_tokens,
        groups=_planned_groups(shape, plan),
        group_layers=plan.attention_group_layers,
        config=config,
    )


def _planned_groups(shape: ModelShape, plan: BlockPlan) -> list[Group]:
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
        )
        for kind, groups, layers, used, window in kinds
        for number in range(groups)
    ]


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a built-in model or a folder; UsageError for a model that only a hub knows."""
    folder = builtin(model) or Path(model).expanduser()
    path = folder / "config.json"
    if not path.exists():
        raise UsageError(
            f"there is no {path}",
            "without vLLM, doctor reads config.json: give a folder that has one, or install vLLM",
        )
    try:
        loaded: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not JSON: {error}", "repair the file") from error
    return loaded


def _with_gpu(facts: Facts) -> Facts:
    """Add what a GPU's effective block size would be, where this host has none and the planner knows the model."""
    if not facts.hybrid or facts.device.startswith(("cuda", "gpu")) or not facts.config:
        return facts
    try:
        shape = shape_of(facts.config, facts.model, kv_cache_dtype="auto")
    except UsageError:
        return facts
    plan = plan_per_layer(shape, GPU, _asked_block(facts))
    return msgspec.structs.replace(facts, gpu_block_tokens=plan.block_tokens)


def with_state_rule(facts: Facts) -> Facts:
    """Add what the CPU's rule for states costs, and the flag that avoids it, where it raises the block."""
    if not (facts.avx512_bf16 and facts.hybrid and facts.config):
        return facts
    kept = keeps_asked_state_dtype(family_of(facts.config))
    model_dtype = facts.dtype if facts.dtype in ("float16", "bfloat16") else "bfloat16"
    asked = _asked_block(facts)
    try:
        now = plan_per_layer(_shape(facts, CPU_BF16), CPU_BF16, asked).block_tokens
        otherwise = plan_per_layer(_shape(facts, CPU, state_dtype="auto"), CPU, asked).block_tokens
    except UsageError:
        return facts
    if now != facts.block_tokens or otherwise >= now:
        return facts
    flag = f"--mamba-ssm-cache-dtype {model_dtype}" if kept else ""
    return msgspec.structs.replace(facts, model_state_block_tokens=otherwise, state_dtype_flag=flag)


def block_why(facts: Facts) -> str:
    """Why a block has the size it has, in one sentence."""
    state = next((g for g in facts.groups if g.kind == "state"), None)
    attention = next((g for g in facts.groups if g.kind != "state"), None)
    if state is None or attention is None:
        if (
            facts.given.get("block-size", "").isdigit()
            and int(facts.given["block-size"]) == facts.block_tokens
        ):
            return "as asked for"
        return f"what the {facts.device} attention backend takes"
    token = attention.used_bytes // attention.block_tokens
    tokens = ceil(state.used_bytes / token)
    asked = facts.given.get("block-size", "")
    step = int(asked) if asked.isdigit() else facts.default_block_tokens or 1
    return (
        f"a layer's block of attention ({size(token)} a token) must hold one state of {size(state.used_bytes)} "
        f"({count(state.used_bytes)} B): {tokens} tokens or more, in steps of {step}"
    )


def floor_of(facts: Facts) -> Floor | None:
    """The shortest shared prefix that can hit; None when nothing ever can."""
    if not facts.caching or not facts.groups or 0 < facts.max_model_len <= facts.block_tokens:
        return None
    tokens = max(group.block_tokens for group in facts.groups)
    why = f"a hit is whole blocks, and a block is {tokens} tokens: {block_why(facts)}"
    firsts = first_hits(facts.shared_prefix, tokens)
    return Floor(tokens, why, min(firsts, default=0), max(firsts, default=0))


def first_hits(visits: Sequence[Visits], floor: int) -> list[int]:
    """Of each replayed prefix that is long enough, the first visit that hit; those that never did are left out."""
    found = []
    for visit in visits:
        hit = next((number for number, tokens in enumerate(visit.hit_tokens, start=1) if tokens), 0)
        if visit.prefix_tokens >= floor and hit:
            found.append(hit)
    return found
