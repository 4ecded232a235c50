/* The checker's loops, written once and compiled once per vector width.
 *
 * The including file defines  W       doubles per vector: 1 (plain C), 2, 4 or 8
 *                             SUFFIX  appended to every name
 *                             TARGET  function attributes that choose the instruction set
 * Every variant adds in the same order: lane a of LANES takes the columns congruent to a, the lanes are then
 * added pairwise (PROOFS.md, Lemma 4). Only fused multiply-adds may differ, and the proofs allow either.
 */

#define GLUE2(a, b) a##b
#define GLUE1(a, b) GLUE2(a, b)
#define NAME(x) GLUE1(x, SUFFIX)
#define VEC NAME(vec)
#define BITS NAME(bits)
#define PARTS (LANES / W)

#if W == 1
typedef double VEC;
typedef uint64_t BITS;
static inline BITS NAME(as_bits)(VEC x) { BITS b; memcpy(&b, &x, sizeof b); return b; }
static inline VEC NAME(as_vec)(BITS b) { VEC x; memcpy(&x, &b, sizeof x); return x; }
#define AS_BITS(x) NAME(as_bits)(x)
#define AS_VEC(b) NAME(as_vec)(b)
#define WHERE(condition) ((condition) ? ~(uint64_t)0 : (uint64_t)0)
#define LOAD(p) (*(p))
#define STORE(p, x) (*(p) = (x))
#else
typedef double VEC __attribute__((vector_size(8 * W)));
typedef uint64_t BITS __attribute__((vector_size(8 * W)));
typedef double NAME(vec_at) __attribute__((vector_size(8 * W), aligned(8), may_alias));
#define AS_BITS(x) ((BITS)(x))
#define AS_VEC(b) ((VEC)(b))
#define WHERE(condition) ((BITS)(condition))
#define LOAD(p) ((VEC)*(const NAME(vec_at) *)(p))
#define STORE(p, x) (*(NAME(vec_at) *)(p) = (x))
#endif

/* e^x with relative error at most 2.5 * 2^-53 on [-708, 700]; 0 below, +inf above, NaN for NaN
 * (PROOFS.md, Theorem 1). The comparisons are written so that NaN takes neither branch. */
TARGET ALWAYS_INLINE VEC NAME(exp)(VEC x)
{
    VEC k = x * EXP_LOG2E + EXP_SHIFT;
    BITS scale = (AS_BITS(k) + 1023) << 52;
    k -= EXP_SHIFT;
    VEC r = (x - k * EXP_LN2HI) - k * EXP_LN2LO;
    VEC p = r * EXP_C13 + EXP_C12;
    p = p * r + EXP_C11;
    p = p * r + EXP_C10;
    p = p * r + EXP_C9;
    p = p * r + EXP_C8;
    p = p * r + EXP_C7;
    p = p * r + EXP_C6;
    p = p * r + EXP_C5;
    p = p * r + EXP_C4;
    p = p * r + EXP_C3;
    p = p * r + EXP_C2;
    p = p * r + EXP_C1;
    p = p * r + EXP_C0;
    BITS y = AS_BITS(p * AS_VEC(scale));
    BITS below = WHERE(x < EXP_LOWEST), above = WHERE(x > EXP_HIGHEST);
    y = (y & ~(below | above)) | (above & INFINITY_BITS);
    return AS_VEC(y);
}

TARGET ALWAYS_INLINE VEC NAME(magnitude)(VEC x) { return AS_VEC(AS_BITS(x) & MAGNITUDE_BITS); }

TARGET static double NAME(lane_sum)(const VEC *part)
{
    double lane[LANES];
    for (int v = 0; v < PARTS; v++)
        STORE(lane + v * W, part[v]);
    for (int half = LANES / 2; half; half /= 2)
        for (int a = 0; a < half; a++)
            lane[a] += lane[a + half];
    return lane[0];
}

/* One step of `rows`: the next LANES columns. */
TARGET ALWAYS_INLINE void NAME(row_step)(const double *s, const double *t, const double *bias, double scale,
                                         double hint, VEC *weight, VEC *error)
{
    for (int v = 0; v < PARTS; v++) {
        VEC z = LOAD(s + v * W) * scale + LOAD(bias + v * W);
        VEC w = NAME(exp)(z - hint);
        weight[v] += w;
        error[v] += NAME(magnitude)(w - LOAD(t + v * W));
    }
}

/* Add to weight[i] and error[i] the sums over this block's columns below reach[i] of w and |w - t|,
 * w = exp(scale*s + bias - hint). A masked column has bias -inf, hence w = 0 and adds |t|.
 * Invariant: after c columns, lane a holds the sum over the columns below c congruent to a modulo LANES. */
TARGET static void NAME(rows)(const double *s, const double *t, ptrdiff_t stride, const double *bias,
                              const int64_t *reach, const double *hint, double scale, int64_t rows,
                              double *weight, double *error)
{
    for (int64_t i = 0; i < rows; i++, s += stride, t += stride) {
        VEC w[PARTS] = {0}, e[PARTS] = {0};
        int64_t c = 0;
        for (; c + LANES <= reach[i]; c += LANES)
            NAME(row_step)(s + c, t + c, bias + c, scale, hint[i], w, e);
        if (c < reach[i]) {
            double tail_s[LANES] = {0}, tail_t[LANES] = {0}, tail_bias[LANES];
            for (int a = 0; a < LANES; a++) {
                int inside = c + a < reach[i];
                tail_s[a] = inside ? s[c + a] : 0.0;
                tail_t[a] = inside ? t[c + a] : 0.0;
                tail_bias[a] = inside ? bias[c + a] : -INFINITY;
            }
            NAME(row_step)(tail_s, tail_t, tail_bias, scale, hint[i], w, e);
        }
        weight[i] += NAME(lane_sum)(w);
        error[i] += NAME(lane_sum)(e);
    }
}

/* Running log-sum-exp: total[i] * e^top[i] becomes the sum of the weights seen so far. Its result is only ever
 * used as an untrusted hint. Any top that neither overflows nor loses the sum will do, so the first block's
 * largest logit serves until a later block overflows it. */
TARGET static void NAME(normalisers)(const double *s, ptrdiff_t stride, const double *bias, const int64_t *reach,
                                     double scale, int64_t rows, double *top, double *total)
{
    for (int64_t i = 0; i < rows; i++, s += stride) {
        int64_t whole = reach[i] - reach[i] % LANES, rest = reach[i] - whole;
        double tail_s[LANES] = {0}, tail_bias[LANES];
        for (int a = 0; a < LANES; a++) {
            tail_s[a] = a < rest ? s[whole + a] : 0.0;
            tail_bias[a] = a < rest ? bias[whole + a] : -INFINITY;
        }
        for (;;) {
            if (top[i] > -INFINITY) {
                VEC w[PARTS] = {0};
                for (int64_t c = 0; c < whole; c += LANES)
                    for (int v = 0; v < PARTS; v++)
                        w[v] += NAME(exp)(LOAD(s + c + v * W) * scale + LOAD(bias + c + v * W) - top[i]);
                for (int v = 0; v < PARTS; v++)
                    w[v] += NAME(exp)(LOAD(tail_s + v * W) * scale + LOAD(tail_bias + v * W) - top[i]);
                double sum = NAME(lane_sum)(w);
                if (sum < HUGE_SUM) {
                    total[i] += sum;
                    break;
                }
            }
            double best = -INFINITY;
            for (int64_t c = 0; c < reach[i]; c++) {
                double z = s[c] * scale + bias[c];
                best = z > best ? z : best;
            }
            if (!(best > top[i])) /* nothing kept here, or NaN */
                break;
            total[i] = top[i] == -INFINITY ? 0.0 : total[i] * exp_plain(top[i] - best);
            top[i] = best;
        }
    }
}

/* out (rows x columns, a multiple of LANES) = left (rows x depth) times the transpose of the packed right factor:
 * packed[panel][l][a] is entry l of row panel*LANES + a. Each product is formed once and added in the order of l. */
TARGET ALWAYS_INLINE void NAME(panel)(const double *left, const double *packed, int64_t depth, double *out,
                                      ptrdiff_t stride, const int rows)
{
    VEC sum[PANEL_ROWS][PARTS] = {0};
    for (int64_t l = 0; l < depth; l++, packed += LANES)
        for (int i = 0; i < rows; i++)
            for (int v = 0; v < PARTS; v++)
                sum[i][v] += LOAD(packed + v * W) * left[i * depth + l];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < PARTS; v++)
            STORE(out + i * stride + v * W, sum[i][v]);
}

TARGET static void NAME(product)(const double *left, const double *packed, int64_t rows, int64_t columns,
                                 int64_t depth, double *out, ptrdiff_t stride)
{
    for (int64_t c = 0; c < columns; c += LANES) {
        const double *panel = packed + c * depth;
        int64_t i = 0;
        for (; i + PANEL_ROWS <= rows; i += PANEL_ROWS)
            NAME(panel)(left + i * depth, panel, depth, out + i * stride + c, stride, PANEL_ROWS);
        for (; i < rows; i++)
            NAME(panel)(left + i * depth, panel, depth, out + i * stride + c, stride, 1);
    }
}

TARGET static void NAME(exponentials)(const double *x, double *y, int64_t count)
{
    for (int64_t c = 0; c < count; c += W) {
        double in[W], out[W];
        for (int a = 0; a < W; a++)
            in[a] = c + a < count ? x[c + a] : 0.0;
        STORE(out, NAME(exp)(LOAD(in)));
        for (int a = 0; a < W && c + a < count; a++)
            y[c + a] = out[a];
    }
}

static const struct variant NAME(variant) = {
    VARIANT_NAME, NAME(rows), NAME(normalisers), NAME(product), NAME(exponentials),
};

#undef GLUE2
#undef GLUE1
#undef NAME
#undef VEC
#undef BITS
#undef PARTS
#undef AS_BITS
#undef AS_VEC
#undef WHERE
#undef LOAD
#undef STORE
#undef W
#undef SUFFIX
#undef TARGET
#undef VARIANT_NAME
