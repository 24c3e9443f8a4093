"""Errors a user can cause. Each names the field, the value got and the limit.

The serving fronts map each class to one status code; anything else is our own bug.
"""

from __future__ import annotations


class JloraError(Exception):
    """Base of every error that is the caller's to fix."""


class InvalidArgument(JloraError, ValueError):
    """A field's value is not allowed."""


class OutOfRange(JloraError, ValueError):
    """Prompt and max_tokens together pass the context."""


class NotFound(JloraError, KeyError):
    """No adapter or model of that name."""

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


class AlreadyExists(JloraError):
    """The name or live request id is in use."""


class ResourceExhausted(JloraError):
    """The queue is full, or the request can never fit the pool."""


class QueueFull(ResourceExhausted):
    """The queue has no room now; the same request may be taken later."""


class FailedPrecondition(JloraError):
    """The server is not set up for this call (text without a tokenizer, say)."""


class DataLoss(JloraError):
    """A file is damaged."""


class Unavailable(JloraError):
    """The server is loading, draining or stopped."""


class ConfigError(JloraError, ValueError):
    """A configuration key or value is wrong; names the key and the nearest valid one."""
