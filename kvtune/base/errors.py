"""The one exception that kvtune raises on purpose; the CLI prints it in one place (kvtune/cli/app.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3
"""kvtune cannot tell: nothing of what was asked could be judged (too few runs, a figure or events that are missing)."""
EXIT_INTERRUPTED = 130


class KvtuneError(Exception):
    """An error for the user. `message` names the wrong file, flag or field; `hint` says what to do next.

    `details`: lines of evidence printed between the two, such as the end of a log.
    """

    def __init__(
        self, message: str, hint: str = "", exit_code: int = EXIT_FAILED, details: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.details = tuple(details)

    @property
    def line(self) -> str:
        """The message, and in brackets what to do."""
        return f"{self.message} ({self.hint})" if self.hint else self.message


def reason(error: BaseException) -> str:
    """Return a parser's or the system's error as one line for a message, at most 300 characters of it."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}.."


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return `did you mean NAME? ` with the known name nearest to a misspelled one; "" if no name is near."""
    import difflib  # here, because it is only loaded when an error is reported

    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]}? " if near else ""


class UsageError(KvtuneError):
    """Bad input: a flag, a spec, a file. Exit code 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint, EXIT_USAGE)


class TooLargeError(UsageError):
    """What a file asks for would take more memory than it may; the message gives the figure."""
