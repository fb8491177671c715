"""What a file may say of an engine: listed flags by their full names, with values of their types, and nothing else."""

from __future__ import annotations

import json

import pytest

from kvtune.base.errors import UsageError
from kvtune.base.legal import Legal
from kvtune.data.file_flags import FLAGS, JSON_FLAGS, UNUSED, allowed_flags, read_flags, written


def transfer(connector: str = "OffloadingConnector", **extra: object) -> list[str]:
    fields = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(fields)]


FORBIDDEN = [
    ["--tr"],
    ["--trust-remote-code"],
    ["--no-trust-remote-code"],
    ["--seed", "1", "--tr"],
    ["evil.py"],
    ["--structured-outputs-config", '{"reasoning_parser_plugin": "/x.py"}'],
    ["--ec-transfer-config", '{"ec_connector_module_path": "evil"}'],
    ["--compilation-config", '{"backend": "evil.backend"}'],
    ["-cc.backend", "evil.backend"],
    [
        "--speculative-config",
        '{"method": "custom_class", "model": "evil.Drafter", "num_speculative_tokens": 1}',
    ],
    ["--speculative-config", '{"method": "eagle", "model": "/evil", "num_speculative_tokens": 1}'],
    ["--spec-model", "/evil"],
    ["--model", "/evil"],
    ["--hf-overrides", '{"architectures": ["Evil"]}'],
    ["--load-format", "tensorizer"],
    ["--config", "/evil.yaml"],
    ["--scheduler-cls", "evil.Scheduler"],
    ["--distributed-executor-backend", "evil.Executor"],
    ["--attention-backend", "CUSTOM"],
    ["--host", "0.0.0.0"],
    transfer(spec_name="Spec", spec_module_path="evil"),
    transfer(eviction_policy="Evil", cache_policy_module_path="evil"),
    transfer(eviction_policy="Evil"),
    transfer(secondary_tiers=[{"type": "fs", "root_dir": "/home"}]),
    transfer(blocks_per_chunk="2"),
    transfer("Evil"),
    ["--kv-transfer-config", '{"kv_connector_module_path": "evil"}'],
    ["--kv-transfer-config", '{"kv_connector_extra_config": 1}'],
    ["--kv-transfer-config", "evil"],
    ["--kv-transfer-config", "[" * 100_000],
    ["--kv-transfer-config"],
    ["--kv-transfer-config.kv_connector_extra_config.spec_module_path", "evil"],
    ["--kv-transfer.kv_connector_module_path", "evil"],
    ["--max-model-len", "4096", "evil"],
    ["--max-model-len"],
    ["--max-model-len", "--trust-remote-code"],
    ["--max-model-len=--trust-remote-code"],
    ["--max-model-len", "9" * 5000],
    ["--max-num-seqs", "-5"],
    ["--gpu-memory-utilization", "7"],
    ["--gpu-memory-utilization", "nan"],
    ["--enforce-eager", "evil"],
    ["--no-max-model-len"],
    ["--block-size\r--trust-remote-code"],
]


@pytest.mark.parametrize(
    "words", FORBIDDEN, ids=lambda words: " ".join(words)[:60].encode("unicode_escape").decode()
)
def test_what_is_not_on_the_list_is_refused_in_one_line_that_names_it(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"^some\.toml: .* is not taken from a file$") as refused:
        allowed_flags(words, "some.toml")
    assert "--trust" in refused.value.hint
    assert refused.value.message.isprintable()
    assert allowed_flags(words, "some.toml", trusted=True) == words


ORDINARY = [
    ["--num-gpu-blocks-override", "8000"],
    ["--max-model-len", "auto"],
    ["--dtype", "bfloat16"],
    ["--kv-cache-dtype", "fp8_e4m3"],
    ["--enforce-eager"],
    ["--no-async-scheduling"],
    ["--gpu-memory-utilization", "0.9"],
    ["--prefix-cache-retention-interval", "None"],
    ["--kv-cache-memory-bytes", "1073741824"],
    ["--kv-offloading-size", "0.5"],
    ["--attention-backend", "FLASH_ATTN"],
    ["--load-format", "kvtune-seeded"],
    ["--distributed-executor-backend", "mp"],
]


@pytest.mark.parametrize("words", ORDINARY, ids=" ".join)
def test_an_ordinary_flag_of_a_file_is_taken_as_it_was_given(words: list[str]) -> None:
    assert allowed_flags(words, "f") == words
    assert allowed_flags([words[0], *(f"{word}" for word in words[1:])], "f") == words


def test_a_flag_is_written_anew_by_its_full_name_with_its_value() -> None:
    given = ["-tp", "2", "--max_model_len=32K", "--max-num-batched-tokens", "2.5k", "--seed", "1", "--seed=2"]
    assert allowed_flags(given, "f") == [
        *("--tensor-parallel-size", "2", "--max-model-len", "32768"),
        *("--max-num-batched-tokens", "2500", "--seed", "2"),
    ]
    assert read_flags(["--gpu-memory-utilization=1"], "f") == {"gpu-memory-utilization": 1.0}


def test_json_flags_are_read_field_by_field() -> None:
    tier = transfer(eviction_policy="arc", store_threshold=2, offload_prompt_only=False)
    drafts = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4}'
    words = allowed_flags([*tier, "--kv-offloading-size", "4", "-sc", drafts], "f")
    assert json.loads(words[1]) == json.loads(tier[1])
    assert words[2:] == ["--kv-offloading-size", "4.0", "--speculative-config", drafts]


def test_what_changes_nothing_for_token_ids_is_left_out_whatever_it_says() -> None:
    assert allowed_flags(["--tokenizer", "/evil", "--served-model-name", "a", "b", "--seed", "1"], "f") == [
        "--seed",
        "1",
    ]


def words_of(legal: Legal) -> list[str]:
    if legal.kind == "switch":
        return []
    return [*legal.choices, *([] if legal.kind == "choice" else [f"{legal.low:.12g}"])]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllms_own_parser_reads_every_allowed_flag_as_itself_and_no_abbreviation() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvtune.lab.engine.config import parse_engine_args

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(allow_abbrev=False, exit_on_error=False))
    known = {option: action.dest for action in parser._actions for option in action.option_strings}
    absent = ("--api-server-count",)  # of `vllm serve` alone
    for name in (*FLAGS, *JSON_FLAGS, *UNUSED):
        assert f"--{name}" in absent or known.get(f"--{name}") == name.replace("-", "_"), name
    plain = vars(parser.parse_args([]))
    for name, legal in FLAGS.items():
        if f"--{name}" in absent:
            continue
        for given in (
            ([f"--{name}"], [f"--no-{name}"])
            if legal.kind == "switch"
            else ([f"--{name}", w] for w in words_of(legal))
        ):
            read = vars(parser.parse_args(written(read_flags(given, "f"))))
            changed = {dest for dest in read if read[dest] != plain[dest]}
            assert changed <= {name.replace("-", "_")}, given
    for begun in ("--tr", "--trust", "--max-model", "--no-trust"):
        with pytest.raises(UsageError, match="vLLM refuses"):
            parse_engine_args(["--model", "m", begun])
