"""Reads a launch line of vLLM, in the forms in which people paste them, into a `LaunchLine`. Nothing of it is run.

Words after `--`, one text, or a file: `vllm serve`, `python -m vllm.entrypoints..`, `docker run`, a script around them,
a compose or Kubernetes file, a recipe. What only the shell or the file's user knows stays unknown, and is named.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvtune.answers.doctor.finding import Finding
from kvtune.base.bounded import decode_json, decode_yaml
from kvtune.base.errors import UsageError, did_you_mean, reason
from kvtune.base.files import read_regular
from kvtune.base.script import NAME, VARIABLE, commands, expanded, in_place
from kvtune.data.file_flags import on_the_list
from kvtune.data.flags import SHORT, SPECULATION, draft_settings, flag_number, flag_texts, with_flag
from kvtune.data.layout.fields import text_config
from kvtune.data.layout.hub import assumed
from kvtune.data.layout.model_config import config_at_hand, model_config
from kvtune.lab.setup.setup import Pool

MOST_BYTES = 1 << 18
SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", "vllm.entrypoints.launchers")
DOCKER = ("docker", "podman", "nerdctl")
_DOCKER = """
    -d --detach --rm -i --interactive -t --tty -it -ti -itd -dit -dt -td -di --init --privileged --read-only -P
    --publish-all --no-healthcheck --oom-kill-disable --sig-proxy -q --quiet --replace
"""
DOCKER_SWITCHES = frozenset(_DOCKER.split())
PROGRAMS = frozenset(("sh", "bash", "env", "python", "python3", "ray", "sleep"))
SPEC_FLAGS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
FORMS = (
    "vllm serve MODEL .., docker run .. vllm/vllm-openai .., or a script, compose, Kubernetes or recipe file"
)


class LaunchLine(msgspec.Struct, frozen=True, kw_only=True):
    """What starts one server. `flags`: as vLLM's parser names them, each word apart. `unknown`: what could not be read.

    `form`: the form it was found in. `version`: of an image's tag; "" if none says it.
    """

    model: str
    flags: list[str] = []
    environment: dict[str, str] = {}
    unknown: list[str] = []
    form: str = "vllm serve"
    version: str = ""


def read_line(words: Sequence[str]) -> LaunchLine:
    """Return the launch line in the words after `--`. UsageError if they hold none, or several."""
    name, _, chosen = words[0].partition("#")
    path = Path(name).expanduser()
    if len(words) > 1 or not (path.is_file() or re.search(r"\s", words[0])):
        found = list(_in_words(list(words)))
        return _one(found, "what follows --")
    if not path.is_file():
        return _one(list(_in_text(words[0])), "the text")
    try:
        text = read_regular(path, MOST_BYTES).decode()
        documents = decode_yaml(text) if path.suffix in (".yaml", ".yml") else []
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", f"give {FORMS}") from error
    found = [line for document in documents for line in _in_yaml(document, "", chosen)]
    if chosen and documents:
        found = [line for line in found if line.form.endswith(f" {chosen}")]
    return _one(found or list(_in_text(text)), str(path))


def _one(found: list[LaunchLine], where: str) -> LaunchLine:
    by_place = {(line.form, line.model): line for line in found}  # of a script's branches, the last one
    different = list({(line.model, *line.flags): line for line in by_place.values()}.values())
    if not different:
        raise UsageError(f"{where}: there is no launch line of vLLM in it", f"give {FORMS}")
    if len(different) > 1:
        names = ", ".join(f"{line.form} of {line.model}" for line in different[:6])
        raise UsageError(
            f"{where} holds {len(different)} launch lines: {names}",
            "give one of them, or FILE#NAME for a service of a file",
        )
    return different[0]


def _in_text(
    text: str, arguments: Sequence[str] = (), known: Mapping[str, str] | None = None
) -> Iterator[LaunchLine]:
    """Yield the launch lines in a shell's text. `arguments`: what its "$@" stands for."""
    try:
        for words in commands(text, arguments, known):
            yield from _in_words(words)
    except ValueError as error:
        raise UsageError(
            f"the launch line cannot be read as a shell's: {reason(error)}", "close its quotes"
        ) from error


def _in_words(words: Sequence[str], known: Mapping[str, str] | None = None) -> Iterator[LaunchLine]:
    """Yield the launch line in one command's words, if it is one. `known`: the environment of its scripts."""
    matches = [match for word in words if (match := re.fullmatch(rf"({NAME})=(.*)", word, re.DOTALL))]
    environment = {match[1]: match[2] for match in matches}
    program = [Path(word).name for word in words]
    for number, word in enumerate(program):
        rest = words[number + 1 :]
        if word == "vllm" and rest[:1] == ["serve"]:
            yield _line(rest[1:], environment, "vllm serve")
        elif word.startswith(SERVERS) or words[number].endswith("vllm/entrypoints/openai/api_server.py"):
            yield _line(rest, environment, "python -m vllm.entrypoints")
        elif word in DOCKER and "run" in rest[:3]:
            yield from _in_docker(rest[rest.index("run") + 1 :])
        elif word in ("sh", "bash") and (script := _script(rest)):
            yield from _in_text(*script, known)
        else:
            continue
        return


def _script(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the text that `sh -c` runs, and its arguments."""
    options = list(takewhile(lambda word: word.startswith("-"), words))
    rest = words[len(options) :]
    return (
        (rest[0], list(rest[2:]))
        if rest and any(re.fullmatch(r"-[a-z]*c", option) for option in options)
        else None
    )


def _in_docker(words: Sequence[str]) -> Iterator[LaunchLine]:
    environment: dict[str, str] = {}
    entry: list[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-"):
        option, equals, value = words[position].partition("=")
        position += 1
        if option not in DOCKER_SWITCHES and not equals:
            value = words[position] if position < len(words) else ""
            position += 1
        if option in ("-e", "--env"):
            environment |= dict([value.partition("=")[::2]])
        entry = shlex.split(value) if option == "--entrypoint" else entry
    if position < len(words):
        yield from _in_image(words[position], [*entry, *words[position + 1 :]], environment, "docker run")


def _in_image(
    image: str, words: Sequence[str], environment: Mapping[str, str], form: str
) -> Iterator[LaunchLine]:
    """Yield the line of a container: its words name a server, or are the flags of the image's own."""
    version = re.search(r":v?(\d+\.\d+(?:\.\d+)?(?:rc\d+)?)", image)
    words = list(in_place(words, environment, {}))
    found = list(_in_words(words, environment))
    first = words[0] if words else ""
    own = first.startswith("-") or ("/" in first and Path(first).name not in PROGRAMS)
    if not found and own and "vllm" in image.lower():
        found = [_line(words, {}, form)]
    for line in found:
        both = {**environment, **line.environment}
        yield msgspec.structs.replace(
            line, environment=both, form=form, version=version[1] if version else ""
        )


def _in_yaml(node: Any, name: str, chosen: str) -> Iterator[LaunchLine]:
    """Yield the launch lines of a file's containers and recipes. `name`: the node's key or name."""
    if isinstance(node, list):
        for each in node:
            yield from _in_yaml(each, str(each.get("name", name)) if isinstance(each, dict) else name, chosen)
    if not isinstance(node, dict):
        return
    environment = _environment(node.get("environment") or node.get("env") or node.get("base_env"))
    parts = [part for key in ("entrypoint", "command", "args") for part in _strings(node.get(key))]
    if isinstance(node.get("image"), str) and (parts or "vllm" in node["image"]):
        unescaped = [re.sub(r"\$\((" + NAME + r")\)", r"${\1}", part).replace("$$", "$") for part in parts]
        yield from _in_image(
            expanded(node["image"], environment)[0], unescaped, environment, f"service {name}"
        )
    elif isinstance(recipe := node.get("model"), dict) and isinstance(recipe.get("model_id"), str):
        variant = (node.get("variants") or {}).get(chosen) or {}
        words = [
            variant.get("model_id") or recipe["model_id"],
            *_strings(recipe.get("base_args")),
            *_strings(variant.get("extra_args")),
        ]
        yield _line(words, {}, f"recipe {chosen}".strip())
    elif isinstance(node.get("command"), str) and "vllm" in node["command"]:
        defaults = {key: str(value) for key, value in (node.get("defaults") or {}).items()} | {
            "model": str(node.get("model"))
        }
        text = re.sub(r"\{(" + NAME + r")\}", lambda match: defaults.get(match[1], match[0]), node["command"])
        yield from _in_text(text, (), environment)
    elif isinstance(node.get("model"), str) and not name:
        yield line_of_flags(node, "config file")
    else:
        for key, value in node.items():
            yield from _in_yaml(value, str(key), chosen)


def line_of_flags(flags: Mapping[str, object], form: str) -> LaunchLine:
    """Return the line that a table of flags by name stands for."""
    return _line([word for name, value in flags.items() for word in _flag_words(str(name), value)], {}, form)


def _flag_words(key: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if value is None:
        return []
    return [f"--{key}", json.dumps(value) if isinstance(value, dict | list) else str(value)]


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return shlex.split(re.sub(r"\\\n", " ", value), comments=True)
    return [str(each) for each in value] if isinstance(value, list) else []


def _environment(value: object) -> dict[str, str]:
    if isinstance(value, dict):
        return {str(name): str(each) for name, each in value.items() if each is not None}
    pairs = {}
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict) and "value" in each:
            pairs[str(each.get("name"))] = str(each["value"])
        elif isinstance(each, str) and "=" in each:
            name, _, text = each.partition("=")
            pairs[name] = expanded(text, {})[0]
    return pairs


@cache
def arity() -> dict[str, str]:
    """Return how many values each flag of `vllm serve` takes: one, many, maybe (one), or none, of a switch."""
    content = (Path(__file__).parents[2] / "data" / "serve_flags.json").read_bytes()
    return {name: kind for kind, names in decode_json(content).items() for name in names.split()}


def _line(words: Sequence[str], environment: Mapping[str, str], form: str) -> LaunchLine:
    """Return the line of vLLM's own words: the model, and each flag by its long name with its values."""
    takes, flags, unknown = arity(), dict[str, list[str]](), []
    models: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "2":  # of 2>
            continue
        if not word.startswith("-") or word == "--":
            models += [word] if word.strip() and word != "--" else []
            continue
        name, equals, value = word.partition("=")
        name = SHORT.get(name) or (
            f"optimization-level={name[2:]}"
            if re.match(r"-O\d", name)
            else name.lstrip("-").replace("_", "-")
        )
        name, dot, key = name.partition(".")
        kind = "one" if dot else takes.get(name, "unknown")
        values = [value] if equals else []
        while (
            not equals and kind != "switch" and position < len(words) and not words[position].startswith("--")
        ):
            values.append(words[position])
            position += 1
            if kind in ("one", "maybe"):
                break
        if name != "model" and any(VARIABLE.search(each) for each in values):
            unknown.append(f"--{name} {' '.join(values)}")
        elif dot or name in SPEC_FLAGS:
            owner = SPECULATION if name in SPEC_FLAGS else name
            flags[owner] = [_joined(flags.get(owner), SPEC_FLAGS.get(name, key), values)]
        else:
            flags.pop(name, None)
            flags[name] = values
    model = (flags.pop("model", None) or models or [""])[0]
    unknown += [f"the word {each}" for each in models if each != model]
    written = [word for name, values in flags.items() for word in (f"--{name}", *values)]
    return LaunchLine(model=model, flags=written, environment=dict(environment), unknown=unknown, form=form)


def _joined(held: list[str] | None, key: str, values: Sequence[str]) -> str:
    """Return the JSON of a flag with one more of its fields, as `--flag.key value` gives them one by one."""
    fields: dict[str, Any] = {}
    try:
        fields = decode_json(held[0]) if held else {}
        value = decode_json(values[0]) if values else True
    except ValueError:
        value = values[0]
    part = fields
    *outer, last = key.split(".")
    for name in outer:
        part = part.setdefault(name, {})
    part[last] = value
    return json.dumps(fields, separators=(",", ":"))


def unknown_flags(line: LaunchLine) -> Iterator[tuple[str, str]]:
    """Yield the flags that vLLM's server does not have, each with the one that may be meant."""
    known = arity()
    for word in line.flags:
        if word.startswith("--") and word[2:] not in known:
            yield word, did_you_mean(word[2:], known)


def checked(line: LaunchLine) -> LaunchLine:
    """Return the line. UsageError if it does not say which model it starts."""
    if not re.search(r"\w", line.model) or VARIABLE.search(line.model):
        named = (
            f"its model is {line.model}, which the line does not say" if line.model else "it names no model"
        )
        raise UsageError(
            f"the launch line ({line.form}): {named}", "name it: kvtune doctor MODEL -- vllm serve .."
        )
    return line


MATTER = frozenset(
    (
        *(
            "additional-config",
            "attention-config",
            "cpu-offload-gb",
            "diffusion-config",
            "enable-lora",
            "hf-overrides",
        ),
        *(
            "hf-config-path",
            "kv-cache-dtype-skip-layers",
            "kv-sharing-fast-prefill",
            "kv-transfer-config",
            "max-loras",
        ),
        *("mm-encoder-only", "model-class-overrides", "scheduler-cls", "swa-bounded-replay", "use-replayssm"),
        *("config", "speculative-config", "max-model-len"),
    )
)
"""vLLM's flags that may change what the cache holds, besides those that `on_the_list` takes."""
OF_WEIGHTS = ("quantization", "load-format")


class Asked(NamedTuple):
    """What doctor is asked in a line's place, and what there is to say of the line."""

    model: str
    flags: list[str]
    pool: Pool
    findings: tuple[Finding, ...]


def asked(line: LaunchLine, named: str | None, *, memory: bool) -> Asked:
    """Return what to ask of a line. `named`: the layout that the user names. `memory`: the device's sizes the pool."""
    layout = (
        assumed(line.model) if named is None and not config_at_hand(line.model, folders=True).fields else None
    )
    findings = [
        Finding(
            "note", "line", f"{line.form}: {line.model}" + (f", vLLM {line.version}" if line.version else "")
        )
    ]
    flags, unknown = on_the_list(line.flags)
    if layout is not None:
        findings.append(Finding("note", "layout", layout.said, "name another: kvtune doctor MODEL -- .."))
    if named is not None or layout is not None:
        for name in OF_WEIGHTS:
            flags = with_flag(flags, name, None)
        flags, changed = _fitted(layout.layout if layout else str(named), flags, line)
        findings += changed
    drafter = draft_settings(line.flags)
    if drafter and "--speculative-config" in unknown:
        number = drafter.get("num_speculative_tokens")
        own = drafter.get("method", "draft") != "mtp"
        if number:
            flags = with_flag(
                flags, SPECULATION, json.dumps({"method": "mtp", "num_speculative_tokens": number})
            )
        said = (
            "the drafter's config is not known: the model's own MTP layer stands for it"
            if own
            else "only method and tokens are taken"
        )
        findings.append(
            Finding(
                "note",
                "drafter",
                f"{json.dumps(drafter)}: {said}",
                "its own KV group is not counted" if own else "",
            )
        )
    for word, meant in unknown_flags(line):
        findings.append(
            Finding(
                "warning",
                "flag",
                f"{word}: vLLM's server has no such flag and does not start",
                f"{meant}leave it out",
            )
        )
    matter = [word for word in unknown if word[2:].removeprefix("no-") in MATTER - {SPECULATION}]
    if matter or line.unknown:
        listed = ", ".join((*matter, *line.unknown))
        findings.append(
            Finding(
                "warning",
                "not read",
                f"{listed}: what it does to the cache is not in this report",
                "put values in place",
            )
        )
    why = (
        ""
        if memory and (layout is None or layout.weights)
        else "no --like-device names the memory"
        if not memory
        else layout.said
        if layout
        else ""
    )
    return Asked(layout.layout if layout else named or line.model, flags, Pool(unknown=why), tuple(findings))


def _fitted(layout: str, flags: list[str], line: LaunchLine) -> tuple[list[str], list[Finding]]:
    """Return the flags for a layout that stands for the line's model, and what that changes."""
    fields = model_config(layout).fields
    text, longest = text_config(fields), flag_number(flag_texts(flags), "max-model-len", 0)
    findings = []
    if longest > int(text.get("max_position_embeddings", longest)):
        longer: dict[str, Any] = {"max_position_embeddings": longest}
        flags = with_flag(
            flags, "hf-overrides", json.dumps({"text_config": longer} if "text_config" in fields else longer)
        )
    if re.match(r"nvidia/.*nvfp4", line.model.lower()) and "kv-cache-dtype" not in flag_texts(flags):
        flags = with_flag(flags, "kv-cache-dtype", "fp8")
        findings.append(
            Finding("note", "kv type", "fp8, as NVIDIA's NVFP4 checkpoints ask (kv_cache_quant_algo)")
        )
    return flags, findings
