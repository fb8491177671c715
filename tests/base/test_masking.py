"""One table of what is hidden in texts and what stays; command lines, `--json`, pages and run files by value."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

import kvtune
from kvtune.base.errors import UsageError
from kvtune.base.masking import (
    VLLM_HIDES,
    Secrets,
    holding,
    masked_text,
    masked_value,
    without_password,
    without_secrets,
)
from kvtune.cli.app import COMMANDS
from kvtune.cli.schema import schemas
from kvtune.data.run.file import read_run, write_run
from kvtune.data.show.terminal import printable
from kvtune.servers.watch.client import base_of, headers_of
from tests.golden.synthetic import replace_header, rounds_run
from tests.servers.watch.played import http
from tests.servers.watch.test_server import Playing
from tests.simulator import run

HERE = Path(__file__).parents[1]
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.SECRETabc"
BEGINS = (
    "Incorrect API key provided: sk-SECRET-abcdef1234567890",
    "hf_abcdefghijklmnopqrstuvwxyzSECRET",
    "a ghp_SECRETefghijklmnopqrstuvwxyz0123456789 b",
    "github_pat_11SECRET0_abcdefghijkl",
    "AKIASECRETNN7EXAMPLE",
    f"token {JWT}",
    "-----BEGIN RSA PRIVATE KEY-----\nSECRET\nSECRET==\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\\nSECRET\\nSECRET, and no end",
    'Bearer "SECRET SECRET"',
    "Bearer\tSECRET",
    "bearer SECRET",
    "Basic U0VDUkVU0SECRET",
)
"""Keys that begin as known ones do."""
NAMED = (
    "vllm serve m --api-key SECRET",
    "--api-key=SECRET",
    "HF_TOKEN SECRET",
    'export HF_TOKEN="SECRET"',
    "OPENAI_API_KEY=SECRET",
    "Authorization: Token SECRET",
    "Proxy-Authorization: Basic SECRET",
    "{'headers': {'Authorization': 'Bearer SECRET'}}",
    "Set-Cookie: a=SECRET; c=SECRET",
    "X-Api-Key: SECRET",
    "password is SECRET",
    "the API key was SECRET, and",
    "passwd:SECRET",
    "PGPASSWORD=SECRET",
    "aws_secret_access_key = SECRET",
    "accountKey=SECRET==;EndpointSuffix",
    "sig=SECRET%3D",
    "X-Amz-Signature=SECRET",
    "api_key: SECRET SECRET",
    'api_key = "a\\"SECRET SECRET"',
    'key = "a\\"b SECRET"',
    '{"apiKey": "SECRET SECRET"}',
    "{'api_key': 'SECRET'}",
    '{\\"api_key\\": \\"SECRET SECRET\\"}',
    '{"prompt": [1, 2], "api_key": "SECRET cut off',
    '{"auth": {"token": ["SECRET","SECRET"]}}',
    "token=SECRET1234567",
    "api_key: SECRET), and what follows",
    "password is p@SECRET",
    "--some-token SECRET",
    '--secret key="SECRET SECRET"',
    '{"api_key": {"user": "SECRET"}, "n": 1}',
    '{"token": [["SECRET"], {"a": "SECRET"}]}',
    "x?mykey=SECRET",
)
"""What stands after a name."""
ADDRESSES = (
    "https://h/x?X-Amz-Signature=SECRET&a=b",
    "https://user:SE/CRET@h/x".replace("SE/CRET", "a/SECRET"),
    "postgresql://u:SECRET@h/d",
    "redis://:SECRET@h",
    "see user:SECRET@host, and",
    "h/metrics?token=SECRET",
    "http://h/#access_token=SECRET",
)
"""What stands before a host, and after `?`."""
STAYS = (
    *("first_token: 0.21", "last_token: 3", "ms per token: 3.2", "time_to_first_token=0.5", "cache key: 12"),
    *("token=0.1,step=2", "--cost: token=nan is not a time in ms", "--cost token=0.1,step=2", "-o runs/key=5.html"),
    *("requests:path=a@b.jsonl,tokenizer=auto: no such file", "path=log#1.jsonl", "sort key: prompt_tokens"),
    *("Basic English text", "bearer of news", "a bearer token", "cookie cutter", "its last token is computed"),
    *("max_tokens=5", "eos_token: </s>", "pad_token=<pad>", "tokens per key: 4", "monkey: 3", "KV token: 5"),
    *("hf_overrides", "org/name@rev", "10:30@host", "git@github.com:a/b", "/data/a@b/c#d?e", "task-based-thing"),
    *("set HF_TOKEN to a token that may read it", "--header 'Authorization: Bearer KEY'", "KVTUNE_API_KEY=KEY"),
    *("the password is wrong", "http://127.0.0.1:8000/v1", "postgresql://u@host:5432/study", "1,084.5 tokens"),
)  # fmt: skip


@pytest.mark.parametrize("text", (*BEGINS, *NAMED, *ADDRESSES))
def test_the_shape_of_a_key_is_hidden(text: str) -> None:
    shown = masked_text(text)
    assert "SECRET" not in shown and "***" in shown
    assert masked_text(shown) == shown, "hidden once is hidden"
    assert "SECRET" not in masked_text(f"the server says: {text}"), "also within a text"
    assert "SECRET" not in masked_text(f"password: OLD-SECRET\n{text}\n\npassword: NEW-SECRET"), (
        "and beside others"
    )


TEXTS = [text for text in (*BEGINS, *NAMED, *ADDRESSES) if "no end" not in text]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("api_key", "token", "password", "Cookie", "n")), inner, max_size=3)
    ),
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_what_is_hidden_in_a_text_of_json_leaves_it_json(value: Any) -> None:
    json.loads(masked_text(json.dumps(value)))


def test_figures_in_a_text_of_json_stay() -> None:
    text = json.dumps({"password": 5, "token": [1, None], "api_key": True, "max_tokens": 8, "Cookie": -1.5})
    assert masked_text(text) == text


@pytest.mark.parametrize(
    "part", ["key=", 'token=["', "api_key: [{", "a+", "a:b@", "http://", "eyJaaaaaaaa.", "\\", "bearer "]
)
def test_the_work_grows_no_faster_than_the_text(part: str) -> None:
    def spent(characters: int) -> float:
        text, best = part * (characters // len(part)), 60.0
        for _ in range(3):
            start = time.process_time()
            masked_text(text), without_secrets([text])
            best = min(best, time.process_time() - start)
        return best

    assert spent(80_000) < 10 * 3 * spent(8_000) + 0.05


@pytest.mark.parametrize("text", STAYS)
def test_kvtunes_words_and_what_only_looks_alike_stay(text: str) -> None:
    assert masked_text(text) == text


@pytest.mark.lint
def test_no_text_of_kvtunes_own_is_hidden() -> None:
    """Each text of the code, with a figure where a value comes."""
    package = Path(kvtune.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.name != "masking.py" else ():
            text = node.value if isinstance(node, ast.Constant) else ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "0.1" for v in node.values)
            if isinstance(text, str) and text != "Bearer 0.1":
                assert masked_text(text) == text, f"{path}:{node.lineno}"  # type: ignore[attr-defined]


COMMAND_LINES = (
    "--study postgresql://u:SECRET@h/d",
    "--study=postgresql://u:SECRET@h/d",
    "--api-key SECRET --SECRET",
    "--api-ke=SECRET",
    "--hf_token=SECRET",
    "--ssl-keyfile-password SECRET",
    "--kv-transfer-config.extra.password SECRET",
    '--kv-transfer-config {"a":{"remote_url":"redis://:SECRET@h"}}',
    '--hf-overrides={"hfToken":"SECRET","n":[{"api_key":{"x":["SECRET"]}}]}',
    "--header X-Tenant:SECRET",
    "me:SECRET@h:8000",
    "h:8000/metrics?a=b&key=SECRET",
    "h?token=SEC@SECRET",
    "h?token=SECRET://SECRET",
    "me:SECRET://SECRET@h",
    "--env OPENAI_API_KEY=SECRET",
)


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_line_is_kept_without_its_secrets(line: str) -> None:
    words = ["kvtune", "tune", "m", *line.split(), "--seed", "1"]
    shown = without_secrets(words)
    assert "SECRET" not in " ".join(shown) and len(shown) == len(words) and shown[-2:] == ["--seed", "1"]
    assert without_secrets(shown) == shown


def test_words_without_secrets_stay_as_they_are() -> None:
    line = """kvtune record http://h:8000 h:8000/v1 -w trace:path=/a@b/c,speed=2 ./a@b ~/x@y --set core.slack=3 -w
        requests:path=a@b.jsonl,tokenizer=auto -w requests:path=log#1.jsonl --cost token=0.1,step=2 -o runs/key=5.html
        --max-num-batched-tokens 2048 --watermark 0.5 --tokenizer x/y --skip-tokenizer-init --hf-overrides
        {"num_key_value_heads":2,"eos_token_id":1,"eos_token":"</s>","password":1} --model org/name@rev"""
    words = line.split()
    assert without_secrets(words) == words


@pytest.mark.parametrize(
    "password", ["s3cret", "s3/cret", "s3@cret", "@s3cret", "s3%2Fcret", "s3?cret", "s3:cret"]
)
@pytest.mark.parametrize(
    "url", ["postgresql://u:{}@host/d", "mysql+x://u:{}@[::1]:3306/d", "redis://:{}@host", "u:{}@h"]
)
def test_no_part_of_a_password_is_shown(url: str, password: str) -> None:
    shown = without_password(url.format(password))
    assert "s3" not in shown and "cret" not in shown and "***" in shown
    assert without_password(shown) == shown


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "  "])
def test_what_a_call_was_given_is_hidden_as_whole_words_and_gone_with_it(end: str) -> None:
    words = [
        "--header",
        "X-Custom: header-value",
        "--header",
        "User-Agent: our monitoring",
        "http://u:urlpassword@h?a=urlquery",
    ]
    secrets = Secrets.given(
        words, {"KVTUNE_API_KEY": f"variable{end}", "HF_TOKEN": "short", "OTHER": "otherwise"}
    )
    rest = "our monitoring short otherwise variables x-variable 1.variable"
    text = f"variable, b'header-value\\n' 'urlpassword' urlquery. {rest}"
    with holding(secrets):
        assert masked_text(text) == f"***, b'***\\n' '***' ***. {rest}"
        assert masked_value({"variable": ["variable", 12345678, True, None]}) == {
            "variable": ["***", 12345678, True, None]
        }
    assert printable(text) == text


def test_what_others_named_as_a_secret_is_hidden_and_no_figure() -> None:
    settings = {"api_key": "a", "token": ["b", 1, None, True], "last_token": "c", "n": {"password": 5}}
    assert masked_value(settings) == settings
    assert masked_value(settings, fields=True) == {
        **settings,
        "api_key": "***",
        "token": ["***", 1, None, True],
    }


@pytest.mark.parametrize(
    "url", ["http://me:{}@h:bad", "ftp://me:{}@h", "//me:{}@h", "me:{}@h:99999999", "me:{}@"]
)
@pytest.mark.parametrize(
    "secret", ["SECRETPW", "--SECRETPW", "SECRETPW=", "SECRET,PW:SECRETPW", "SECRET@SECRETPW", "SECRET/PW"]
)
def test_an_address_that_is_none_is_quoted_without_its_secret(url: str, secret: str) -> None:
    with pytest.raises(UsageError) as caught:
        base_of(url.format(secret))
    assert "SECRET" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    "text", ["Authorization=Bearer SECRET", "SECRET", "A b: SECRET", "X: SECRET\0", "X: SECRETé", ": SECRET"]
)
def test_a_header_that_is_none_is_not_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        headers_of(["A: b", text])
    assert "SECRET" not in f"{caught.value.message} {caught.value.hint}"


def test_a_key_that_no_header_can_hold_is_one_line_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("SECRETPWé", "SECRET\nPW", "SECRETPW\x01"):
        monkeypatch.setenv("KVTUNE_API_KEY", key)
        assert run(["watch", "http://127.0.0.1:9", "--once"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(
            "kvtune: KVTUNE_API_KEY has a character that no HTTP header can hold, at place "
        )
        assert "SECRET" not in said and len(said.splitlines()) == 2


def test_a_run_file_and_its_page_hold_no_secret_whoever_made_the_run(tmp_path: Path) -> None:
    made = rounds_run()
    engine = structs.replace(
        made.header.engine,
        args=["--kv-transfer-config", '{"token":"SECRETPW"}'],
        settings={"kv_transfer_config": {"token": "SECRETPW", "n": 1}},
    )
    log = [
        "non-default args: {'aws_secret_access_key': 'SECRETPW', 'u': 'redis://:SECRETPW@h'}",
        *("-----BEGIN PRIVATE KEY-----", "SECRETPW", "-----END PRIVATE KEY-----", "the end"),
    ]
    made = replace_header(
        made,
        command=["kvtune", *(word for line in COMMAND_LINES for word in line.split())],
        engine=engine,
        log_tail=log,
        notes=["http://SECRETPW@h answers 500"],
    )
    path, page = tmp_path / "a.kvrun", tmp_path / "a.html"
    write_run(made, path)
    assert run(["report", str(path), "-o", str(page)]) == 0
    header = zipfile.ZipFile(path).read("header.json").decode()
    assert "SECRET" not in header and "SECRET" not in page.read_text()
    assert read_run(path).header.log_tail[-1] == "the end"


LOG = '{"prompt": "the system prompt, then token one"}\n{"prompt": "the system prompt, then token two"}\n'
QUICK = {
    "runs": [["runs", "{golden}"]],
    "compare": [["compare", "{golden}/schema1-rounds.kvrun", "{golden}/schema1-kvtune.kvrun"]],
    "bounds": [
        ["bounds", "-w", "decode:requests=2,prompt=48"],
        ["bounds", "-w", "requests:path={log},tokenizer=bytes"],
    ],
    "explain-log": [["explain-log", "{log}", "--text-only"]],
    "recipe": [["recipe", "list"], ["recipe", "show", "tiny-llama-cpu"]],
    "watch": [["watch", "{url}", "--once", "--seconds", "0.1", "--header", "X-Api-Key: {key}"]],
}
SLOW = {"tap", "check", "profile", "sweep", "tune", "capacity", "explain", "doctor", "diff"}
"""These start an engine or a simulator, load vLLM, ask a server, or wait for requests (tap: tests/servers/tap)."""
SHORT_KEYS = ("1", "true", "null", "1084", "kvtune", "token")


def test_every_command_with_json_is_tried_or_named() -> None:
    with_json = {name.split()[0] for name in schemas()}
    assert with_json <= set(COMMANDS) and with_json == set(QUICK) | SLOW


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    playing = Playing()
    (tmp_path / "log.jsonl").write_text(LOG)
    with contextlib.closing(playing.publisher), http(playing.answers) as base:
        yield {"golden": str(HERE / "golden"), "log": str(tmp_path / "log.jsonl"), "url": base}


@pytest.mark.parametrize("command", QUICK)
def test_json_is_the_same_whatever_short_key_is_given(
    command: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(words: list[str], key: str) -> Any:
        code = run([*(word.format(**places, key=key) for word in words), "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        value = json.loads(out)
        for name in ("at", "periods"):  # times
            value.pop(name, None)
        value.get("regime", {}).pop("seconds", None)
        return value

    for words in QUICK[command]:
        monkeypatch.delenv("KVTUNE_API_KEY", raising=False)
        plain = printed(words, "")
        for key in SHORT_KEYS:
            monkeypatch.setenv("KVTUNE_API_KEY", key)
            assert printed(words, key) == plain, key


def test_a_page_drawn_under_a_key_is_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, page = HERE / "golden" / "schema1-rounds.kvrun", tmp_path / "a.html"
    drawn = set()
    for key in ("", "null", "1795"):
        monkeypatch.setenv("KVTUNE_API_KEY", key)
        assert run(["report", str(path), "-o", str(page), "--force"]) == 0
        drawn.add(page.read_text())
    (text,) = drawn
    charts = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.S)
    assert charts and all(json.loads(chart) for chart in charts)


KEYS = st.text("abcXYZ0189-_/+.=,:@?&#%", min_size=1, max_size=20).map(lambda text: f"SECRET{text}SECRET")
FORMS = st.sampled_from(
    (
        "api_key={!r}", "--api-key {!r}", "Authorization: Bearer {}", 'Bearer "{}"',
        '{{"token": "{}"}}', "HF_TOKEN='{}'",
        '{{\\"password\\": \\"{}\\"}}', "http://me:{}@host", "http://{}@host:80/v1", "http://host/v1?token={}",
        "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    )
)  # fmt: skip
WORDS = st.sampled_from(
    (
        ["me:{}@host"], ["//me:{}@host"], ["host/metrics?token={}"], ["x=me:{}@host/v1?a=b"], ["--header", "X: {}"],
        ["--header={}"], ["--api-key", "{}"], ["--hf_token={}"], ["--some-token", "{}"], ["http://u:{}@h/?b={}"],
        ["--hf-overrides", '{{"key": ["{}", {{"x": "{}"}}]}}'], ['--kv-transfer-config={{"u": [{{"w": "http://u:{}@h"}}]}}'],
    )
)  # fmt: skip


@pytest.mark.full
@settings(max_examples=3_000, deadline=None)
@given(FORMS, KEYS, st.sampled_from(("", "the server says: ", '{"error": ', "a=1, ")))
def test_no_drawn_form_of_a_key_stays_in_a_text(form: str, key: str, before: str) -> None:
    shown = masked_text(before + form.format(key))
    assert "SECRET" not in shown and masked_text(shown) == shown


@pytest.mark.full
@settings(max_examples=3_000, deadline=None)
@given(WORDS, KEYS)
def test_no_drawn_form_of_a_key_stays_in_a_command_line(words: list[str], key: str) -> None:
    line = ["kvtune", *(word.format(*[key] * 2) for word in words), "-o", "out.kvrun", "--seed", "1"]
    shown = without_secrets(line)
    assert "SECRET" not in " ".join(shown) and shown[-4:] == ["-o", "out.kvrun", "--seed", "1"]
    assert without_secrets(shown) == shown


@pytest.mark.vllm
def test_what_vllm_hides_is_hidden() -> None:
    """Read from its source: importing the module loads the whole server."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs vLLM")
    source = Path(found.submodule_search_locations[0]) / "entrypoints/serve/utils/api_utils.py"
    fields = re.search(r"_SENSITIVE_ARG_FIELDS = frozenset\(\{(.*?)\}\)", source.read_text())
    assert fields is not None
    assert {name.replace("_", "-") for name in re.findall(r'"(\w+)"', fields[1])} == set(VLLM_HIDES)
