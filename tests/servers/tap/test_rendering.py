"""Token ids of a body: the server's own, by what it offers; or a tokenizer's that the user names."""

from __future__ import annotations

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.servers.tap.messages import Settings
from kvtune.servers.tap.rendering import Rendering
from tests.servers.tap.stand_in import ids_of, vllm

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


def rendering(url: str, tokenizer: str = "") -> Rendering:
    return Rendering(Settings(url, {}, False, "p-", "", False, False, tokenizer))


def test_the_server_renders_else_it_tokenizes() -> None:
    for renders in (True, False):
        with vllm(renders=renders) as server:
            made = rendering(server.url)
            assert made.prompts(CHAT, BODY) == made.prompts(CHAT, BODY) == [ids_of(BODY)]
            assert server.rendered == (2 if renders else 1)
            made.close()


def test_prompts_of_token_ids_need_no_one() -> None:
    made = rendering("http://127.0.0.1:9")
    assert made.prompts(COMPLETIONS, {"prompt": [1, 2]}) == [[1, 2]]
    assert made.prompts(COMPLETIONS, {"prompt": [[1, 2], [3]]}) == [[1, 2], [3]]
    made.close()


def test_each_of_several_prompts_is_rendered() -> None:
    with vllm(renders=False) as server:
        made = rendering(server.url)
        one, two = made.prompts(COMPLETIONS, {"prompt": ["a", "b"]})
        assert (one, two) == (ids_of({"prompt": "a"}), ids_of({"prompt": "b"}))
        made.close()


def test_a_tokenizer_that_is_named_renders_here() -> None:
    made = rendering("http://127.0.0.1:9", "bytes")
    assert made.prompts(COMPLETIONS, {"prompt": "abc"}) == [[97, 98, 99]]
    with pytest.raises(KvtuneError, match="odd"):
        made.prompts(CHAT, {**BODY, "odd": [1]})
    made.close()


def test_a_server_that_does_not_answer_is_said() -> None:
    made = rendering("http://127.0.0.1:9")
    with pytest.raises(KvtuneError, match="no server answers"):
        made.prompts(CHAT, BODY)
    made.close()
