"""Errors that a user can cause. Each message names the field, the value and the limit.

The gRPC front maps each class to one status code. Any other exception is a bug in jlora.
"""

from __future__ import annotations

from collections.abc import Sequence


class JloraError(Exception):
    """Base of every error that the caller can fix."""


class InvalidArgument(JloraError, ValueError):
    """A field's value is not allowed."""


class OutOfRange(JloraError, ValueError):
    """Prompt and max_tokens together pass the context."""


class NotFound(JloraError, KeyError):
    """No adapter or model of that name; `near` are names like it."""

    def __init__(self, message: str = "", near: Sequence[str] = ()):
        super().__init__(message)
        self.message = message
        self.near = near

    def __str__(self) -> str:  # KeyError would quote the message
        return self.message + (f"; did you mean {', '.join(map(repr, self.near))}?" if self.near else "")


class AlreadyExists(JloraError):
    """The name, or the id of a live request, is in use."""


class ResourceExhausted(JloraError):
    """The queue is full, or the request can never fit the pool."""


class ShortOfMemory(ResourceExhausted):
    """The process has too little memory for it now; the same call may be accepted later."""


class Busy(ResourceExhausted):
    """The server has too much to do now; the same call may be accepted in `retry_s` seconds."""

    def __init__(self, message: str, retry_s: float = 1.0):
        super().__init__(message)
        self.retry_s = retry_s


class QueueFull(Busy):
    """The queue is full now; the same request may be accepted later."""


class LimitReached(Busy):
    """The tenant asks too often, or for too much at once."""


class Unauthenticated(JloraError):
    """The call needs an API key, and the client gives none that the server knows."""


class PermissionDenied(JloraError):
    """The client's API key is not for this call."""


class FailedPrecondition(JloraError):
    """The server cannot serve this call, for example text without a tokenizer."""


class DataLoss(JloraError):
    """A file is damaged."""


class WeightsGone(DataLoss):
    """No replica has the weights with which an answer began; the same request, sent again, begins with others."""


class Unavailable(JloraError):
    """The server is loading, draining or stopped."""


class ConfigError(JloraError, ValueError):
    """A configuration key or value is wrong; the message names the key and the nearest valid one."""
