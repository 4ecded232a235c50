"""The compiled kernel behind one door: which variant runs, and whether this process may be trusted to run it."""

import os
from functools import cache
from pathlib import Path

import numpy as np

from rankcert.checker.errors import InvalidInput, RankcertError, UnsafeArithmetic

try:
    from rankcert.checker import _kernel
except ImportError as error:  # a source tree that was never built
    raise ImportError(
        "rankcert's compiled kernel is missing; run `pip install .` in the source tree (a C compiler is needed) "
        "and import the installed package"
    ) from error

__all__ = [
    "BLOCK",
    "EPS_M",
    "LANES",
    "VARIANTS",
    "default_variant",
    "exponentials",
    "require_safe_arithmetic",
]

EPS_M = 2.0**-52  # eps_m of PROOFS.md: twice the unit roundoff
BLOCK: int = _kernel.BLOCK_COLUMNS
LANES: int = _kernel.LANE_COUNT
VARIANTS: tuple[str, ...] = _kernel.VARIANTS


@cache
def default_variant() -> str:
    """The fastest variant, or the one that the environment variable RANKCERT_KERNEL names."""
    asked = os.environ.get("RANKCERT_KERNEL", VARIANTS[-1])
    if asked not in VARIANTS:
        raise InvalidInput(
            f"RANKCERT_KERNEL={asked!r}, but this processor and build offer {', '.join(VARIANTS)}"
        )
    return asked


def require_safe_arithmetic() -> None:
    """Raise UnsafeArithmetic unless the calling thread rounds to nearest and keeps subnormals (guard G).

    Once a process, the kernel is also held against stored values of exp: RankcertError if it was miscompiled.
    """
    fault = _kernel.unsafe_arithmetic()
    if fault:
        what = {
            1: "does not round to nearest",
            2: "flushes subnormals to zero",
            3: "neither rounds to nearest nor keeps subnormals",
        }[fault]
        raise UnsafeArithmetic(
            f"this thread's floating-point arithmetic {what} (some library has changed the "
            "control register); no bound can be proved here"
        )
    _self_test()


def exponentials(x: np.ndarray, variant: str | None = None) -> np.ndarray:
    """e^x elementwise with relative error at most 1.25 EPS_M on [-708, 700]; 0 below, inf above (Theorem 1)."""
    x = np.ascontiguousarray(x, dtype=np.float64)
    y = np.empty_like(x)
    _kernel.exponentials(variant or default_variant(), x.ravel(), y.ravel())
    return y


@cache
def _self_test() -> None:
    # Catches a miscompiled kernel (fast-math, a wrong dispatch). It establishes no accuracy: the proof does.
    lines = Path(__file__).with_name("exp_points.txt").read_text("ascii").splitlines()[1:]
    x, y = np.array([[float.fromhex(word) for word in line.split()] for line in lines]).T
    for variant in VARIANTS:
        wrong = ~(np.abs(exponentials(x, variant) - y) <= 2 * EPS_M * y)
        if wrong.any():
            raise RankcertError(
                f"kernel variant {variant} computes exp({float(x[wrong][0])!r}) wrongly: the build is broken"
            )
