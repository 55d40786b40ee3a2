"""The errors that a user sees. Only the command line maps them to exit codes."""


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
