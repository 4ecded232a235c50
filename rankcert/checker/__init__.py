"""The trusted checker: everything a proved bound rests on, and nothing else.

Read in this order: PROOFS.md (the theorems), inputs.py (what a statement is about), engine.py (how it is walked),
rows.py (the row check: a rank is enough), lower.py (the lower checks: a rank is needed), verdict.py (what they say),
claim.py, lower_claim.py and FORMAT.md (the files), verification.py (the questions), exact.py (the same by ball
arithmetic), kernel.h and kernel_lanes.h (the compiled loops).

It imports the standard library, NumPy, threadpoolctl and its own compiled kernel; python-flint on request; nothing
else of rankcert.
"""

from rankcert.checker.claim import Claim, read_claim
from rankcert.checker.domain import DomainVerdict, check_domain, read_domain, verify_domain
from rankcert.checker.engine import Engine
from rankcert.checker.inputs import Inputs, read_inputs
from rankcert.checker.lower import check_bernstein, check_leakage
from rankcert.checker.lower_claim import LowerClaim, read_bracket, read_lower
from rankcert.checker.rows import (
    applied_row_bounds,
    cancellation_upper,
    check_rows,
    find_log_normalisers,
    logit_residual,
    read_eps,
)
from rankcert.checker.verdict import BracketVerdict, LowerVerdict, Verdict
from rankcert.checker.verification import audit, verify, verify_bracket, verify_lower

__all__ = [
    "BracketVerdict",
    "Claim",
    "DomainVerdict",
    "Engine",
    "Inputs",
    "LowerClaim",
    "LowerVerdict",
    "Verdict",
    "applied_row_bounds",
    "audit",
    "cancellation_upper",
    "check_bernstein",
    "check_domain",
    "check_leakage",
    "check_rows",
    "find_log_normalisers",
    "logit_residual",
    "read_bracket",
    "read_claim",
    "read_domain",
    "read_eps",
    "read_inputs",
    "read_lower",
    "verify",
    "verify_bracket",
    "verify_domain",
    "verify_lower",
]
