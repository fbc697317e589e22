"""What a caller is told when a call cannot be answered; each has one sentence and an HTTP status."""

from __future__ import annotations


class CallError(Exception):
    """A call that is refused. `status` is that of HTTP; gRPC has `grpc_status`."""

    status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class BadRequest(CallError):
    """The request is wrong: the sentence names the field."""


class TooLarge(CallError):
    status = 413
    grpc_status = "INVALID_ARGUMENT"


class NotServed(CallError):
    """Another model, another version, or an operation that this server does not have."""

    status = 404
    grpc_status = "NOT_FOUND"


class Overloaded(CallError):
    """The queue is full: come back after `retry_after_s`."""

    status = 429
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, sentence: str, *, retry_after_s: int) -> None:
        super().__init__(sentence)
        self.retry_after_s = retry_after_s


class Stopping(CallError):
    status = 503
    grpc_status = "UNAVAILABLE"
