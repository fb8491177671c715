"""Passwords of URLs and keys of servers are neither shown nor kept, wherever in a command line they stand."""

from __future__ import annotations

import pytest

from kvtune.masking import without_password, without_secrets

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
