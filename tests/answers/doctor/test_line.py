"""A launch line is read in each form in which people paste it, or refused by name."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.doctor.asked import of_line
from kvtune.answers.doctor.line import checked, line_of_flags, read_line
from kvtune.base.bounded import BeyondError, decode_yaml
from kvtune.base.errors import UsageError
from kvtune.base.script import commands
from kvtune.data.file_flags import on_the_list
from kvtune.data.flags import flag_texts, parse_flags
from kvtune.data.layout.hub import assumed
from kvtune.data.platforms import device

PUBLIC: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "lines.toml").read_text(encoding="utf-8")
)["line"]
H100 = device("h100")
SERVE = "vllm serve Qwen/Qwen3.8-27B --max-model-len 32768"


@pytest.mark.parametrize("line", PUBLIC, ids=lambda line: line["source"].rpartition("/")[2])
def test_a_public_launch_line_is_read_or_refused_by_name(line: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / f"line{line['suffix']}"
    path.write_text(line["text"], encoding="utf-8")
    if "refused" in line:
        with pytest.raises(UsageError) as refused:
            checked(read_line([str(path)]))
        assert refused.value.message.replace(str(path), "FILE").startswith(line["refused"])
        return
    read = checked(read_line([str(path)]))
    assert read.model == line["model"]
    assert " ".join(on_the_list(read.flags)[0]) == line["flags"]
    assert read.unknown == line.get("unknown", [])


def test_sixty_lines_are_kept_twenty_of_which_were_held_back() -> None:
    assert len(PUBLIC) >= 60
    assert sum(line.get("held", False) for line in PUBLIC) >= 20
    assert len({line["source"].partition(":")[0] for line in PUBLIC}) >= 7


@pytest.mark.parametrize(
    "text",
    [
        SERVE,
        f"CUDA_VISIBLE_DEVICES=0 nohup {SERVE} > server.log 2>&1 &",
        "vllm serve \\\n  Qwen/Qwen3.8-27B \\\n  --max-model-len 32768  # as long as it fits",
        "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3.8-27B --max_model_len=32768",
        "docker run --name vllm -e A=B --gpus all -p 1:1 vllm/vllm-openai:v0.28.0 --model Qwen/Qwen3.8-27B "
        "--max-model-len 32768",
        "docker run -it --entrypoint 'vllm serve' vllm/vllm-openai Qwen/Qwen3.8-27B --max-model-len 32768",
        "MODEL=Qwen/Qwen3.8-27B\nLEN=${LEN:-32768}\nvllm serve $MODEL --max-model-len ${LEN}",
        'ARGS=(--max-model-len 32768)\nif [ -n "$X" ]; then\n  ARGS=()\nfi\nvllm serve Qwen/Qwen3.8-27B "${ARGS[@]}"',
        "vllm serve Qwen/Qwen3.8-27B > log 2>&1 --max-model-len 32768 &> other",
        'A=Qwen/Qwen3.8-27B\nA+=" --max-model-len 32768"\nvllm serve $A',
        'declare -a A=(--max-model-len 32768)\nexport M=Qwen/Qwen3.8-27B\nvllm serve "$M" "${A[@]}"',
        "bash -lc 'exec vllm serve Qwen/Qwen3.8-27B --max-model-len 32768'",
    ],
)
def test_each_form_of_a_text_is_the_same_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    for line in (read_line([text]), read_line([str(path)])):
        assert (line.model, line.flags) == ("Qwen/Qwen3.8-27B", ["--max-model-len", "32768"])


def test_the_words_of_a_shell_are_the_same_line() -> None:
    assert read_line(SERVE.split()).flags == ["--max-model-len", "32768"]
    assert read_line(["vllm", "serve", "--enforce-eager", "M/N"]).model == "M/N"
    assert read_line(["vllm", "serve", "-tp", "2", "--tensor-parallel-size", "4", "M/N"]).flags[-1] == "4"
    given = flag_texts(
        read_line(["vllm", "serve", "M/N", "-O3", "-tp=2", "-cc.mode=3", "--max-model-len", "-1"]).flags
    )
    assert given.pop("compilation-config") == '{"mode":3}'
    assert given == {"optimization-level": "3", "tensor-parallel-size": "2", "max-model-len": "-1"}


def test_flags_are_named_as_vllms_parser_names_them() -> None:
    words = [
        "vllm",
        "serve",
        "M/N",
        "--speculative-config.method",
        "mtp",
        "--speculative_config.num_speculative_tokens=3",
    ]
    given = flag_texts(read_line(words).flags)
    assert json.loads(given["speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 3}
    short = flag_texts(
        read_line(["vllm", "serve", "M/N", "--spec-method", "mtp", "--spec-tokens", "2"]).flags
    )
    assert json.loads(short["speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 2}
    assert line_of_flags({"model": "M/N", "enable_prefix_caching": False}, "log").flags == [
        "--no-enable-prefix-caching"
    ]


@pytest.mark.parametrize(
    "words", [["--a", "x"], ["--a", "3"], ["--a", "[1]"], ["--a.b.c", "2"], ["--a" + ".b" * 8000, "1"]]
)
def test_a_field_of_what_is_no_object_is_read_alone(words: list[str]) -> None:
    line = read_line(["vllm", "serve", "M/N", *words, "--a.b", "1"])
    assert line.flags == ["--a", '{"b":1}']
    assert line.unknown == ([f"--a {words[1]}"] if "." in words[0] else [])


def test_what_only_the_shell_knows_is_named_and_left_out() -> None:
    line = read_line(["vllm", "serve", "M/N", "--max-model-len", "$LEN", "--max-num-seqs", "4"])
    assert line.flags == ["--max-num-seqs", "4"] and line.unknown == ["--max-model-len $LEN"]
    said = of_line(line, "qwen3-8b", None).findings
    assert any(each.level == "warning" and "--max-model-len $LEN" in each.text for each in said)
    odd = of_line(read_line([f"{SERVE} --kv-cache-dtype fp3 --hf-overrides {{}}"]), None, H100).findings
    assert any("--kv-cache-dtype, --hf-overrides: what it does" in each.text for each in odd)
    with pytest.raises(UsageError, match="its model is \\$MODEL, which it does not say"):
        checked(read_line(["vllm", "serve", "$MODEL"]))


def test_a_file_of_several_servers_is_asked_by_its_services_name(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    services = "\n".join(
        f"  {name}:\n    image: vllm/vllm-openai:v0.28.0\n    command: --model {model}"
        for name, model in (("small", "A/B-8B"), ("large", "C/D-70B"))
    )
    path.write_text(f"services:\n{services}\n", encoding="utf-8")
    with pytest.raises(
        UsageError, match="holds 2 launch lines: service small of A/B-8B, service large of C/D-70B"
    ):
        read_line([str(path)])
    line = read_line([f"{path}#large"])
    assert (line.model, line.version) == ("C/D-70B", "0.28.0")


def test_a_name_on_the_hub_is_a_layout_that_is_said_to_be_assumed() -> None:
    layout = assumed("Qwen/Qwen3.8-27B-FP8")
    assert layout is not None and (layout.layout, layout.weights) == ("qwen3.5-27b", False)
    assert "assumed for Qwen/Qwen3.8-27B-FP8: its config.json was not read" in layout.said
    names = {
        "zai-org/GLM-5.3-Flash": "glm-5.3-flash",
        "Qwen/Qwen3.8-Flash-Next": "qwen3.8-flash-next",
        "meituan-longcat/LongCat-Flash-Chat": "longcat-flash",
        "Zyphra/Zamba2-2.7B-instruct": "zamba2-2.7b",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "llama-3.1-70b",
        "/root/.cache/huggingface/qwen3.6-27b-autoround-int4": "qwen3.5-27b",
    }
    assert {name: getattr(assumed(name), "layout", None) for name in names} == names
    for other in (
        "zai-org/GLM-4.7-Flash",
        "Qwen/Qwen3-Embedding-8B",
        "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
    ):
        assert assumed(other) is None


def test_what_is_asked_in_a_lines_place_is_what_decides_the_cache() -> None:
    text = "vllm serve nvidia/Qwen3.6-35B-A3B-NVFP4 --quantization modelopt --max-model-len 400000 --port 1"
    about = of_line(read_line([text]), None, H100)
    given = flag_texts(about.flags)
    assert about.model == "qwen3.6-35b-a3b" and "quantized" in about.pool.unknown
    assert given["kv-cache-dtype"] == "fp8" and given["max-model-len"] == "400000"
    assert json.loads(given["hf-overrides"]) == {"text_config": {"max_position_embeddings": 400000}}
    assert not given.keys() & {"quantization", "port"}


def test_a_layout_is_asked_of_one_engine_whose_weights_are_not_known() -> None:
    flags = "--enable-expert-parallel --data-parallel-size 16 --distributed-executor-backend ray"
    about = of_line(read_line([f"vllm serve moonshotai/Kimi-K2-Instruct {flags}"]), None, H100)
    assert about.model == "kimi-k2" and about.flags == []
    assert about.pool.unknown.startswith("--data-parallel-size, --enable-expert-parallel: ")
    assert (
        "kimi-k2 stands for M/N" in of_line(read_line(["vllm", "serve", "M/N"]), "kimi-k2", H100).pool.unknown
    )


def test_a_flag_that_vllms_server_has_not_is_named() -> None:
    said = of_line(read_line([*SERVE.split(), "--swap-spce", "4", "--max-num-seq", "3"]), None, H100).findings
    flags = {each.text.partition(":")[0]: each.hint for each in said if each.topic == "flag"}
    assert flags.keys() == {"--swap-spce", "--max-num-seq"}
    assert flags["--max-num-seq"].startswith("did you mean max-num-seqs?")


@pytest.mark.vllm
def test_how_many_values_a_flag_takes_is_what_vllms_parser_says() -> None:
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvtune.answers.doctor.line import serve_flags

    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    takes, matter = dict(serve_flags()[0]), serve_flags()[1]
    kinds = {None: "one", "?": "maybe", "+": "many", "*": "many", 0: "switch"}
    for action in parser._actions:
        for name in (option[2:] for option in action.option_strings if option.startswith("--")):
            assert takes.pop(name) == kinds[action.nargs], name
    assert not takes
    assert matter <= serve_flags()[0].keys()


@pytest.mark.parametrize("text", ["a: " * 200 + "b", "[" * 200 + "]" * 200, "x" * (1 << 19)])
def test_a_hostile_yaml_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode_yaml(text)


def test_aliases_that_multiply_are_refused_before_they_are_built() -> None:
    levels = "\n".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    with pytest.raises(BeyondError, match="more than 100,000 values"):
        decode_yaml(f"k0: &a0 [x]\n{levels}")
    assert decode_yaml("a: &x {b: 1}\nc:\n  <<: *x\n")[0]["c"] == {"b": 1}
    for text in ("- &a [*a]", "services: {x: &x {image: vllm, command: *x}}"):
        with pytest.raises(BeyondError, match="holds itself"):
            decode_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "A=${A}${A}\n" * 200 + "vllm serve m $A",
        "A=aa\n" + "A=$A$A\n" * 60 + "vllm serve m $A",
        "${A:-" * 5000 + "}" * 5000 + " vllm serve m",
        "A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + 'vllm serve m "${A[@]}"',
        "A=xx\n" + 'A+="$A"\n' * 60 + "vllm serve m $A",
        f"A=({'a ' * 5000})\nvllm serve m {'${A[@]} ' * 5000}",
    ],
)
def test_a_script_whose_variables_multiply_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="more than"):
        read_line([text])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm",
        "docker run -e",
        "bash -c",
        "ARGS=(\nvllm",
        "((((",
        "a" * 100_000,
        "$" * 50_000,
        "vllm " + "${A:-" * 2_000,
    ],
)
def test_what_is_no_launch_line_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"there is no launch line of vLLM in it|cannot be read"):
        read_line([text])


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    list(commands(f"$(touch {mark})\ntouch {mark}; vllm serve `touch {mark}`"))
    assert not mark.exists()
    assert ["echo", "a;b", "c d"] in list(commands("echo 'a;b' \"c d\" # and more"))
    assert parse_flags(read_line(["vllm serve M/N --max-num-seqs 2 2>&1 | tee log"]).flags)[0].values == (
        "2",
    )
