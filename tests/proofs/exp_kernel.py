"""Evaluates the proof of Theorem 1 (rankcert/checker/PROOFS.md) in ball arithmetic, for the constants in kernel.h.

    python tests/proofs/exp_kernel.py

prints the two proved bounds in units of 2^-53 and what was found wrong with the constants (nothing, hopefully).
"""

import re
import sys
from math import factorial
from pathlib import Path

import flint
from flint import arb


def read_constants(header: str) -> dict[str, float]:
    """The EXP_* constants of kernel.h, by name."""
    found = re.findall(r"#define (EXP_\w+) \(?(-?[0-9a-fx.p+-]+)\)?\s*$", header, flags=re.MULTILINE)
    return {name: float.fromhex(text) if "0x" in text else float(text) for name, text in found}


def wrong_constants(c: dict[str, float]) -> list[str]:
    """Premises of the proof that the constants break."""
    faults = [f"EXP_C{k}" for k in range(14) if c[f"EXP_C{k}"] != 1.0 / factorial(k)]
    # (1) the shift rounds to an integer and leaves room for |k| <= 1022
    if c["EXP_SHIFT"] != 1.5 * 2.0**52:
        faults.append("EXP_SHIFT")
    # (2) k * LN2HI must be exact for |k| <= 1023: at most 43 significant bits
    scaled = c["EXP_LN2HI"] * 2.0**42
    if scaled != int(scaled) or not c["EXP_LN2HI"] < float(arb(2).log().lower()) * (1 - 7e-14):
        faults.append("EXP_LN2HI")
    if (c["EXP_LOWEST"], c["EXP_HIGHEST"]) != (-708.0, 700.0):
        faults.append("EXP_LOWEST, EXP_HIGHEST")
    return faults


def proved_bound(c: dict[str, float], fused: bool, intervals: int = 4000) -> float:
    """An upper bound of |y / e^x - 1| / 2^-53 over [-708, 700], when every or no Horner step is fused."""
    u, ln2 = arb(2) ** -53, arb(2).log()
    hi, lo, log2e = arb(c["EXP_LN2HI"]), arb(c["EXP_LN2LO"]), arb(c["EXP_LOG2E"])
    reach = ln2 * (arb(1) / 2 + 2 * 708 * log2e * u) + 2 * 708 * abs(log2e * ln2 - 1)
    radius = float(reach.upper()) + 1e-15
    reduction = u * 1022 * lo + 1022 * abs(ln2 - hi - lo)  # error of r beyond u |r|
    worst = 0.0
    for i in range(intervals):
        r = arb(-radius + 2 * radius * (i + 0.5) / intervals, radius / intervals * (1 + 1e-9))
        size = abs(r)
        q = arb(c["EXP_C13"])
        error = abs(q - arb(1) / factorial(13))
        for k in range(12, -1, -1):
            coefficient = arb(c[f"EXP_C{k}"])
            e = size * error + abs(coefficient - arb(1) / factorial(k))
            if not fused:
                e += u * size * (abs(q) + error)
            q = r * q + coefficient
            error = (e + u * abs(q)) / (1 - u)
        truncation = size**14 / factorial(14) / (1 - size / 15)
        relative = (1 + (error + truncation) / r.exp()) * (u * size * (1 + u) + reduction).exp() - 1
        worst = max(worst, float((relative / u).upper()))
    return worst


def main() -> int:
    header = Path(__file__).parents[2] / "rankcert" / "checker" / "kernel.h"
    constants = read_constants(header.read_text("utf-8"))
    with flint.ctx.workprec(200):
        faults = wrong_constants(constants)
        bounds = proved_bound(constants, True), proved_bound(constants, False)
    print(f"{bounds[0]:.3f} {bounds[1]:.3f} {faults}")
    return 0 if max(bounds) <= 2.5 and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
