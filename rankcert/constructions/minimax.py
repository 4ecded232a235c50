"""Attention as the polynomial of the visible logits that is relatively closest to exp."""

from rankcert.approximants import minimax
from rankcert.constructions.polynomial import PolynomialConstruction

__all__ = ["Minimax"]


class Minimax(PolynomialConstruction):
    """Rank C(r + D, D), D the smallest degree of relative error eps on [-W, W]. Refuses W > 10."""

    name = "minimax"
    lemma = "Lemmas 6 and 8"
    find_degree = staticmethod(minimax.find_degree)
    fit = staticmethod(minimax.fit)
