"""Errors that reach a user. Each one is a sentence that names the fix; the command's exit code hangs on its class."""

from typing import ClassVar

MAX_SHOWN = 80  # characters of a bad value in the sentence about it


class TrtcbError(Exception):
    """Base of all errors a user may see; ``exit_code`` is what the command ends with."""

    exit_code: ClassVar[int] = 1


class UsageError(TrtcbError):
    """A flag, a configuration value or a combination of them that cannot be honoured."""

    exit_code = 2


class ModelNotFoundError(TrtcbError):
    """A model source or a plan that does not exist, or cannot be fetched from here."""

    exit_code = 3


class PlanError(TrtcbError):
    """A plan or checkpoint file that is corrupt, or does not fit this version, CPU or GPU."""

    exit_code = 4


class OutOfMemoryError(TrtcbError):
    """What was asked for does not fit in the memory that is there."""

    exit_code = 5


class ValidationFailedError(TrtcbError):
    """A check of a built plan failed (accuracy drift beyond the limit)."""

    exit_code = 6


class PortBusyError(TrtcbError):
    """The server's address is taken."""

    exit_code = 7


class TargetUnavailableError(TrtcbError):
    """The target cannot run or build on this machine as it is installed."""

    exit_code = 8


class DrainTimeoutError(TrtcbError):
    """Requests were still running when the shutdown deadline passed."""

    exit_code = 9


class RequestError(TrtcbError):
    """A request that can never be served as it stands (HTTP 400). ``param`` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(TrtcbError):
    """The wait queue is at its limit (HTTP 429)."""


class DrainingError(TrtcbError):
    """The engine takes no new requests because it is shutting down (HTTP 503)."""


class EngineDeadError(TrtcbError):
    """The engine stopped on a fatal error; nothing can be served until it is restarted."""


def shown(value: object) -> str:
    """Return ``value`` for an error's sentence: short, in one line, and whatever it is."""
    try:
        text = str(value)
        is_plain = text.isprintable()
    except Exception:  # an integer of thousands of digits, or an object that cannot say what it is
        return f"that {type(value).__name__}"
    text = text if is_plain else ascii(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
