"""Errors in OpenAI's shape: a status, a type, a code, and the parameter that the message names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jlora import errors
from jlora.serve.status import DeadlineExceeded, entry_of, opaque, shortened

RETRY_S = 1.0  # a client's wait before it asks again a server that loads


class BodyTooLarge(errors.JloraError):
    """The body passes `serve.max_request_mib`."""


class BodyEncoded(errors.JloraError):
    """The body is compressed, or encoded otherwise."""


class PastContext(errors.OutOfRange):
    """The prompt, alone or with `max_tokens`, passes the context of `max_len` tokens."""

    def __init__(self, message: str, max_len: int):
        super().__init__(message)
        self.max_len = max_len


class Failure(NamedTuple):
    """Status, type and code of an error class."""

    status: int
    code: str
    retry: bool = False


FAILURES: Mapping[type[Exception], Failure] = {
    errors.InvalidArgument: Failure(400, "invalid_value"),
    errors.OutOfRange: Failure(400, "context_length_exceeded"),
    errors.FailedPrecondition: Failure(400, "not_supported"),
    errors.DataLoss: Failure(400, "damaged_file"),
    errors.WeightsGone: Failure(503, "weights_gone", retry=True),
    errors.ResourceExhausted: Failure(400, "does_not_fit"),
    errors.ShortOfMemory: Failure(503, "unavailable", retry=True),
    errors.NotFound: Failure(404, "model_not_found"),
    errors.AlreadyExists: Failure(409, "already_exists"),
    BodyTooLarge: Failure(413, "request_too_large"),
    BodyEncoded: Failure(415, "unsupported_encoding"),
    errors.Busy: Failure(429, "rate_limit_exceeded", retry=True),
    errors.Unauthenticated: Failure(401, "invalid_api_key"),
    errors.PermissionDenied: Failure(403, "permission_denied"),
    errors.Unavailable: Failure(503, "unavailable", retry=True),
    DeadlineExceeded: Failure(408, "deadline_exceeded"),  # of the request's arrival: HTTP has no other
}
# What the shared code calls a field -> its name in a body.
_NAMES = {
    "prompt.text": "prompt",
    "prompt.chat": "messages",
    "prompt.token_ids": "prompt",
    "token_ids": "tokens",
    "chat": "messages",
    "include_stop": "include_stop_str_in_output",
    "name": "lora_name",
    "path": "lora_path",
}
UNKNOWN = "is not a field of this request"  # the client's own word for it stays
_FIELD = re.compile(r"([a-z_][\w.\[\]]*)(?= = |: )")


def answer(
    error: BaseException, where: str, names: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for a client. `names`: what this request calls a field that others call otherwise."""
    failure = entry_of(FAILURES, error)
    if failure is None:
        return 500, body(500, opaque(error, where)), {}
    said = shortened(str(error))
    found = _FIELD.match(said)
    field = None if found is None else found[1] if UNKNOWN in said else _named(found[1], names or {})
    message = said if found is None else f"{field}{said[found.end() :]}"
    if isinstance(error, PastContext):  # clients know it by these words
        message = f"This model's maximum context length is {error.max_len} tokens. {message}"
    headers = {}
    if failure.retry:
        headers["retry-after"] = str(math.ceil(error.retry_s if isinstance(error, errors.Busy) else RETRY_S))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return failure.status, body(failure.status, message, field, failure.code), headers


def _named(field: str, names: Mapping[str, str]) -> str:
    """The field of a body that the shared code calls by another name: `token_ids[3]` is `tokens[3]`."""
    name, bracket, place = field.partition("[")
    return (names.get(name) or _NAMES.get(name, name)) + bracket + place


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
