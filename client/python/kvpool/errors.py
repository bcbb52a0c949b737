"""What goes wrong, with the daemon's words. Every exception of kvpool is a KvpoolError; most are also what Python calls it."""

__all__ = [
    "AlreadyExistsError", "DeadlineExceededError", "FailedPreconditionError", "InvalidArgumentError", "KvpoolError",
    "NotFoundError", "OutOfRangeError", "PermissionDeniedError", "ReleasedError", "ResourceExhaustedError",
    "SessionEndedError", "UnauthenticatedError", "UnavailableError", "UnimplementedError",
]


class KvpoolError(RuntimeError):
    """Anything else: INTERNAL, UNKNOWN."""


class InvalidArgumentError(KvpoolError, ValueError):
    """A field breaks its limit: the message names field, value, limit."""


class NotFoundError(KvpoolError, LookupError):
    """No such session, space, block or device."""


class AlreadyExistsError(KvpoolError):
    """ALREADY_EXISTS."""


class PermissionDeniedError(KvpoolError, PermissionError):
    """PERMISSION_DENIED."""


class UnauthenticatedError(KvpoolError, PermissionError):
    """The daemon knows nothing of this session's token."""


class FailedPreconditionError(KvpoolError):
    """A stale block, a block in another state, a layout or fingerprint that differs, a signal that is missing."""


class ReleasedError(FailedPreconditionError, ValueError):
    """Use after release: of blocks, a sequence or a session."""


class ResourceExhaustedError(KvpoolError, MemoryError):
    """Too few blocks, or a cap or budget, with the numbers."""


class SessionEndedError(KvpoolError):
    """The daemon ended the session, and why."""


class OutOfRangeError(KvpoolError):
    """OUT_OF_RANGE."""


class UnimplementedError(KvpoolError, NotImplementedError):
    """This device, or this build, can't."""


class UnavailableError(KvpoolError, ConnectionError):
    """No daemon there, or it drains, or it is gone."""


class DeadlineExceededError(KvpoolError, TimeoutError):
    """Not in time: it may be asked for again."""
