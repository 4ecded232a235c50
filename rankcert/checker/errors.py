"""What the checker refuses, and by what name.

These classes live on the lowest floor because the checker raises them; `rankcert.errors` re-exports them and
adds the ones only the producing side needs.
"""

__all__ = ["InvalidInput", "MalformedCertificate", "RankcertError", "UnsafeArithmetic"]


class RankcertError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInput(RankcertError, ValueError):
    """The caller's arrays or options cannot mean an attention problem. Nothing has been computed."""


class UnsafeArithmetic(RankcertError):
    """The process rounds or flushes in a way the error analysis does not cover (PROOFS.md, guard G)."""


class MalformedCertificate(RankcertError):
    """A certificate file breaks the format. `reason` is the fixed name of the rule it breaks (FORMAT.md)."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
