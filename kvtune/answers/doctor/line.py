"""Reads a launch line of vLLM, in the forms in which people paste them, into a `LaunchLine`. Nothing of it is run.

Words after `--`, one text, or a file: `vllm serve`, `python -m vllm.entrypoints..`, `docker run`, a script around them,
a compose or Kubernetes file, a recipe. What only the shell or the file's user knows stays unknown, and is named.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from kvtune.base.bounded import decode_json, decode_yaml
from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_regular
from kvtune.base.script import NAME, VARIABLE, commands, expanded, in_place
from kvtune.data.flags import SHORT, SPECULATION

MOST_BYTES = 1 << 18
SERVER = re.compile(r"vllm[./]entrypoints[./](openai[./])?api_server(\.py)?$")
DOCKER = ("docker", "podman", "nerdctl")
_DOCKER = """
    -d --detach --rm -i --interactive -t --tty -it -ti -itd -dit -dt -td -di --init --privileged --read-only -P
    --publish-all --no-healthcheck --oom-kill-disable --sig-proxy -q --quiet --replace
"""
DOCKER_SWITCHES = frozenset(_DOCKER.split())
PROGRAMS = frozenset(("sh", "bash", "env", "python", "python3", "ray", "sleep"))
SPEC_FLAGS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
FORMS = "give vllm serve MODEL .., docker run .. vllm/vllm-openai .., or a script, compose, Kubernetes or recipe file"


class LaunchLine(msgspec.Struct, frozen=True, kw_only=True):
    """What starts one server. `flags`: as vLLM's parser names them, each word apart. `unknown`: what could not be read.

    `form`: the form it was lines in. `version`: of an image's tag; "" if none says it.
    """

    model: str
    flags: list[str] = []
    unknown: list[str] = []
    form: str = "vllm serve"
    version: str = ""


def read_line(words: Sequence[str]) -> LaunchLine:
    """Return the launch line in the words after `--`. UsageError if they hold none, or several."""
    name, _, chosen = words[0].partition("#")
    if (path := _file(name)) is None:
        alone = len(words) == 1 and " " in words[0]
        return _one(_in_text(words[0]) if alone else _in_words(words), "what follows --")
    try:
        text = read_regular(path, MOST_BYTES).decode()
        documents = decode_yaml(text) if path.suffix in (".yaml", ".yml") else []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", FORMS) from error
    lines = [line for document in documents for line in _in_yaml(document, "", chosen)]
    if chosen:
        lines = [line for line in lines if line.form.endswith(f" {chosen}")]
    return _one(lines or _in_text(text), str(path))


def _file(name: str) -> Path | None:
    with suppress(OSError, ValueError, RuntimeError):  # a text that can be no path
        if (path := Path(name).expanduser()).is_file():
            return path
    return None


def _one(lines: Iterable[LaunchLine], where: str) -> LaunchLine:
    by_place = {(line.form, line.model): line for line in lines}  # of a script's branches, the last one
    different = list({(line.model, *line.flags): line for line in by_place.values()}.values())
    if not different:
        raise UsageError(f"{where}: there is no launch line of vLLM in it", FORMS)
    if len(different) > 1:
        names = ", ".join(f"{line.form} of {line.model}" for line in different[:6])
        several = f"{where} holds {len(different)} launch lines: {names}"
        raise UsageError(several, "give one of them, or FILE#NAME for a service of a file")
    return different[0]


def _in_text(text: str, arguments: Sequence[str] = ()) -> Iterator[LaunchLine]:
    """Yield the launch lines in a shell's text. `arguments`: what its "$@" stands for."""
    try:
        for words in commands(text, arguments):
            yield from _in_words(words)
    except ValueError as error:
        raise UsageError(f"the launch line cannot be read: {reason(error)}", "close its quotes") from error


def _in_words(words: Sequence[str]) -> Iterator[LaunchLine]:
    """Yield the launch line in one command's words, if it is one."""
    for number, word in enumerate(words):
        program, rest = Path(word).name, words[number + 1 :]
        script = _script(rest) if program in ("sh", "bash") else None
        if program == "vllm" and rest[:1] == ["serve"]:
            yield _line(rest[1:], "vllm serve")
        elif SERVER.search(word):
            yield _line(rest, "python -m vllm.entrypoints")
        elif program in DOCKER and "run" in rest[:3]:
            yield from _in_docker(rest[rest.index("run") + 1 :])
        elif script:
            yield from _in_text(*script)
        else:
            continue
        return


def _script(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the text that `sh -c` runs, and its arguments."""
    options = list(takewhile(lambda word: word.startswith("-"), words))
    rest = list(words[len(options) :])
    runs = any(re.fullmatch(r"-[a-z]*c", option) for option in options)
    return (rest[0], rest[2:]) if rest and runs else None


def _in_docker(words: Sequence[str]) -> Iterator[LaunchLine]:
    """Yield the line of `docker run`. Each of its options takes one value, except the switches."""
    rest, entry = list(words), list[str]()
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if not equals and option not in DOCKER_SWITCHES and rest:
            value = rest.pop(0)
        entry = shlex.split(value) if option == "--entrypoint" else entry
    if rest:
        yield from _in_image(rest[0], [*entry, *rest[1:]], {}, "docker run")


def _in_image(
    image: str, words: Sequence[str], environment: Mapping[str, str], form: str
) -> Iterator[LaunchLine]:
    """Yield the line of a container: its words name a server, or are the flags of the image's own."""
    words = in_place(words, environment, {})
    lines = list(_in_words(words))
    first = words[0] if words else ""
    own = first.startswith("-") or ("/" in first and Path(first).name not in PROGRAMS)
    if not lines and own and "vllm" in image.lower():
        lines = [_line(words, form)]
    version = re.search(r":v?(\d+\.\d+(?:\.\d+)?)", image)
    for line in lines:
        yield msgspec.structs.replace(line, form=form, version=version[1] if version else "")


def _in_yaml(node: Any, name: str, chosen: str) -> Iterator[LaunchLine]:
    """Yield the launch lines of a file's containers and recipes. `name`: the node's key or name."""
    recipe = node.get("model") if isinstance(node, dict) else None
    if isinstance(node, list):
        for each in node:
            yield from _in_yaml(each, each.get("name", name) if isinstance(each, dict) else name, chosen)
    elif isinstance(node, dict) and isinstance(node.get("image"), str):
        environment = _environment(node.get("environment") or node.get("env"))
        parts = [part for key in ("entrypoint", "command", "args") for part in _strings(node.get(key))]
        unescaped = [re.sub(rf"\$\(({NAME})\)", r"${\1}", part).replace("$$", "$") for part in parts]
        yield from _in_image(expanded(node["image"], environment), unescaped, environment, f"service {name}")
    elif isinstance(recipe, dict) and isinstance(recipe.get("model_id"), str):
        variant = (node.get("variants") or {}).get(chosen) or {}
        more = [*_strings(recipe.get("base_args")), *_strings(variant.get("extra_args"))]
        yield _line([variant.get("model_id") or recipe["model_id"], *more], f"recipe {chosen}".strip())
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _in_yaml(value, str(key), chosen)


def line_of_flags(flags: Mapping[str, object], form: str) -> LaunchLine:
    """Return the line that a table of flags by name stands for."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return _line(words, form)


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return shlex.split(value.replace("\\\n", " "), comments=True)
    return [str(each) for each in value] if isinstance(value, list) else []


def _environment(value: object) -> dict[str, str]:
    """Return a container's variables, from a table of them, a list of NAME=VALUE, or one of names and values."""
    if isinstance(value, list):
        tables = [each for each in value if isinstance(each, dict)]
        texts = [each.partition("=")[::2] for each in value if isinstance(each, str) and "=" in each]
        value = {each.get("name"): each.get("value") for each in tables} | dict(texts)
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(name): expanded(str(each), {}) for name, each in pairs if each is not None}


def serve_flags() -> tuple[dict[str, str], frozenset[str]]:
    """Return how many values each flag of `vllm serve` takes (one, many, maybe one; a switch: none), and which matter.

    Those that matter may change what the cache holds, besides the flags of data/file_flags.py.
    """
    content = decode_json((Path(__file__).parents[2] / "data" / "serve_flags.json").read_bytes())
    takes = {name: kind for kind, names in content["takes"].items() for name in names.split()}
    return takes, frozenset(content["matter"].split())


def _line(words: Sequence[str], form: str) -> LaunchLine:
    """Return the line of vLLM's own words: the model, and each flag by its long name with its values."""
    takes, _ = serve_flags()
    flags, unknown, models = dict[str, list[str]](), list[str](), list[str]()
    rest = [word for word in words if word.strip() and word != "--"]
    while rest:
        word, equals, value = re.sub(r"^-O(?=\d)", "--optimization-level=", rest.pop(0)).partition("=")
        if not word.startswith("-"):
            models.append(word + equals + value)
            continue
        name, dot, key = word.partition(".")
        name = SHORT.get(name) or name.lstrip("-").replace("_", "-")
        kind = "one" if dot else takes.get(name, "many")
        values = [value] if equals else []
        while rest and not equals and kind != "switch" and not re.match("--|-[a-zA-Z]", rest[0]):
            values.append(rest.pop(0))
            if kind != "many":
                break
        if "." in key or (name != "model" and any(map(VARIABLE.search, values))):
            unknown.append(f"--{name} {' '.join(values)}")
        elif dot or name in SPEC_FLAGS:
            owner = SPECULATION if name in SPEC_FLAGS else name
            flags[owner] = [_joined(flags.get(owner, []), SPEC_FLAGS.get(name, key), values)]
        else:
            flags.pop(name, None)
            flags[name] = values
    model = (flags.pop("model", None) or models or [""])[0]
    unknown += [f"the word {each}" for each in models if each != model]
    written = [word for name, values in flags.items() for word in (f"--{name}", *values)]
    return LaunchLine(model=model, flags=written, unknown=unknown, form=form)


def _joined(held: Sequence[str], field: str, values: Sequence[str]) -> str:
    """Return a flag's JSON with one more of its fields, as `--flag.name` gives them one by one."""
    fields: dict[str, Any] = {}
    with suppress(ValueError, TypeError):  # what is held may be no object
        fields |= decode_json(held[0] if held else "{}")
    fields[field] = values[0] if values else True
    with suppress(ValueError):
        fields[field] = decode_json(values[0]) if values else True
    return json.dumps(fields, separators=(",", ":"))


def checked(line: LaunchLine) -> LaunchLine:
    """Return the line. UsageError if it does not say which model it starts."""
    if re.search(r"\w", line.model) and not VARIABLE.search(line.model):
        return line
    named = f"its model is {line.model}, which it does not say" if line.model else "it names no model"
    raise UsageError(f"the launch line ({line.form}): {named}", "name it: kvtune doctor MODEL ..")
