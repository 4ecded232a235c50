"""Attention as a Taylor polynomial of the visible logits."""

from rankcert.approximants import taylor
from rankcert.constructions.polynomial import PolynomialConstruction

__all__ = ["Taylor"]


class Taylor(PolynomialConstruction):
    """Rank C(r + D, D), D the Taylor degree of exp on [-W, W]. Counts for any r and W."""

    name = "taylor"
    lemma = "Lemmas 6 and 7"
    find_degree = staticmethod(taylor.find_degree)
    fit = staticmethod(taylor.fit)
