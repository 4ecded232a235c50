"""Monomial features and the kernels: the law they exist for, their order, and their plain twins."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcert.kernels import monomials, reference, rowspread
from rankcert.kernels.table import count_monomials, monomial_table

shapes = st.tuples(st.integers(0, 6), st.integers(0, 5))
seeds = st.integers(0, 2**32 - 1)


def features(points, degree, writer=monomials):
    table = monomial_table(points.shape[1], degree)
    out = np.full((len(points), table.factor.size), np.nan)
    writer.write_features(points, table.runs, table.factor, out)
    return out, table


@pytest.mark.parametrize("variables", range(5))
@pytest.mark.parametrize("degree", range(6))
def test_features_are_all_scaled_monomials_each_once(variables, degree):
    x = np.array([1.3, -0.7, 2.1, 0.4])[:variables]
    expected = []
    for alpha in itertools.product(range(degree + 1), repeat=variables):
        if sum(alpha) <= degree:
            multinomial = math.factorial(sum(alpha)) / math.prod(math.factorial(a) for a in alpha)
            expected.append((sum(alpha), math.sqrt(multinomial) * math.prod(x**alpha)))
    out, table = features(x[None], degree)
    found = sorted(zip(table.degree.tolist(), out[0], strict=True))
    assert count_monomials(variables, degree) == len(expected) == out.shape[1]
    np.testing.assert_allclose(found, sorted(expected), rtol=1e-14)
    assert (np.diff(table.degree) >= 0).all()


@given(shapes, seeds)
def test_inner_products_of_one_degree_are_powers(shape, seed):
    variables, degree = shape
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(3, variables)), rng.normal(size=(4, variables))
    (left, table), (right, _) = features(x, degree), features(y, degree)
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
    for a in range(degree + 1):
        part = table.degree == a
        assert (np.abs(left[:, part] @ right[:, part].T - (x @ y.T) ** a) <= 1e-13 * (1 + sizes**a)).all()


@given(shapes, seeds)
def test_twin_writes_the_same_bits(shape, seed):
    variables, degree = shape
    x = np.random.default_rng(seed).normal(size=(5, variables))
    np.testing.assert_array_equal(features(x, degree)[0], features(x, degree, reference)[0])


def test_counts_are_exact_beyond_any_float():
    assert count_monomials(8, 14) == 319_770
    assert count_monomials(8, 6) == 3003
    assert count_monomials(64, 10**6) == math.comb(10**6 + 64, 64)


def test_the_shared_table_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        monomial_table(2, 2).factor[0] = 2.0


def extremes(kernel, block, terms, keys, reach, kept):
    low, high = np.full((2, len(block), terms.shape[1] + 1), np.nan)
    kernel.find_extremes(block.copy(), terms, keys, reach, kept, low, high)
    return low, high


@given(st.integers(0, 5), st.integers(1, 7), st.integers(0, 4), seeds)
def test_extremes_of_truncations_are_those_of_the_matrices(rows, m, count, seed):
    rng = np.random.default_rng(seed)
    block, terms, keys = (
        rng.normal(size=(rows, m)),
        rng.normal(size=(rows, count)),
        rng.normal(size=(count, m)),
    )
    reach, kept = rng.integers(0, m + 1, size=rows), rng.random(m) < 0.7
    low, high = extremes(rowspread, block, terms, keys, reach, kept)
    for i, t in itertools.product(range(rows), range(count + 1)):
        rest = (block[i] - terms[i, :t] @ keys[:t])[: reach[i]][kept[: reach[i]]]
        np.testing.assert_allclose(low[i, t], rest.min(initial=np.inf), atol=1e-14)
        np.testing.assert_allclose(high[i, t], rest.max(initial=-np.inf), atol=1e-14)
    twins = extremes(reference, block, terms, keys, reach, kept)
    np.testing.assert_array_equal((low, high), twins)


def test_hidden_values_may_be_anything():
    block = np.array([[1.0, np.nan, 3.0, np.inf]])
    kept = np.array([True, False, True, True])
    none = np.empty((1, 0)), np.empty((0, 4))
    low, high = extremes(rowspread, block, *none, np.array([3]), kept)
    assert (low[0, 0], high[0, 0]) == (1.0, 3.0)


def test_numba_is_loaded_only_by_the_kernels():
    code = "import sys, rankcert.geometry, rankcert.constructions; print('numba' in sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
