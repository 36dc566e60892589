"""Errors of the API: a status code and OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Type of an error by its status code."""


class ApiError(Exception):
    """An answer that is not a result."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_object(self) -> dict[str, Any]:
        """Returns the error object."""
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def to_json(self) -> bytes:
        """Returns the error object as JSON."""
        return json.dumps(self.to_object()).encode()


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns the error of a request that the client must change."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str, code: str, seconds: float) -> ApiError:
    """Returns the error of a request that may be repeated after some seconds."""
    return ApiError(429, message, code=code, headers={"retry-after": _whole_seconds(seconds)})


def unavailable(message: str, code: str, seconds: float = 5.0) -> ApiError:
    """Returns the error of a server that does not accept requests now."""
    return ApiError(503, message, code=code, headers={"retry-after": _whole_seconds(seconds)})


def _whole_seconds(seconds: float) -> str:
    return str(max(1, round(seconds)))
