"""Passwords of URLs and keys of servers are neither shown nor kept, wherever in a command line they stand."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import zipfile
from pathlib import Path

import pytest
from msgspec import structs

from kvtune import masking
from kvtune.errors import UsageError
from kvtune.masking import VLLM_HIDES, without_password, without_secrets
from kvtune.run.file import write_run
from kvtune.terminal import printable
from kvtune.watch.client import base_of, headers_of
from tests.golden.synthetic import replace_header, rounds_run
from tests.simulator import run as kvtune


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_given", set())


URLS = [
    "postgresql://u:s3cret@host/study",
    "postgresql://:s3cret@host/study",
    "postgresql://u:s3/cret@host/study",
    "postgresql://u:s3@cret@host/study",
    "postgresql://u:@s3cret@host:5432/study",
    "postgresql://u:s3?cret@host/study",
    "postgresql://u:s3%2Fcret@host/study",
    "postgresql://host/study?password=s3cret",
    "postgresql://u@host/study?user=u&password=s3cret&sslmode=require",
    "postgresql+psycopg://u:s3cret@host/study?options=-cx%3Dcret",
    "mysql://u:s3cret@[::1]:3306/study",
    "redis://u:s3:cret@host:not-a-port",
]


@pytest.mark.parametrize("url", URLS)
def test_no_part_of_a_password_is_shown(url: str) -> None:
    shown = without_password(url)
    assert "s3" not in shown and "cret" not in shown and "***" in shown
    assert shown.startswith(url.partition("://")[0])
    assert "host" in shown or "::1" in shown or shown == "redis://***"


@pytest.mark.parametrize(
    "url", ["postgresql://u@host:5432/study", "postgresql://host/study", "sqlite:///a/study.db"]
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert without_password(url) == url


def test_a_command_line_is_kept_without_its_secrets() -> None:
    given = [
        *("kvtune", "tune", "m", "--study", "postgresql://u:s3cret@h/d", "--study=postgresql://u:s3cret@h/d"),
        *("--", "--api-key", "s3cret", "cret", "--hf_token=s3cret", "--hf-token", "--seed", "1"),
    ]
    assert without_secrets(given) == [
        *("kvtune", "tune", "m", "--study", "postgresql://u:***@h/d", "--study=postgresql://u:***@h/d"),
        *("--", "--api-key", "***", "***", "--hf_token=***", "--hf-token", "--seed", "1"),
    ]
    plain = ["kvtune", "profile", "m", "-w", "trace:path=/a/b", "--", "--block-size", "32"]
    assert without_secrets(plain) == plain


SECRETS = (
    "SECRETPW",
    "--SECRETPW",
    "SECRETPW=",
    "SECRET,PW:SECRETPW",
    "hf_SECRETPW",
    "SECRETPW@SECRETPW",
    "SECRET/PW",
)
WRAPPED = (
    lambda text: text,
    lambda text: f" {text}",
    lambda text: f"x={text}",
    lambda text: json.dumps({"a": {"remote_url": text}}),
    lambda text: json.dumps([{"urls": [text, 1, None]}]),
)
URL_FORMS = (
    "{scheme}://me:{s}@{host}",
    "{scheme}://{s}@{host}",
    "{scheme}://:{s}@{host}",
    "{scheme}://{host}/metrics?token={s}",
    "{scheme}://{host}?{s}",
    "{scheme}://{host}/x#access={s}",
)
BARE_FORMS = (
    "me:{s}@{host}",
    "//me:{s}@{host}",
    "{host}/metrics?token={s}",
    "{host}?a=b&key={s}",
    "me:{s}@{host}/v1?a=b",
)
FIELDS = (
    "token",
    "api_key",
    "aws_secret_access_key",
    "password",
    "hfToken",
    "client-secret",
    "Authorization",
    "key",
)
FLAGS = (
    "--api-key",
    "--api_key",
    "--hf-token",
    "--watermark-config",
    "--ssl-keyfile-password",
    "--some-token",
)


def secret_words(draw: random.Random) -> list[str]:
    """Words of a command line that hold SECRET.. in one of the forms in which people give secrets."""
    s, host = draw.choice(SECRETS), draw.choice(("127.0.0.1:8000", "h", "[::1]:8000", "gpu.example.com"))
    kind = draw.randrange(6)
    if kind == 0:
        scheme = draw.choice(("http", "https", "redis", "tcp", "postgresql", "HTTP", "amqp+ssl"))
        form = draw.choice(URL_FORMS)
        if scheme == "postgresql" and ":{s}" not in form and "={s}" not in form:
            form = URL_FORMS[0]  # a database's user is shown
        return [draw.choice(WRAPPED)(form.format(scheme=scheme, s=s, host=host))]
    if kind == 1:
        return [draw.choice(WRAPPED)(draw.choice(BARE_FORMS).format(s=s, host=host))]
    if kind == 2:
        name = draw.choice(("X-Api-Key", "Authorization", "--X", "X", ""))
        value = draw.choice((f"{name}: {s}", f"{name}={s}", f"{name}: Bearer {s}", s))
        return draw.choice((["--header", value], [f"--header={value}"]))
    if kind == 3:
        field: dict[str, object] = {draw.choice(FIELDS): draw.choice((s, [s], {"x": s}))}
        for _ in range(draw.randrange(3)):
            field = {"extra": field, "n": 1}
        flag = draw.choice(("--kv-transfer-config", "--hf-overrides", "--model-loader-extra-config", "-cc"))
        return draw.choice(([flag, json.dumps(field)], [f"{flag}={json.dumps(field)}"]))
    if kind == 4:
        flag = draw.choice(FLAGS)
        given = s if flag == "--api-key" else s.lstrip("-")
        return draw.choice(([flag, given], [f"{flag}={given}"]))
    return [f"--kv-transfer-config.extra.{draw.choice(FIELDS)}", s.lstrip("-")]


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_form_of_a_secret_stays_in_a_command_line(number: int) -> None:
    draw = random.Random(number)
    for _ in range(number):
        given = ["kvtune", *secret_words(draw), "-o", "out.kvrun", "--seed", "1"]
        shown = without_secrets(given)
        assert "SECRET" not in " ".join(shown), given
        assert shown[-4:] == ["-o", "out.kvrun", "--seed", "1"], given
        assert without_secrets(shown) == shown, "hidden once is hidden"


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_form_of_a_secret_stays_in_an_error(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed wrong is not quoted with its secret, and a key in use is hidden wherever it stands."""
    draw = random.Random(number)
    for _ in range(number):
        s = draw.choice(SECRETS)
        if draw.randrange(2):
            url = draw.choice(
                ("http://me:{s}@h:bad", "ftp://me:{s}@h", "//me:{s}@h", "me:{s}@h:99999999", "me:{s}@")
            )
            text = url.format(s=s)
            with pytest.raises(UsageError) as caught:
                base_of(text)
        else:
            wrong = draw.choice(
                ("Authorization=Bearer {s}", "{s}", "A b: {s}", "X: {s}\n", "X: {s}é", ": {s}")
            )
            with pytest.raises(UsageError) as caught:
                headers_of(["A: b", wrong.format(s=s) + "\0"])
        assert "SECRET" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "  "])
def test_a_key_with_its_line_end_is_sent_without_it_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("KVTUNE_API_KEY", f"SECRETPW{end}")
    assert headers_of([])["Authorization"] == "Bearer SECRETPW"
    for text in (
        "Illegal header value b'Bearer SECRETPW\\n'",
        "the server said SECRETPW",
        '{"a": "xSECRETPWx"}',
    ):
        assert "SECRETPW" not in printable(text)


@pytest.mark.parametrize("key", ["SECRETPWé", "SECRET\nPW", "SECRETPW\x00"])
def test_a_key_that_no_header_can_hold_is_one_line_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setattr("os.environ", {**os.environ, "KVTUNE_API_KEY": key})
    assert kvtune(["watch", "http://127.0.0.1:9", "--once"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvtune: KVTUNE_API_KEY has a character that no HTTP header can hold, at place ")
    assert "SECRET" not in said and len(said.splitlines()) == 2


def test_a_header_that_was_given_is_hidden_in_all_that_is_printed() -> None:
    headers_of(["X-Api-Key: GIVEN-SECRET"])
    headers_of(["X-Tenant: llama", "X-Whatever: 0123456789abcdef"])
    said = printable("an answer of llama with GIVEN-SECRET and 0123456789abcdef in it")
    assert said == "an answer of llama with *** and *** in it"


def test_a_run_file_and_its_page_hold_no_secret_whoever_made_the_run(tmp_path: Path) -> None:
    run = rounds_run()
    draw = random.Random(1)
    words = [word for _ in range(100) for word in secret_words(draw)]
    engine = structs.replace(run.header.engine, args=["--kv-transfer-config", '{"token":"SECRETPW"}'])
    log = ["non-default args: {'aws_secret_access_key': 'SECRETPW', 'u': 'redis://:SECRETPW@h'}"]
    made = replace_header(
        run, command=["kvtune", *words], engine=engine, log_tail=log, notes=["http://SECRETPW@h answers 500"]
    )
    path, page = tmp_path / "a.kvrun", tmp_path / "a.html"
    write_run(made, path)
    assert kvtune(["report", str(path), "-o", str(page)]) == 0
    header = zipfile.ZipFile(path).read("header.json").decode()
    assert "SECRET" not in header and "SECRET" not in page.read_text()


def test_words_without_secrets_stay_as_they_are() -> None:
    words = [
        *(
            "kvtune",
            "record",
            "http://h:8000",
            "h:8000/v1",
            "-w",
            "trace:path=/a@b/c,speed=2",
            "./a@b",
            "~/x@y",
        ),
        *(
            "--set",
            "core.slack=3",
            "--max-num-batched-tokens",
            "2048",
            "--watermark",
            "0.5",
            "--tokenizer",
            "x/y",
        ),
        *("--skip-tokenizer-init", "--hf-overrides", '{"num_key_value_heads": 2, "eos_token_id": 1}'),
        *("--speculative-config", '{"num_speculative_tokens": 3, "method": "ngram"}'),
    ]
    assert without_secrets(words) == words


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
