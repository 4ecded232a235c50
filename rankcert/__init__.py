"""rankcert: how small a rank does this attention head really need, and how wrong is my approximation? With proof.

A large untrusted producer, a small trusted checker, a certificate between them:

    q, k -> AttentionProblem -> geometry -> constructions -> factors + hints -> checker -> Verdict, Certificate

The floors of the package; an import points down, never up, and tests/test_floors.py reads the imports:

    7  cli, plots                                   the command line; pictures
    6  certification, domain, heads, laws, survey   policy: what to try and keep; heads in files; experiments
    5  certificates                                 the record and its writer
    4  constructions, lowerbounds                   one method a file, METHODS; one witness kind a file
    3  approximants                                 polynomials for exp
    2  geometry, kernels                            visible dimensions; compiled loops and their plain twins
    1  problem, errors                              the one input door
    ------------------------------------------------- the wall
    0  checker                                      everything a bound rests on; imports nothing above

Names are loaded when first used: importing the package loads neither numba nor scipy.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "BracketVerdict": "rankcert.checker",
    "Candidate": "rankcert.certificates",
    "CannotCertify": "rankcert.errors",
    "Certificate": "rankcert.certificates",
    "LowerVerdict": "rankcert.checker",
    "InvalidInput": "rankcert.errors",
    "METHODS": "rankcert.constructions",
    "MalformedCertificate": "rankcert.errors",
    "RankcertError": "rankcert.errors",
    "UnsafeArithmetic": "rankcert.errors",
    "DomainCertificate": "rankcert.domain",
    "Verdict": "rankcert.checker",
    "audit": "rankcert.checker",
    "best_eps": "rankcert.certification",
    "certify": "rankcert.certification",
    "certify_domain": "rankcert.domain",
    "example_head": "rankcert.heads",
    "geometry_report": "rankcert.geometry",
    "interaction_dimension": "rankcert.geometry",
    "load": "rankcert.certificates",
    "load_domain": "rankcert.domain",
    "rank_curve": "rankcert.certification",
    "survey_heads": "rankcert.survey",
    "verify": "rankcert.checker",
    "verify_bracket": "rankcert.checker",
    "verify_domain": "rankcert.checker",
    "verify_lower": "rankcert.checker",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'rankcert' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
