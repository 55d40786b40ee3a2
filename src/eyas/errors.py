"""The errors that a user sees. Only the command line maps them to exit codes."""

import errno
import os
import re


class EyasError(Exception):
    """A message for the user: what is wrong, and (`fix`) what to do about it. Exit code 1."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"


class InputError(EyasError):
    """What the user gave (recipe, target, data, plan) cannot work. Exit code 2."""

    exit_code = 2


class EngineError(EyasError):
    """The serving engine failed to start, died, or answered with nonsense."""


class ProofError(EyasError):
    """A numeric check of a stage failed; its artifacts must not be used."""


def first_line(e: Exception) -> str:
    """The first line of a foreign exception's message, or its kind where it has none."""
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_OF_SAFETENSORS = re.compile(r"\(os error (\d+)\)")


def disk_error(e: Exception) -> EyasError | None:
    """What to tell of a full disk or a missing permission; None for every other exception, which is a bug."""
    number, name = (e.errno, e.filename) if isinstance(e, OSError) else (None, None)
    if number is None and (found := _OF_SAFETENSORS.search(str(e))):
        number = int(found[1])
    if number in _FULL:
        fix = "free some space, then give the same command again: it continues where it stopped"
    elif number in _FORBIDDEN:
        fix = "give yourself the permission, or name another place in the recipe"
    else:
        return None
    what = os.strerror(number)
    return EyasError(
        f"{what}: {os.fsdecode(name)}" if isinstance(name, str | bytes | os.PathLike) else f"{what} ({e})", fix=fix
    )
