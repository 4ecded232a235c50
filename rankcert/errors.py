"""Every error of the package, in one place."""

from rankcert.checker.errors import InvalidInput, MalformedCertificate, RankcertError, UnsafeArithmetic

__all__ = ["CannotCertify", "InvalidInput", "MalformedCertificate", "RankcertError", "UnsafeArithmetic"]


class CannotCertify(RankcertError):
    """No construction tried reaches the tolerance with a proof.

    `bound` is the best bound that was proved (None when nothing was built), `rank` the rank it took, and
    `candidates` says what was tried and why it failed.
    """

    def __init__(self, message: str, *, bound: float | None = None, rank: int | None = None, candidates=()):
        super().__init__(message)
        self.bound = bound
        self.rank = rank
        self.candidates = tuple(candidates)
