"""Attention as the polynomial of the visible logits that is relatively closest to exp."""

from rankcert.approximants import minimax
from rankcert.constructions.polynomial import PolynomialConstruction

__all__ = ["Minimax"]


class Minimax(PolynomialConstruction):
    """Rank C(r + D, D), D the smallest degree of relative error eps on [-W, W].

    Counts up to W = 40 and builds up to where rounding the coefficients takes a quarter of eps (W = 32.6 for eps = .1).
    """

    name = "minimax"
    lemma = "Lemmas 6 and 8"

    @staticmethod
    def find_degree(half_width: float, target: float) -> int:
        # Once rounding counts, part of the target is its: so a smaller target never has a smaller degree.
        if half_width > minimax.WIDEST_COUNT:
            return minimax.find_degree(half_width, target)  # refuses
        return minimax.find_degree(half_width, target - min(minimax.rounding_est(half_width), target / 4.0))

    @staticmethod
    def fit(half_width: float, degree: int):
        return minimax.fit(half_width, degree)

    @staticmethod
    def widest(target: float) -> float:
        return minimax.widest(target)
