"""Ways to factorize an attention matrix, one a file; `METHODS` finds them by name.

    base.py         Plan, Factorization, and the abstract Construction
    exact.py        distinct queries or keys as they are: the rank that always works
    polynomial.py   what the next two share: a polynomial of the logits is a sum of monomials
    taylor.py       the rank known before anything is computed
    minimax.py      the same from the polynomial of smallest degree
    chebyshev.py    a polynomial a row, absolutely close to exp and fitted to the row's logits
    harmonic.py     keys on a sphere or in a ball: zonal functions of the logits, or the best polynomials in the keys
    anisotropic.py  monomials one by one, those of largest weight
    cells.py        keys or queries split into cells, a polynomial each
    pivots.py       a Gaussian kernel and few of its columns; also for millions of tokens
    splitting.py    the search for the smallest rank
    states.py       what it holds, with and without a causal mask
    subspace.py     heads too large for a dense decomposition: P by tiles, passes, and no n x m array
    svd.py          the truncated singular value decomposition, the baseline
    compose.py      exact keys and rows, and any other construction for the rest
    recompress.py   any other construction, made thinner
    levels.py       the coordinates in which several of them work
    tiles.py, descent.py, prefixes.py   what subspace.py stands on: P by tiles, smaller ranks, fits under a mask

Each cites the lemma of docs/THEORY.md or docs/CONSTRUCTIONS.md behind it. None is trusted: the checker looks at the
factors only.
"""

from rankcert.constructions.anisotropic import Anisotropic
from rankcert.constructions.base import Construction, Factorization, Plan
from rankcert.constructions.cells import Cells
from rankcert.constructions.chebyshev import Chebyshev
from rankcert.constructions.compose import Compose
from rankcert.constructions.exact import Exact
from rankcert.constructions.harmonic import Harmonic
from rankcert.constructions.minimax import Minimax
from rankcert.constructions.pivots import Pivots
from rankcert.constructions.recompress import Recompress
from rankcert.constructions.splitting import Splitting
from rankcert.constructions.subspace import Subspace
from rankcert.constructions.svd import TruncatedSVD
from rankcert.constructions.taylor import Taylor

__all__ = ["METHODS", "Construction", "Factorization", "Plan"]

_COUNTED = (Taylor(), Minimax(), Anisotropic(), Chebyshev(), Harmonic())
_COMPOSE = Compose((Minimax(), Anisotropic()))
_PIVOTS, _SVD = Pivots(), TruncatedSVD()

# Those that count their rank first, then those that only know it once built.
METHODS: dict[str, Construction] = {
    construction.name: construction
    for construction in (
        Exact(),
        *_COUNTED,
        Cells(),
        _COMPOSE,
        _PIVOTS,
        Splitting(),
        Recompress((*_COUNTED, _COMPOSE), (_PIVOTS, _SVD)),
        Subspace(),
        _SVD,
    )
}
