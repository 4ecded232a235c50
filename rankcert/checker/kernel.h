/* The compiled part of the trusted checker: exp, the row sums, a portable matrix product, spot checks, and the
 * guard against arithmetic the proofs do not cover. Proofs: PROOFS.md. No platform header is needed. */
#ifndef RANKCERT_KERNEL_H
#define RANKCERT_KERNEL_H

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) \
    || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "rankcert's checker must not be compiled with fast-math: its error bounds would be false"
#endif

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "rankcert's checker needs double arithmetic without excess precision (FLT_EVAL_METHOD == 0)"
#endif

#define LANES 16        /* columns added side by side */
#define BLOCK 2048      /* columns added in one go: at most BLOCK/LANES terms a lane */
#define PANEL_ROWS 2

/* exp: Cody-Waite reduction, then Taylor's polynomial. tests/proofs/exp_kernel.py reads these lines. */
#define EXP_LOG2E 0x1.71547652b82fep0
#define EXP_LN2HI 0x1.62e42fefa38p-1
#define EXP_LN2LO 0x1.ef35793c7673p-45
#define EXP_SHIFT 0x1.8p52
#define EXP_LOWEST (-708.0)
#define EXP_HIGHEST 700.0
#define EXP_C0 0x1p0
#define EXP_C1 0x1p0
#define EXP_C2 0x1p-1
#define EXP_C3 0x1.5555555555555p-3
#define EXP_C4 0x1.5555555555555p-5
#define EXP_C5 0x1.1111111111111p-7
#define EXP_C6 0x1.6c16c16c16c17p-10
#define EXP_C7 0x1.a01a01a01a01ap-13
#define EXP_C8 0x1.a01a01a01a01ap-16
#define EXP_C9 0x1.71de3a556c734p-19
#define EXP_C10 0x1.27e4fb7789f5cp-22
#define EXP_C11 0x1.ae64567f544e4p-26
#define EXP_C12 0x1.1eed8eff8d898p-29
#define EXP_C13 0x1.6124613a86d09p-33

#define HUGE_SUM 1e280      /* of one block's weights: far from overflow, whatever is added */
#define INFINITY_BITS 0x7ff0000000000000ull
#define MAGNITUDE_BITS 0x7fffffffffffffffull

struct variant {
    const char *name;
    void (*rows)(const double *, const double *, ptrdiff_t, const double *, const int64_t *, const double *, double,
                 int64_t, double *, double *);
    void (*normalisers)(const double *, ptrdiff_t, const double *, const int64_t *, double, int64_t, double *,
                        double *);
    void (*product)(const double *, const double *, int64_t, int64_t, int64_t, double *, ptrdiff_t);
    void (*exponentials)(const double *, double *, int64_t);
};

#if defined(__GNUC__)
#define HAVE_VECTORS 1
#define ALWAYS_INLINE __attribute__((always_inline)) static inline
#else
#define HAVE_VECTORS 0
#define ALWAYS_INLINE static inline
#endif

/* RANKCERT_NO_X86 leaves out every x86 variant, as on another architecture; RANKCERT_PLAIN_C all vectors too. */
#if HAVE_VECTORS && (defined(__x86_64__) || defined(__i386__)) && !defined(RANKCERT_NO_X86) \
    && !defined(RANKCERT_PLAIN_C)
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

#define W 1
#define SUFFIX _plain
#define TARGET
#define VARIANT_NAME "plain"
#include "kernel_lanes.h"

#if HAVE_VECTORS && !defined(RANKCERT_PLAIN_C)
#define W 2
#define SUFFIX _vector128
#define TARGET
#define VARIANT_NAME "vector128"
#include "kernel_lanes.h"
#endif

#if HAVE_X86
#define W 4
#define SUFFIX _avx2
#define TARGET __attribute__((target("avx2,fma")))
#define VARIANT_NAME "avx2"
#include "kernel_lanes.h"

#define W 8
#define SUFFIX _avx512
#define TARGET __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma")))
#define VARIANT_NAME "avx512"
#include "kernel_lanes.h"
#endif

/* The variants this processor can run, slowest first; returns how many. */
static int find_variants(const struct variant **found)
{
    int count = 0;
    found[count++] = &variant_plain;
#if HAVE_VECTORS && !defined(RANKCERT_PLAIN_C)
    found[count++] = &variant_vector128;
#endif
#if HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        found[count++] = &variant_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        found[count++] = &variant_avx512;
#endif
    return count;
}

/* 0 when this thread rounds to nearest and keeps subnormals; else 1 (rounding), 2 (flush), 3 (both). */
static int unsafe_arithmetic(void)
{
    volatile double one = 1.0, half = 0x1p-53, more = 0x1.8p-53, tiny = 0x1p-1060, big = 0x1p60, sum;
    int fault = 0;
    sum = one + half; /* a tie: stays 1 to nearest, rises upward */
    if (sum != 1.0) fault |= 1;
    sum = one + more; /* above the tie: rises to nearest, stays 1 downward and toward zero */
    if (sum == 1.0) fault |= 1;
    sum = -one - half; /* the same from the other side */
    if (sum != -1.0) fault |= 1;
    sum = -one - more;
    if (sum == -1.0) fault |= 1;
    sum = tiny * 0.5; /* flush to zero */
    if (sum == 0.0) fault |= 2;
    sum = tiny * big; /* denormals are zero */
    if (sum == 0.0) fault |= 2;
    return fault;
}

/* most[i], least[i] take in scale*s - t over this block's kept columns (bias > -inf) below reach[i].
 * A NaN ends up in both and stays there. */
static void spread(const double *s, const double *t, ptrdiff_t stride, const double *bias, const int64_t *reach,
                   double scale, int64_t rows, double *most, double *least)
{
    for (int64_t i = 0; i < rows; i++, s += stride, t += stride) {
        double high = most[i], low = least[i];
        for (int64_t c = 0; c < reach[i]; c++) {
            if (bias[c] == -INFINITY)
                continue;
            double x = s[c] * scale - t[c];
            high = x <= high || high != high ? high : x;
            low = x >= low || low != low ? low : x;
        }
        most[i] = high;
        least[i] = low;
    }
}

/* Pseudo-random index below `size` (splitmix64): spot checks need variety, not secrecy. */
static int64_t next_index(uint64_t *state, int64_t size)
{
    uint64_t x = (*state += 0x9e3779b97f4a7c15ull);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (int64_t)((x ^ (x >> 31)) % (uint64_t)size);
}

/* How many of `count` randomly placed entries of out (rows x columns) differ from a plain loop by more than two
 * conventional products of this depth ever can (PROOFS.md, Lemma 3). */
static int64_t spot_faults(const double *left, const double *right, int64_t rows, int64_t columns, int64_t depth,
                           const double *out, ptrdiff_t stride, uint64_t seed, int64_t count)
{
    int64_t faults = 0;
    for (; count > 0; count--) {
        int64_t i = next_index(&seed, rows), j = next_index(&seed, columns);
        const double *a = left + i * depth, *b = right + j * depth;
        double dot = 0.0, size = 0.0;
        for (int64_t l = 0; l < depth; l++) {
            dot += a[l] * b[l];
            size += fabs(a[l] * b[l]);
        }
        double slack = 2.0 * (double)(depth + 1) * DBL_EPSILON * size + (double)depth * 0x1p-1018;
        if (!(fabs(out[i * stride + j] - dot) <= slack))
            faults++;
    }
    return faults;
}

#endif
