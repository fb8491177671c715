"""Reads vLLM's flags from a run file or a recipe, by a list of what is allowed. Pure.

Anyone may have written such a file, so its command line is not used as it is. Each flag is read by its full name into a
typed value, and written anew from that value. Flags that are not on the list (code, paths, addresses, names of models)
are refused, unless the user trusts the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvtune.base.bounded import decode_json
from kvtune.base.errors import UsageError
from kvtune.base.legal import Legal, Value
from kvtune.data.flags import Flag, parse_flags
from kvtune.data.knobs import DRAFTS, ENGINE, MOST, MOST_BYTES
from kvtune.data.knobs import TIER as TIER_KNOBS

SWITCH = Legal(kind="switch")
COUNT = Legal(kind="integer", low=1, high=MOST)
FROM_ZERO = Legal(kind="integer", low=0, high=MOST)
RANKS = Legal(kind="integer", low=1, high=1024)
STATES = Legal(kind="choice", choices=("auto", "float32", "float16", "bfloat16"))

FLAGS: dict[str, Legal] = {
    **{name.replace("_", "-"): legal for name, legal in ENGINE.items() if name not in (*TIER_KNOBS, DRAFTS)},
    "async-scheduling": SWITCH,
    "attention-backend": Legal(
        kind="choice",
        choices=(
            *("CPU_ATTN", "CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN"),
            *("FLASH_ATTN_MLA", "FLEX_ATTENTION", "ROCM_AITER_FA", "ROCM_ATTN", "TORCH_SDPA"),
            *("TRITON_ATTN", "TRITON_MLA"),
        ),
    ),
    "data-parallel-size": RANKS,
    "decode-context-parallel-size": RANKS,
    "disable-cascade-attn": SWITCH,
    "disable-hybrid-kv-cache-manager": SWITCH,
    "disable-sliding-window": SWITCH,
    "distributed-executor-backend": Legal(kind="choice", choices=("mp", "ray", "uni")),
    "dtype": Legal(kind="choice", choices=("auto", "bfloat16", "float", "float16", "float32", "half")),
    "enable-chunked-prefill": SWITCH,
    "enable-expert-parallel": SWITCH,
    "enforce-eager": SWITCH,
    "gdn-prefill-backend": Legal(kind="choice", choices=("flashinfer", "triton")),
    "kv-cache-dtype": Legal(
        kind="choice",
        choices=(
            *("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"),
            *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "nvfp4"),
            *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
        ),
    ),
    "kv-offloading-backend": Legal(kind="choice", choices=("native",)),
    "language-model-only": SWITCH,
    "load-format": Legal(kind="choice", choices=("auto", "dummy", "safetensors", "kvtune-seeded")),
    "long-prefill-token-threshold": FROM_ZERO,
    "long-prefill-token-threshold-adaptive": SWITCH,
    "mamba-cache-dtype": STATES,
    "mamba-ssm-cache-dtype": STATES,
    "max-num-active-seqs": COUNT,
    "max-num-scheduled-tokens": COUNT,
    "optimization-level": Legal(kind="integer", low=0, high=3),
    "pipeline-parallel-size": RANKS,
    "prefill-context-parallel-size": RANKS,
    "quantization": Legal(
        kind="choice",
        choices=(
            "awq",
            "awq_marlin",
            "bitsandbytes",
            "compressed-tensors",
            "fp8",
            "gptq",
            "gptq_marlin",
            "mxfp4",
        ),
    ),
    "scheduler-reserve-full-isl": SWITCH,
    "scheduling-policy": Legal(kind="choice", choices=("fcfs", "priority")),
    "seed": Legal(kind="integer", low=0, high=(1 << 63) - 1),
    "skip-tokenizer-init": SWITCH,
    "tensor-parallel-size": RANKS,
    "watermark": Legal(kind="number", low=0, high=1),
}
"""vLLM's flags that a file may give an engine, by full name, with the legal values of each."""

UNUSED = ("disable-log-stats", "download-dir", "served-model-name", "tokenizer", "tokenizer-revision")
"""Flags that change nothing for requests of token ids: left out, whatever their value."""

CONNECTOR, EXTRA = "OffloadingConnector", "kv_connector_extra_config"
TIER: dict[str, Legal] = {
    **TIER_KNOBS,
    "block_size": COUNT,
    "cpu_bytes_to_use": Legal(kind="integer", low=1, high=MOST_BYTES),
}
"""Settings of a tier of host memory, with the legal values of each."""

Fields = Mapping[str, "Legal | Fields"]
JSON_FLAGS: dict[str, Fields] = {
    "kv-transfer-config": {
        "kv_connector": Legal(kind="choice", choices=(CONNECTOR,)),
        "kv_role": Legal(kind="choice", choices=("kv_both", "kv_consumer", "kv_producer")),
        EXTRA: TIER,
    },
    "speculative-config": {
        "method": Legal(
            kind="choice",
            choices=(
                "dflash",
                "draft_model",
                "dspark",
                "eagle",
                "eagle3",
                "mtp",
                "ngram",
                "ngram_gpu",
                "suffix",
            ),
        ),
        "num_speculative_tokens": Legal(kind="integer", low=1, high=1024),
        "prompt_lookup_min": RANKS,
        "prompt_lookup_max": RANKS,
        "disable_eagle_block_drop": SWITCH,
        "disable_lookahead_block_hashes": SWITCH,
    },
}
"""Flags whose value is a JSON object, with the legal values of each of its fields."""

Settings = dict[str, "Value | Settings"]


def allowed_flags(words: Sequence[str], where: str, *, trusted: bool = False) -> list[str]:
    """Return a file's flags, written anew from their values. UsageError names the file and a flag that is not allowed.

    `trusted`: the user vouches for the file, so its flags are returned unchanged.
    """
    return list(words) if trusted else written(read_flags(words, where))


def on_the_list(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a file's flags that are on the list, written anew, and the names of all others."""
    settings: Settings = {}
    others: dict[str, None] = {}
    for flag in parse_flags(words):
        try:
            name, value = _read(flag, "")
        except UsageError:
            others[f"--{flag.name}" if flag.name else " ".join(flag.words)] = None
        else:
            settings.pop(name, None)
            settings[name] = value
    return written(settings), list(others)


def read_flags(words: Sequence[str], where: str) -> Settings:
    """Return the typed value of each flag, without UNUSED ones. If a flag is repeated, the last one counts."""
    settings: Settings = {}
    for flag in parse_flags(words):
        if flag.name not in UNUSED:
            name, value = _read(flag, where)
            settings.pop(name, None)
            settings[name] = value
    return settings


def written(settings: Settings) -> list[str]:
    """Return typed settings as flags with dashes."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value, separators=(",", ":"))]
        else:
            absent = value == "none" and FLAGS.get(name, COUNT).kind != "choice"
            words += [f"--{name}", "None" if absent else str(value)]
    return words


def _read(flag: Flag, where: str) -> tuple[str, Value | Settings]:
    if flag.name in JSON_FLAGS and len(flag.values) == 1:
        try:
            given = decode_json(flag.values[0])
        except ValueError:
            given = None
        return flag.name, _fields(given, JSON_FLAGS[flag.name], flag.name, where)
    legal = FLAGS.get(flag.setting)
    if legal is None or (legal.kind != "switch" and flag.setting != flag.name):
        raise _refused(where, f"--{flag.name}" if flag.name else " ".join(flag.words))
    if legal.kind == "switch":
        if flag.values:
            raise _refused(where, f"--{flag.name} {' '.join(flag.values)}")
        return flag.setting, flag.setting == flag.name
    value = legal.read(_plain(flag.values[0], legal)) if len(flag.values) == 1 else None
    if value is None:
        raise _refused(where, f"--{flag.name} {' '.join(flag.values)}".rstrip(), f"it takes {legal.legal}")
    return flag.name, value


def _plain(text: str, legal: Legal) -> str | int:
    """Return a whole number as int, also from vLLM's forms 32k (32,000) and 32K (32,768); other text as it is."""
    if legal.kind != "integer":
        return text
    number, unit = text[:-1], text[-1:]
    power = "kmgt".find(unit.lower()) + 1
    if (
        not unit
        or not power
        or not number.replace(".", "", 1).isdecimal()
        or not number.isascii()
        or len(number) > 20
    ):
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text
    return int(float(number) * (1024 if unit.isupper() else 1000) ** power)


def _fields(given: object, fields: Fields, name: str, where: str) -> Settings:
    if not isinstance(given, dict):
        raise _refused(where, f"--{name} that is not a JSON object")
    read: Settings = {}
    for field, value in given.items():
        legal = fields.get(field)
        if isinstance(legal, Mapping):
            read[field] = _fields(value, legal, name, where)
        elif legal is None:
            raise _refused(where, f"{field} in --{name}", f"it takes {', '.join(fields)}")
        elif not legal.is_legal(value):
            raise _refused(where, f"{field} = {json.dumps(value)} in --{name}", f"it takes {legal.legal}")
        else:
            read[field] = value
    return read


def _refused(where: str, what: str, legal: str = "") -> UsageError:
    return UsageError(
        f"{where}: {ascii(what)[1:-1]} is not taken from a file",
        f"{legal + '; ' if legal else ''}a file of your own: add --trust, and all its flags and its model are used",
    )
