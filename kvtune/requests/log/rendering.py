"""Turns requests' bodies into token ids: by vLLM's renderer, by a tokenizer and its chat template, or into bytes.

Runs in any process that builds a workload. A tokenizer's folder may come from anyone, and its template and its regular
expressions are programs: each tokenizer runs in a child with limits of time and memory (`render_child.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtune.base.dialogue import Dialogue, Refused
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.files import home_folder
from kvtune.requests.log.bodies import Body, Rendered, body_of, refuse_elsewhere
from kvtune.requests.log.conversation import Conversation, conversation
from kvtune.requests.log.render_loop import BODIES, LOAD, RENDER_S, TEXT, Made, Question, cpu_s
from kvtune.requests.types import BYTES

NO_TOKENIZER = "tokenizer=FOLDER names a folder that has one; tokenizer=bytes compares bytes of the text"
CHILD, VLLM_CHILD = "kvtune.requests.log.render_child", "kvtune.lab.engine.render_child"
VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_USE_MODELSCOPE": "0",
}
"""A child's environment: nothing is fetched or told, and no plugin of vLLM's is loaded."""
MOST_FILE_BYTES = 1 << 30
"""Size limit of each file of a tokenizer's folder but the model's weights. The largest tokenizers have 40 MB."""


class Renderer:
    """Renders bodies as token ids. `name`: of the tokenizer or server. `how`: what renders, in words for an answer."""

    name: str
    how: str

    def render(self, bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
        """Return an iterator over the prompts, or why a body cannot be rendered. Rendering begins at once.

        The iterator ends if `render` or `text` is called before it is at its end.
        """
        raise NotImplementedError

    def ids(self, body: Mapping[str, Any] | Body) -> Sequence[int]:
        """Return the prompt of one body as token ids. UsageError if it cannot be rendered."""
        (rendered,) = self.render([body_of(body)])
        if isinstance(rendered, UsageError):
            raise rendered
        return rendered.ids

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        raise NotImplementedError


def renderer(tokenizer: str) -> Renderer:
    """Make a renderer. `tokenizer`: a folder, a model in the local cache, or `bytes`. UsageError if it is missing.

    vLLM renders if it is installed and the model's config.json is there; else the chat template does.
    """
    if tokenizer == BYTES:
        return Bytes()
    why = ""
    if find_spec("vllm") is not None and _has_config(tokenizer):
        try:
            return Rendering(tokenizer, VLLM_CHILD)
        except KvtuneError as error:
            why = error.message.replace(tokenizer, "the model")
    renderer = Rendering(tokenizer)
    renderer.how += f" ({why})" if why else ""
    return renderer


def _has_config(tokenizer: str) -> bool:
    """Whether a model's config.json is in this folder, or in Hugging Face's cache under this name."""
    folder = Path(tokenizer).expanduser()
    if folder.is_dir():
        return (folder / "config.json").is_file()
    own = home_folder()
    home = os.environ.get("HF_HOME") or (own and own / ".cache" / "huggingface")
    if not home:
        return False
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", tokenizer)
    return bool(name and any(cache.glob(f"models--{tokenizer.replace('/', '--')}/snapshots/*/config.json")))


class Bytes(Renderer):
    """Renders without a tokenizer or template: plain text in UTF-8, one token a byte."""

    name = how = BYTES

    def render(self, bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
        for body in bodies:
            try:
                prompt = prompt_of(body)
                text = plain(conversation(body)) if prompt is None else prompt
            except UsageError as error:
                yield error
            else:
                yield Rendered(array("I", list(text.encode("utf-8", "surrogatepass"))), self.how)

    def text(self, ids: Sequence[int]) -> str:
        return bytes(list(ids)).decode("utf-8", "replace")


def plain(conversation: Conversation) -> str:
    """Write a conversation as plain text: tools as JSON, a line each, then each message after its role."""
    lines = (
        ["tools", *(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)]
        if conversation.tools
        else []
    )
    for message in conversation.messages:
        lines += [message["role"], *(part["text"] for part in message["content"])]
        lines += [str(message["reasoning"])] if message.get("reasoning") else []
        lines += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([*lines, ""])


def prompt_of(body: Body) -> str | None:
    """Return the prompt of a body of /v1/completions; None for the other APIs."""
    if body.is_chat:
        return None
    refuse_elsewhere(body)
    prompt = body.fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise UsageError("has several prompts", "write a line for each of them")
    return prompt


def _check_files(folder: Path) -> None:
    """Raise UsageError for a file that a tokenizer could read for ever: a pipe, a device, one without end."""
    for path in sorted(folder.iterdir()):
        try:
            status = path.stat()
        except OSError:
            continue  # a broken link: transformers says which file is missing
        kind = status.st_mode
        large = status.st_size > MOST_FILE_BYTES and path.suffix in (".json", ".jinja", ".model", ".txt")
        if large or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            what = f"larger than {MOST_FILE_BYTES:,} bytes" if large else "no regular file"
            raise UsageError(f"{folder} has no tokenizer: {path.name} is {what}", NO_TOKENIZER)


class Rendering(Renderer):
    """Renders in a child of limited time and memory, which ends with this process. `module`: what the child runs."""

    def __init__(self, tokenizer: str, module: str = CHILD, render_s: float = RENDER_S) -> None:
        folder = Path(tokenizer).expanduser()
        if folder.is_dir():
            _check_files(folder)
        self.name, self._render_s = tokenizer, render_s
        self._unread = self._questions = 0
        self._child: Dialogue[Made | Refused] = Dialogue(
            *(Made | Refused, module, str(render_s)), variables=VARIABLES, start_new_session=False
        )
        self._close = weakref.finalize(self, _end, self._child, os.getpid())
        try:
            self.how = self._asked(LOAD, tokenizer.encode()).decode()
        except UsageError:  # no tokenizer: nothing will be asked
            self._close()
            raise

    def render(self, bodies: Sequence[Body]) -> Iterator[Rendered | UsageError]:
        parts = [json.dumps(body).encode() for body in bodies]
        self._send(BODIES, parts)
        self._unread = len(parts)
        return self._answers(parts, self._questions)

    def _answers(self, parts: Sequence[bytes], question: int) -> Iterator[Rendered | UsageError]:
        for part in parts:
            if question != self._questions:  # another one was asked since, and these answers were left out
                return
            answer = self._received(BODIES, part)
            self._unread -= 1
            yield answer.rendered(self.how) if isinstance(answer, Made) else answer

    def text(self, ids: Sequence[int]) -> str:
        return self._asked(TEXT, array("I", ids).tobytes()).decode("utf-8", "surrogatepass")

    def _asked(self, what: int, given: bytes) -> bytes:
        self._send(what, [given])
        answer = self._received(what, given)
        if isinstance(answer, UsageError):
            raise answer
        return answer.content

    def _send(self, what: int, parts: list[bytes]) -> None:
        if not self._close.alive:
            raise KvtuneError(
                f"cannot be rendered: {self.name} ended its process before", "use another tokenizer"
            )
        self._questions += 1
        while self._unread:  # of a question that was given up
            self._received(BODIES, b"")
            self._unread -= 1
        with self._whole(what, parts[0] if parts else b""):
            self._child.ask(Question(what, parts))

    def _received(self, what: int, given: bytes) -> Made | UsageError:
        with self._whole(what, given):
            answer = self._child.answer()
        return UsageError(answer.message, answer.hint) if isinstance(answer, Refused) else answer

    @contextlib.contextmanager
    def _whole(self, what: int, given: bytes) -> Iterator[None]:
        """Name the reason if the child ends. After Ctrl-C in between the next answer would be that of this question."""
        try:
            yield
        except EOFError:
            code, last_line = self._child.child.wait(), self._child.last_line()
            self._close()
            raise KvtuneError(
                *_ended(code, last_line, what, cpu_s(what, len(given), self._render_s), self.name)
            ) from None
        except BaseException:
            self._close()
            raise


def _end(child: Dialogue[Made | Refused], owner: int) -> None:
    if os.getpid() == owner:  # not a fork of the process that started it
        child.end()


def _ended(code: int, last_line: str, what: int, limit_s: float, name: str) -> tuple[str, str]:
    """Return message and hint for a child that ended."""
    hint = f"look at the chat template and the tokenizer of {name}; tokenizer=bytes needs neither"
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        taken = f"takes more than {round(limit_s, 1):g} s"
        return (f"{name} {taken} to load" if what == LOAD else f"{taken} to render with {name}"), hint
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    why = f"{ending}{': ' if last_line else ''}{last_line[:200]}"
    verb = f"{name} ends" if what == LOAD else "ends"
    return f"{verb} the process that renders with {name} ({why})", hint
