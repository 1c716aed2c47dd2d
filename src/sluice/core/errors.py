"""The error tree.

SluiceError
├── RequestError            the request cannot be served as asked          4xx
│   ├── InvalidRequest      a parameter is wrong; ``param`` names it       400
│   ├── ContextExceeded     prompt or output over the context or KV pool   400
│   ├── Unauthorized        no key, or a wrong one                         401
│   ├── Forbidden           a right key without the permission             403
│   ├── ModelNotFound       no such model                                  404
│   ├── BodyTooLarge        body over the configured limit                 413
│   └── BodyTooSlow         body not complete within its deadline          408
├── Overloaded              refused by admission                           429 or 503
├── ExecutorError           the engine failed                              502 or 504
│   ├── ReplicaGone         the replica of the request was lost            502
│   └── EngineRefused       a remote engine finds the request wrong        4xx, as it said
├── ConfigError             settings that cannot be used (all of them at once)
├── ModelLoadError          a model that cannot be fetched or read
│   └── MemoryShort         a KV pool or model that does not fit memory
└── InternalError           a bug in sluice                                500

Messages say what was asked, what the limit is and what to change. Errors carry fields; the table in
``server/problems.py`` turns them into HTTP bodies.
"""


class SluiceError(Exception):
    """Base of all errors that sluice raises on purpose."""


class RequestError(SluiceError):
    """The request cannot be served as asked, whoever else is being served."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """A parameter is missing, of the wrong type, or out of its range."""


class ContextExceeded(RequestError):
    """Prompt or requested output does not fit the context or the KV pool."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """No API key was sent, or one that is not known."""

    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is known and does not carry the permission asked for."""

    code = "permission_denied"


class ModelNotFound(RequestError):
    """The model asked for is not served here."""

    code = "model_not_found"


class BodyTooLarge(RequestError):
    """The request body is over the configured limit."""

    code = "body_too_large"


class BodyTooSlow(RequestError):
    """The request body was not complete within its deadline."""

    code = "body_too_slow"


class Overloaded(SluiceError):
    """Admission refused the request: 429 when capacity is contended, 503 when nothing can serve.

    ``retry_after_s`` is the predicted wait if retrying can help, ``measured`` what was compared.
    ``should_retry`` is false where that wait is too long for a client to sit it out.
    """

    should_retry = True

    def __init__(
        self,
        message: str,
        *,
        status: int,
        reason: str,
        measured: float | None,
        threshold: float | None,
        retry_after_s: float | None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.measured = measured
        self.threshold = threshold
        self.retry_after_s = retry_after_s


class ExecutorError(SluiceError):
    """The engine could not compute what was asked."""

    status = 502


class ReplicaGone(ExecutorError):
    """The replica that held the request was lost after text had been sent."""


class EngineRefused(ExecutorError):
    """A remote engine finds the request wrong. ``body`` is its own answer, to be passed on."""

    def __init__(self, message: str, *, status: int, body: bytes, content_type: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.content_type = content_type


class ConfigError(SluiceError):
    """Settings that cannot be used; ``problems`` lists all of them."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ModelLoadError(SluiceError):
    """A model that cannot be fetched, verified or read."""


class MemoryShort(ModelLoadError):
    """The model or its KV pool does not fit the memory that is free."""


class InternalError(SluiceError):
    """A bug in sluice."""
