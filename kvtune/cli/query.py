"""What a command was asked: one frozen object of its options, and the ONE gate that refuses an option nobody reads.

A command is a function of a `Query`, and of a lab if it runs set-ups or waits: `def tune(query: TuneQuery, lab: Lab)`.
The query's fields are its options, declared by `option`, or of a type of kvtune/cli/options.py that commands share. A
field whose type is a `Literal` takes and completes these words alone. `When`, beside an option, says when it is read;
an option that the user gave and the call would not read is refused before any work.
tests/cli/test_idle_options.py walks over each condition of each command, and looks up each option in its code.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields
from dataclasses import field as dataclass_field
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.models import ArgumentInfo, OptionInfo

from kvtune.base.errors import UsageError, did_you_mean
from kvtune.base.extras import require

if TYPE_CHECKING:
    from kvtune.lab.lab import Lab as Lab
else:
    Lab = Any  # a command's module is imported for every call, and what runs set-ups only for its own

LAB_KEY = "kvtune.lab"

Need = str | bool | tuple[str, ...]
Facts = Mapping[str, Mapping[str, str]]
VLLM = "what follows --"


class When:
    """Declared beside an option: it is read when all `needs` hold. Of several, one is enough.

    needs: a field of the query, or a fact that the command finds out, with the value or values that it must have; True:
    it must be given, False: it must not. without: those that must not be given. why: what the option is, as words that
    follow "it is ..".
    """

    def __init__(self, why: str, without: str = "", **needs: Need) -> None:
        self.why, self.needs = why, {**needs, **dict.fromkeys(without.split(), False)}


def option(default: Any = MISSING, *notes: str | When, **more: Any) -> Callable[[str], Any]:
    """Declare a field as an option, then its help: `option(60.0, "S", min=1)("How long.")`.

    notes: how `shared` spells it; when it is read.
    """
    return _field_with(shared, default, notes, more)


def argument(default: Any = MISSING, *notes: str | When, **more: Any) -> Callable[[str], Any]:
    """Declare a field as an argument, likewise."""
    return _field_with(fixed, default, notes, more)


def _field_with(
    kind: Callable[..., Any], default: Any, notes: Sequence[str | When], more: Mapping[str, Any]
) -> Callable[[str], Any]:
    spelled = [note for note in notes if isinstance(note, str)]
    return lambda text: dataclass_field(
        default=default, metadata={"option": (kind(*spelled, **more)(text), *notes)}
    )


def shared(spelled: str = "", **more: Any) -> Callable[[str], OptionInfo]:
    """Return an option for Annotated, which several commands share.

    spelled: what the field's name does not say: a VALUE, or `-n,--name VALUE`. more: what typer.Option takes.
    """
    names, metavar = spelled.partition(" ")[::2] if spelled.startswith("-") else ("", spelled)

    def info(text: str) -> OptionInfo:
        made: OptionInfo = typer.Option(metavar=metavar or None, help=_joined(text), **more)
        made.param_decls = tuple(names.split(",")) if names else None
        return made

    return info


def fixed(metavar: str = "", **more: Any) -> Callable[[str], ArgumentInfo]:
    """Return an argument for Annotated, likewise."""
    return lambda text: typer.Argument(metavar=metavar or None, help=_joined(text), **more)


def _joined(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text).strip()


def either(why: str, names: str) -> tuple[When, ...]:
    """Return the conditions of an option that is read when one of these options is given."""
    return tuple(When(why, "", **{name: True}) for name in names.split())


class _Flags:
    """Marks the field that takes vLLM's own flags, which follow `--`."""


Flags = Annotated[Sequence[str], _Flags()]


class _Field(NamedTuple):
    """A field as it is declared. `spelled`: its option or argument, as a person writes it; `metavar`: its value."""

    type: Any
    info: ArgumentInfo | OptionInfo | None
    whens: tuple[When, ...]
    default: Any
    spelled: str
    metavar: str

    @property
    def words(self) -> tuple[str, ...]:
        """The words that a field of a `Literal` takes."""
        kinds = (self.type, *get_args(self.type))
        return tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))

    @property
    def shown(self) -> str:
        return f"{self.spelled} {self.metavar}".strip()


@dataclass(frozen=True, kw_only=True)
class Query:
    """The options of a command. `given`: the fields that the user gave; None: those that differ from their defaults."""

    given: frozenset[str] | None = None

    FACTS: ClassVar[Facts] = {}
    """What the command finds out before it knows whether an option is read: by name and value, in words."""

    @classmethod
    def from_cli(cls, ctx: typer.Context, values: Mapping[str, Any]) -> Self:
        """Return the query of a command line, refused if it has an option that would not be read."""
        sources = {name: ctx.get_parameter_source(name) for name in values}
        given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
        words, taken = list(ctx.find_root().obj or []), dict(values)
        flags = next((name for name, field in declared(cls).items() if field.spelled == VLLM), "")
        if words and not flags:
            raise UsageError(
                f"{ctx.command_path} takes nothing after --: it starts no engine with {words[0]}",
                "leave -- and what follows it out",
            )
        if words:
            given.add(flags)
            taken[flags] = words
        query = cls(given=frozenset(given), **taken)
        query.refuse()
        if "page" in given:  # before any work
            require("report", f"{ctx.command_path} --page")
        return query

    def refuse(self, **facts: str) -> None:
        """Raise UsageError for a given option that is not read. `facts`: of those in FACTS, the ones that are known."""
        values = {**vars(self), **facts}
        fields = declared(type(self))
        given = values["given"]
        for name, field in fields.items():
            was_given = given is None and values[name] != field.default
            if was_given or (given is not None and name in given):
                self._refuse(name, fields, values)

    def _refuse(self, name: str, fields: Mapping[str, _Field], values: Mapping[str, Any]) -> None:
        """Raise UsageError if none of the field's `When` holds."""
        failed = [(when, list(_failing(when, values, fields))) for when in fields[name].whens]
        if not failed or any(not needs for _, needs in failed):
            return
        option = fields[name].spelled
        for when, needs in failed:
            barred = [fields[other].spelled for other, need in needs if need is False]
            if barred:
                raise UsageError(
                    f"{option} is not read with {barred[0]}: it is {when.why}", "leave one of the two out"
                )
        wanted = [self._wanted(*needs[0], fields) for _, needs in failed]
        only = " or ".join(dict.fromkeys(wanted))
        add = [text for (_, needs), text in zip(failed, wanted, strict=True) if needs[0][0] in fields]
        raise UsageError(
            f"{option} is read only with {only}: it is {failed[0][0].why}",
            f"{'add ' if add else ''}{' or '.join(dict.fromkeys(add))}{', or ' if add else ''}leave {option} out",
        )

    def _wanted(self, name: str, need: Need, fields: Mapping[str, _Field]) -> str:
        """Return in words what a field or a fact must be."""
        values = () if isinstance(need, bool) else _values(need)
        if name not in fields:
            return " or ".join(self.FACTS[name][value] for value in values)
        return " or ".join(f"{fields[name].spelled} {value}" for value in values) or fields[name].shown


def present(value: object) -> bool:
    """Whether an option has a value: 0 is one; none, off and empty are not."""
    return value is not None and value is not False and value != "" and value != () and value != []


def _values(need: str | tuple[str, ...]) -> tuple[str, ...]:
    return (need,) if isinstance(need, str) else need


def _failing(
    when: When, values: Mapping[str, Any], fields: Mapping[str, _Field]
) -> Iterator[tuple[str, Need]]:
    for name, need in when.needs.items():
        if name not in values:
            continue
        value = values[name]
        holds = present(value) == need if isinstance(need, bool) else value in _values(need)
        if not holds:
            yield name, need


def declared(query: type[Query]) -> dict[str, _Field]:
    """Return the fields of a query that a user can give, in their order."""
    hints = get_type_hints(query, include_extras=True)
    return {
        field.name: _field(field.name, hints[field.name], field.default, field.metadata.get("option"))
        for field in fields(query)
        if field.name != "given"
    }


def _field(name: str, hint: Any, default: Any, option: Sequence[Any] | None) -> _Field:
    kind, *notes = (hint, *option) if option else get_args(hint)
    info = next((note for note in notes if isinstance(note, ArgumentInfo | OptionInfo)), None)
    whens = tuple(note for note in notes if isinstance(note, When))
    if info is None:
        return _Field(kind, None, whens, (), VLLM, "")
    if isinstance(info, ArgumentInfo):
        return _Field(kind, info, whens, default, info.metavar or name.upper(), "")
    first = [info.default] if isinstance(info.default, str) else []
    names = [word for word in (*first, *(info.param_decls or ())) if word.startswith("--")]
    spelled = names[0].partition("/")[0] if names else f"--{name.strip('_').replace('_', '-')}"
    return _Field(kind, info, whens, default, spelled, info.metavar or "")


def command_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a query as typer takes it: with a parameter for each field of the query."""
    query_type = get_type_hints(function).get("query")
    if not (inspect.isclass(query_type) and issubclass(query_type, Query)):
        return function

    takes_lab = "lab" in inspect.signature(function).parameters

    def command(ctx: typer.Context, **values: Any) -> Any:
        query = query_type.from_cli(ctx, values)
        return function(query, lab_of(ctx)) if takes_lab else function(query)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for name, field in declared(query_type).items():
        if field.info is not None:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=_for_typer(field)))
    functools.update_wrapper(command, function, updated=())
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.query = query_type  # type: ignore[attr-defined]
    return command


def lab_of(ctx: typer.Context) -> Lab:
    """Return the lab that `kvtune.cli.app.run` was handed, else this machine's."""
    from kvtune.lab.lab import LAB

    lab: Lab = ctx.meta.get(LAB_KEY, LAB)
    return lab


def _for_typer(field: _Field) -> Any:
    """Return a field's annotation, with its option's name; of a `Literal`, with what checks and completes its words."""
    info, words = copy(field.info), field.words
    if isinstance(info, OptionInfo) and not info.param_decls:
        info.param_decls = (field.spelled,)
    if not words:
        return Annotated[field.type, info]
    assert info is not None
    info.parser, info.metavar = one_of(field.spelled, words), f"[{'|'.join(words)}]"
    info.autocompletion = lambda incomplete: [(word, "") for word in words]
    return Annotated[str | None if field.default is None else str, info]


def one_of(option: str, words: Sequence[str]) -> Callable[[str], str]:
    """Return what checks that the value of `option` is one of the words."""

    def word(text: str) -> str:
        if text in words:
            return text
        *most, last = words
        raise UsageError(
            f"{option} must be {', '.join(most)} or {last}, not '{text}'",
            did_you_mean(text, words).strip() or f"for instance {option} {words[0]}",
        )

    return word
