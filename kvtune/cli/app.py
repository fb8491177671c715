"""The command line's frame: the typer app, the split at `--`, and the ONE place that prints a KvtuneError.

A command is a module `kvtune/cli/<name>.py` with a query, its options (query.py), and a function `<name>` of the
query (plan -> call -> print), listed in COMMANDS. Only the command that was asked for is imported, for the list of
them all are: their top level imports only typer, kvtune.base.errors and kvtune.cli.options; the rest is imported
inside the function.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from kvtune.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, KvtuneError
from kvtune.base.extras import checked
from kvtune.base.masking import Secrets, holding
from kvtune.cli import notices
from kvtune.cli.options import completing
from kvtune.cli.query import LAB_KEY, Lab, command_of
from kvtune.cli.signals import interruptible
from kvtune.data.show.terminal import one_line, screened

QUIET = frozenset(("-q", "--quiet"))
HELP = frozenset(("-h", "--help", "--version"))
_click: Any = importlib.import_module(typer.BadParameter.__module__)
"""The exceptions of the click that typer uses: click itself, or the copy in newer versions of typer."""
_NO_ARGUMENTS: Any = getattr(_click, "NoArgsIsHelpError", ())
"""click 8.1 has no such class: it prints the help by itself."""
COMMANDS = (
    "watch",
    "tap",
    "record",
    "profile",
    "sweep",
    "tune",
    "bounds",
    "capacity",
    "explain",
    "explain-log",
    "doctor",
    "compare",
    "diff",
    "check",
    "report",
    "runs",
    "export",
    "recipe",
    "serve",
    "schema",
    "demo",
)


def build_app(names: Sequence[str] = COMMANDS, *, listed: bool = False) -> typer.Typer:
    """Return the app with these commands. `listed`: their names and help alone, for a list of them."""
    app = typer.Typer(
        help="Profile and tune the KV cache of a vLLM engine, by measurement.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's help takes as long as everything else together
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print kvtune's version and exit."),
        debug: bool = typer.Option(False, "--debug", help="Show tracebacks. Works anywhere before `--`."),
        quiet: bool = typer.Option(
            False, "-q", "--quiet", help="Print results and errors only. Works anywhere before `--`."
        ),
    ) -> None:
        if version:
            from kvtune import __version__

            print(__version__)
            raise typer.Exit
        if context.invoked_subcommand is None:
            from kvtune.cli.doors import doors

            for line in doors():
                print(line)

    for name in names:
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"kvtune.cli.{module}"), module)
        group = isinstance(command, typer.Typer)
        if listed:
            app.command(name, help=command.info.help if group else command.__doc__)(lambda: None)
        elif group:
            app.add_typer(command, name=name)
        else:
            app.command(name)(checked(name, command_of(command)))
    return app


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the app with what these arguments need: one command, or the list of all."""
    root = list(itertools.takewhile(lambda word: word.startswith("-"), arguments))
    name = arguments[len(root)] if len(root) < len(arguments) else ""
    if completing():
        return build_app()
    if HELP.isdisjoint(root) and (not name or name in COMMANDS):
        return build_app([name] if name else [])
    return build_app(listed=True)


def run(argv: Sequence[str], lab: Lab | None = None) -> int:
    """Run one command line and return its exit code. What it prints holds no secrets and steers no terminal.

    `lab`: where the command runs set-ups; None: on this machine.
    """
    with holding(Secrets.given(argv, os.environ)), screened():
        try:
            return _run(argv, lab)
        except BrokenPipeError:  # also of what an error prints
            return EXIT_FAILED


def _run(argv: Sequence[str], lab: Lab | None) -> int:
    arguments = list(argv)
    vllm_flags: list[str] = []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, vllm_flags = arguments[:cut], arguments[cut + 1 :]
    debug = "--debug" in arguments
    quiet = not QUIET.isdisjoint(arguments)
    arguments = [a for a in arguments if a != "--debug" and a not in QUIET]
    try:
        command: Any = typer.main.get_command(app_for(arguments))
        with interruptible(), notices.quiet() if quiet else contextlib.nullcontext():
            if completing():
                command.main(args=arguments, prog_name="kvtune", standalone_mode=False)
            # Not `main`, which turns Ctrl-C into an exit code and prints no message.
            with command.make_context("kvtune", arguments, obj=vllm_flags) as context:
                if lab is not None:
                    context.meta[LAB_KEY] = lab
                result = command.invoke(context)
        return result if isinstance(result, int) else 0
    except KvtuneError as error:
        if debug:
            raise
        _say(error.message, error.hint, error.details)
        return error.exit_code
    except KeyboardInterrupt as error:
        if debug:
            raise
        return _interrupted(error)
    except BrokenPipeError:
        raise
    except MemoryError:
        if debug:
            raise
        _say(
            "there is not enough memory for what was asked", "ask for less: a shorter run, trace or workload"
        )
        return EXIT_FAILED
    except Exception as error:
        code = _click_exit(error)
        if code is not None:
            return code
        if debug:
            raise
        _say(
            f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}",
            "this is a bug in kvtune: run again with --debug and report the traceback",
        )
        return EXIT_FAILED


def _click_exit(error: Exception) -> int | None:
    """Return a typer exception's exit code, and print a usage error; return None for any other exception."""
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, typer.Abort):
        return _interrupted(None)
    if isinstance(error, _NO_ARGUMENTS):
        print(error.message)
        return 0
    if isinstance(error, _click.ClickException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "kvtune"
        _say(
            " ".join(error.format_message().split()),
            f"`{path} --help` lists its options; vLLM's own flags go after `--`",
        )
        return EXIT_USAGE
    return None


def _interrupted(signal_error: BaseException | None) -> int:
    """Print one line about the interruption, unless the terminal is closed."""
    with contextlib.suppress(OSError):
        _say(f"interrupted by {signal_error}" if str(signal_error or "") else "interrupted", "")
    return EXIT_INTERRUPTED


def _say(message: str, hint: str, details: Sequence[str] = ()) -> None:
    notices.always(f"kvtune: {one_line(message)}")
    for line in details:
        notices.always(f"  {one_line(line)}")
    if hint:
        notices.always(f"  next: {one_line(hint)}")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a terminal or a pipe that cannot show "µ" gets "?", not a crash
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
