"""Text as token ids: three public families' templates, each API's body, and what is refused by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.requests.loads.spec import build, traced
from kvtune.requests.log.logged import Logged, encoded, line_of
from kvtune.requests.log.rendering import renderer
from kvtune.requests.log.requests_log import read_log
from kvtune.requests.log.templates import Templates
from kvtune.servers.tap.log import BY
from tests.tokenizers import OneChild, make_tokenizer

pytest.importorskip("transformers")

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "str"}, "extra": 1}}
TOOL = '{"type": "function", "function": {"name": "weather", "description": null, "parameters": {"city": "str"}}}'
ASKED = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "Be brief."}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    ],
}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]}
Rendered = Callable[..., str]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory, child: OneChild) -> Rendered:
    """The text of a body's token ids, by a family's template."""
    folders: dict[str, Path] = {}

    def text(family: str, **body: Any) -> str:
        if family not in folders and family != "bytes":
            folders[family] = make_tokenizer(
                tmp_path_factory.mktemp("tokenizers") / (family or "none"), family
            )
        by = renderer("bytes") if family == "bytes" else child.load(folders[family])
        return by.text(by.ids(body))

    return text


def test_flags_reach_the_template(rendered: Rendered) -> None:
    thinking = rendered("chatml", messages=[ASKED])
    empty = thinking + "<think>\n\n</think>\n\n"
    assert rendered("chatml", messages=[ASKED], chat_template_kwargs={"enable_thinking": False}) == empty
    assert rendered("chatml", messages=[ASKED], reasoning_effort="none") == empty
    assert "Reasoning: high" in rendered("harmony", messages=[ASKED], reasoning_effort="high")
    assert "Reasoning: high" in rendered("harmony", input="Hi", reasoning={"effort": "high"})
    dated = rendered("llama3", messages=[ASKED], chat_template_kwargs={"date_string": "26 Nov 2026"})
    assert "Today Date: 26 Nov 2026" in dated
    with pytest.raises(UsageError, match="chat_template_kwargs"):
        rendered("chatml", messages=[ASKED], chat_template_kwargs={"tokenize": True})


def test_gemma_begins_the_first_question_with_the_system_prompt(rendered: Rendered) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}
    assert rendered("gemma", messages=[BRIEF, parts]) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHiyou<end_of_turn>\n<start_of_turn>model\n"
    )
    assert "Hi\nyou" in rendered("chatml", messages=[parts])  # its template takes no parts: vLLM joins them
    with pytest.raises(UsageError, match=r"is refused by the chat template of .*: Conversation roles must"):
        rendered("gemma", messages=[ASKED, ASKED])


def test_a_prompt_gets_the_tokens_that_completions_add(rendered: Rendered) -> None:
    assert rendered("llama3", prompt="Hi") == "<|begin_of_text|>Hi"
    assert rendered("llama3", prompt=["Hi"], add_special_tokens=False) == "Hi"
    assert rendered("", prompt="Hi 東京") == "Hi 東京"


@pytest.mark.parametrize("more", ["", ', "architectures": null'])
def test_models_that_vllm_renders_by_code_are_refused(more: str, tmp_path: Path, child: OneChild) -> None:
    folder = make_tokenizer(tmp_path / "oss", "harmony")
    (folder / "config.json").write_text('{"model_type": "gpt_oss"' + more + "}")
    by = child.load(folder)  # as where vLLM is not installed
    assert by.text(by.ids({"prompt": "Hi"})) == "Hi"
    with pytest.raises(UsageError, match=r"renders chats of .* by built-in code"):
        by.ids({"messages": [ASKED]})


@pytest.mark.full
def test_no_template_no_tokenizer_no_transformers(
    rendered: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"is a chat, and .* has no chat template"):
        rendered("", messages=[ASKED])
    with pytest.raises(UsageError, match="tiny-llama has no tokenizer on this machine") as refused:
        renderer("tiny-llama")
    assert "tokenizer=FOLDER" in refused.value.hint and "tokenizer=bytes" in refused.value.hint
    with pytest.raises(UsageError, match="has no tokenizer: "):
        renderer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="transformers, which renders text, is not installed") as refused:
        Templates("elsewhere")
    assert "tokenizer=bytes" in refused.value.hint


def test_bytes_need_no_tokenizer(rendered: Rendered) -> None:
    said = rendered("bytes", messages=[BRIEF, ASKED, CALLED, ANSWERED], tools=[WEATHER])
    assert said == (
        f"tools\n{TOOL}\nsystem\nBe brief.\nuser\nHi\nassistant\n"
        '{"name": "weather", "arguments": {"city": "Bonn"}}\ntool\nsun\n'
    )
    by = renderer("bytes")
    assert list(by.ids({"prompt": "é"})) == [0xC3, 0xA9]
    assert rendered("bytes", input="Hi", instructions="Be brief.") == "system\nBe brief.\nuser\nHi\n"


def logged(file: Path, *lines: Mapping[str, Any] | str) -> list[Logged]:
    file.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return list(read_log(file, renderer("bytes").render))


def test_a_log_of_text_names_file_and_line_where_it_cannot_be_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    picture = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    rows = logged(
        log,
        {"messages": [ASKED], "max_completion_tokens": 5},
        {"body": {"input": "Hi", "max_output_tokens": 6}, "custom_id": "a"},
        {"prompt": "Hi"},
    )
    assert [(row.name, len(row.prompt), row.output_tokens) for row in rows] == [
        ("line-1", 8, 5),
        ("a", 8, 6),
        ("line-3", 2, 0),
    ]
    for bad, why in {
        '{"prompt": "H': "is not JSON; a torn last line",
        '{"prompt": ["a", "b"]}': "has several prompts",
        '{"model": "m"}': "has neither token ids nor",
        json.dumps(picture): "has image_url in a user message",
        json.dumps({"messages": ["Hi"]}): "has a message without a role",
        json.dumps({"input": [3]}): "has an input item that is no object",
    }.items():
        with pytest.raises(UsageError, match=rf"log\.jsonl, line 2 {why}"):
            logged(log, {"prompt": "Hi"}, bad)
    own = line_of(Logged("x", [1, 2], t0=1.0, t1=2.0), by=BY)
    whole = encoded(own).decode()
    for bad in (
        whole[:40] + "\n",
        whole.replace("1, 2", "-1, 2"),
        whole.replace("1, 2", ""),
        whole.replace('"t0": 1.0', '"t0": -1.0'),
    ):
        log.write_text(f"{whole}{bad}{bad}{whole}")
        capsys.readouterr()
        assert [read.line for read in read_log(log)] == [1, 4]
        said = capsys.readouterr().err
        assert said.startswith(f"kvtune: {log}, line 2 ") and said.endswith(" (and 1 more): left out\n")
        log.write_text(bad)
        with pytest.raises(UsageError, match="line 1 "):
            list(read_log(log))
    log.write_text('{"messages": []}')
    with pytest.raises(UsageError, match="line 1 has text, and no token ids"):
        list(read_log(log))


def test_an_answers_text_is_its_tokens_where_the_server_counted_as_many(tmp_path: Path) -> None:
    def answer(tokens: int, **response: Any) -> list[int]:
        usage = {"completion_tokens": tokens, "output_tokens": tokens}
        row = {"messages": [ASKED], "max_tokens": 9, "response": {"usage": usage, **response}}
        (read,) = logged(tmp_path / "log.jsonl", row)
        assert read.output_tokens == tokens
        return list(read.answer)

    said: dict[str, Any] = {"role": "assistant", "content": "Yo"}
    assert answer(2, choices=[{"message": said}]) == [*b"Yo"]
    assert answer(3, choices=[{"message": said}]) == [*b"Yoo"]  # the end, which no cache holds
    assert answer(2, choices=[{"text": "Yo"}]) == [*b"Yo"]
    assert answer(2, output=[{"type": "message", "content": [{"type": "output_text", "text": "Yo"}]}]) == [
        *b"Yo"
    ]
    assert answer(9, choices=[{"message": said}]) == []
    assert answer(2, choices=[{"message": {**said, "reasoning": "hm"}}]) == []
    assert answer(2, output=[{"type": "reasoning"}, {"type": "message"}]) == []


@pytest.mark.full
def test_the_models_tokenizer_renders_unless_the_spec_names_one(tmp_path: Path) -> None:
    log, folder = tmp_path / "log,1.jsonl", make_tokenizer(tmp_path / "a,b", "chatml")
    log.write_text("".join(json.dumps({"messages": [BRIEF, {**ASKED, "content": c}]}) + "\n" for c in "xyz"))
    with pytest.raises(UsageError, match="line 1 has text, and no token ids"):
        build(f"requests:path={log}")
    work = build(f"requests:path={log}", tokenizer=str(folder))
    assert work.spec == f"requests:path={log},tokenizer={folder}"
    assert work.hash == build(work.spec, tokenizer="elsewhere").hash
    assert len(work.requests) == 3 and work.requests[1].prompt[0] == work.requests[0].prompt[0]._replace(
        length=work.requests[1].prompt[0].length
    )
    assert build(f"requests:path={log},tokenizer=bytes", tokenizer=str(folder)).hash != work.hash
    assert build("rounds:prefixes=2", tokenizer=str(folder)).spec == "rounds:prefixes=2"
    with pytest.raises(UsageError, match="line 1 has text, and tiny-llama has no tokenizer on this machine"):
        build(f"requests:path={log}", tokenizer="tiny-llama")


def test_requests_of_different_salts_share_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"prompt": "Hi", "cache_salt": salt} for salt in ("a", "b", "a")]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other, again = (request.prompt for request in build(f"requests:path={log},tokenizer=bytes").requests)
    assert one == again != other


def test_a_tokenizer_that_a_file_names_is_not_opened() -> None:
    log, spec = Path("mine.jsonl"), "requests:path=theirs.jsonl,tokenizer=/theirs,limit=5"
    assert traced(spec, log) == "requests:path=mine.jsonl,limit=5"
    assert traced(spec, log, "/mine") == "requests:path=mine.jsonl,limit=5,tokenizer=/mine"
    bytes_only = "requests:path=theirs.jsonl,tokenizer=bytes"
    assert traced(bytes_only, log, "/mine") == "requests:path=mine.jsonl,tokenizer=bytes"
    named = Path("mine.jsonl,tokenizer=/mine")
    assert traced(bytes_only, named) == "requests:path=mine.jsonl,tokenizer=/mine"
