# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Python's view of kernel.h. Shapes are checked here once, so that the C loops need not.

Functions that exist once per vector width take the variant's name; `VARIANTS` lists those this processor can run, fastest last.
"""

from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int64_t, uint64_t

cdef extern from "kernel.h" nogil:
    const int LANES
    const int BLOCK
    cdef struct variant:
        const char *name
        void (*rows)(const double *, const double *, ptrdiff_t, const double *, const int64_t *, const double *,
                     double, int64_t, double *, double *) noexcept nogil
        void (*normalisers)(const double *, ptrdiff_t, const double *, const int64_t *, double, int64_t, double *,
                            double *) noexcept nogil
        void (*product)(const double *, const double *, int64_t, int64_t, int64_t, double *, ptrdiff_t) noexcept nogil
        void (*exponentials)(const double *, double *, int64_t) noexcept nogil
    void spread_c "spread"(const double *, const double *, ptrdiff_t, const double *, const int64_t *, double,
                           int64_t, double *, double *)
    int find_variants(const variant **found)
    int unsafe_arithmetic_c "unsafe_arithmetic"()
    int64_t spot_faults_c "spot_faults"(const double *, const double *, int64_t, int64_t, int64_t, const double *,
                                        ptrdiff_t, uint64_t, int64_t)

LANE_COUNT = LANES
BLOCK_COLUMNS = BLOCK

cdef const variant *_found[8]
cdef int _count = find_variants(_found)
VARIANTS = tuple((<bytes>_found[i].name).decode() for i in range(_count))


cdef const variant *_choose(str name) except NULL:
    for i in range(_count):
        if (<bytes>_found[i].name).decode() == name:
            return _found[i]
    raise ValueError(f"no kernel variant {name!r} on this processor; there are {VARIANTS}")


cdef int _need(bint condition, str what) except -1:
    if not condition:
        raise ValueError(what)
    return 0


cdef int _check_block(int64_t rows, int64_t columns, const double[::1] bias, const int64_t[::1] reach) except -1:
    cdef int64_t i
    _need(columns <= BLOCK, "a block has at most BLOCK columns")
    _need(bias.shape[0] == columns and reach.shape[0] == rows, "bias, reach and block do not fit together")
    for i in range(rows):
        _need(0 <= reach[i] <= columns, "reach lies outside the block")
    return 0


def unsafe_arithmetic():
    """0 if the calling thread rounds to nearest and keeps subnormals; else 1 (rounding), 2 (flushing) or 3."""
    return unsafe_arithmetic_c()


def rows(str name, const double[:, :] s, const double[:, :] t, const double[::1] bias, const int64_t[::1] reach,
         const double[::1] hint, double scale, double[::1] weight, double[::1] error):
    """Add one block of columns to the row sums `weight` (sum of w) and `error` (sum of |w - t|)."""
    cdef const variant *v = _choose(name)
    cdef int64_t n = s.shape[0], columns = s.shape[1]
    _need(t.shape[0] == n and t.shape[1] == columns, "s and t differ in shape")
    _need(s.strides[1] == 8 and t.strides[1] == 8 and s.strides[0] == t.strides[0], "s and t differ in layout")
    _need(hint.shape[0] == n and weight.shape[0] == n and error.shape[0] == n, "one hint and two sums a row")
    _check_block(n, columns, bias, reach)
    if n and columns:
        with nogil:
            v.rows(&s[0, 0], &t[0, 0], s.strides[0] // 8, &bias[0], &reach[0], &hint[0], scale, n, &weight[0],
                   &error[0])


def normalisers(str name, const double[:, :] s, const double[::1] bias, const int64_t[::1] reach, double scale,
                double[::1] top, double[::1] total):
    """Fold one block of columns into the running log-sum-exp (top, total) of each row."""
    cdef const variant *v = _choose(name)
    cdef int64_t n = s.shape[0], columns = s.shape[1]
    _need(s.strides[1] == 8, "s is not contiguous along columns")
    _need(top.shape[0] == n and total.shape[0] == n, "one top and one total a row")
    _check_block(n, columns, bias, reach)
    if n and columns:
        with nogil:
            v.normalisers(&s[0, 0], s.strides[0] // 8, &bias[0], &reach[0], scale, n, &top[0], &total[0])


def spread(const double[:, :] s, const double[:, :] t, const double[::1] bias,
           const int64_t[::1] reach, double scale, double[::1] most, double[::1] least):
    """Fold the largest and smallest scale*s - t over one block's kept columns into `most` and `least`."""
    cdef int64_t n = s.shape[0], columns = s.shape[1]
    _need(t.shape[0] == n and t.shape[1] == columns, "s and t differ in shape")
    _need(s.strides[1] == 8 and t.strides[1] == 8 and s.strides[0] == t.strides[0], "s and t differ in layout")
    _need(most.shape[0] == n and least.shape[0] == n, "one most and one least a row")
    _check_block(n, columns, bias, reach)
    if n and columns:
        with nogil:
            spread_c(&s[0, 0], &t[0, 0], s.strides[0] // 8, &bias[0], &reach[0], scale, n, &most[0], &least[0])


def product(str name, const double[:, ::1] left, const double[:, :, ::1] packed, double[:, :] out):
    """out[:, :16*panels] = left times the packed right factor (panels, depth, 16), by plain loops."""
    cdef const variant *v = _choose(name)
    cdef int64_t n = left.shape[0], depth = left.shape[1], columns = packed.shape[0] * LANES
    _need(packed.shape[1] == depth and packed.shape[2] == LANES, "packed does not fit left")
    _need(out.shape[0] == n and out.shape[1] >= columns and out.strides[1] == 8, "out does not fit")
    if n and columns and depth:
        with nogil:
            v.product(&left[0, 0], &packed[0, 0, 0], n, columns, depth, &out[0, 0], out.strides[0] // 8)


def exponentials(str name, const double[::1] x, double[::1] y):
    """y = e^x, elementwise, by the proved kernel."""
    cdef const variant *v = _choose(name)
    _need(x.shape[0] == y.shape[0], "x and y differ in length")
    if x.shape[0]:
        with nogil:
            v.exponentials(&x[0], &y[0], x.shape[0])


def spot_faults(const double[:, ::1] left, const double[:, ::1] right, const double[:, :] out, uint64_t seed,
                int64_t count):
    """How many of `count` pseudo-random entries of `out` are no conventional product of left and right^T."""
    _need(left.shape[1] == right.shape[1] and out.strides[1] == 8, "the factors do not fit")
    _need(out.shape[0] == left.shape[0] and out.shape[1] == right.shape[0], "out does not fit the factors")
    if not left.shape[0] or not left.shape[1] or not right.shape[0]:
        return 0
    return spot_faults_c(&left[0, 0], &right[0, 0], left.shape[0], right.shape[0], left.shape[1], &out[0, 0],
                         out.strides[0] // 8, seed, count)
