"""Ways to factorize an attention matrix, one a file; `METHODS` finds them by name.

    base.py         Plan, Factorization, and the abstract Construction
    exact.py        distinct queries or keys as they are: the rank that always works
    polynomial.py   what the next two share: a polynomial of the logits is a sum of monomials
    taylor.py       the rank known before anything is computed
    minimax.py      the same from the polynomial of smallest degree
    svd.py          the truncated singular value decomposition, the baseline

Each cites the lemma of docs/THEORY.md behind it. None is trusted: the checker looks at the factors only.
"""

from rankcert.constructions.base import Construction, Factorization, Plan
from rankcert.constructions.exact import Exact
from rankcert.constructions.minimax import Minimax
from rankcert.constructions.svd import TruncatedSVD
from rankcert.constructions.taylor import Taylor

__all__ = ["METHODS", "Construction", "Factorization", "Plan"]

# In the order of what it costs to learn the rank.
METHODS: dict[str, Construction] = {
    construction.name: construction for construction in (Exact(), Taylor(), Minimax(), TruncatedSVD())
}
