/* Sums with normal noise, on a grid: the loops for one type of numbers, REAL, and one width of vectors, BYTES. */
/* A whole number from 0 to 2^63 - 1, rounded to double precision once: its halves are put into the last bits of 2^84
 * and 2^52. Vectors of 64 bytes have an instruction for it; in others, numbers would be converted one at a time.
 */
static inline __attribute__((always_inline)) TARGET double NAME(as_double)(uint64_t whole) {
#if BYTES == 64
    return (double)(int64_t)whole;
#else
    const uint64_t high = (whole >> 32) | 0x4530000000000000, low = (whole & 0xffffffff) | 0x4330000000000000;
    double h, l;
    memcpy(&h, &high, 8);
    memcpy(&l, &low, 8);
    return (h - (0x1p84 + 0x1p52)) + l;
#endif
}

/* log u of u in (0, 1], not subnormal: u = m 2^e with m in [√½, √2), and log m = 2 (s + s³/3 + s⁵/5 + …), |s| < 0.172;
 * what is left out is below 2^-50 of it. */
static inline __attribute__((always_inline)) TARGET double NAME(logarithm)(double u) {
    const uint64_t root_of_half = 0x3fe6a09e667f3bcd, bias = 1023ull << 52;
    uint64_t bits;
    double m;
    memcpy(&bits, &u, 8);
    const uint64_t exponent = (bits - root_of_half + bias) >> 52; /* e + 1023: vectors shift no signs */
    bits += bias - (exponent << 52);
    memcpy(&m, &bits, 8);
    const double s = (m - 1) / (m + 1), z = s * s;
    const double high = 1. / 13 + z * (1. / 15 + z * (1. / 17));
    const double tail = 1. / 3 + z * (1. / 5 + z * (1. / 7 + z * (1. / 9 + z * (1. / 11 + z * high))));
    return (NAME(as_double)(exponent) - 1023) * 0x1.62e42fefa39efp-1 + (2 * s + 2 * s * z * tail);
}

/* Sine and cosine of `turns` / 2^64 of a full circle, by their series: exact quarters and an angle up to π/4 either way. */
static inline __attribute__((always_inline)) TARGET void NAME(on_circle)(uint64_t turns, double *cosine, double *sine) {
    const uint64_t quarter = (turns + (1ull << 61)) >> 62, odd = -(quarter & 1);
    const double eighths = NAME(as_double)(turns - (quarter << 62) + (1ull << 61)) - 0x1p61; /* from -2^61 to 2^61 */
    const double x = eighths * 0x1.921fb54442d18p-62, z = x * x;
    const double s9 = 1. / 362880 - z * (1. / 39916800 - z * (1. / 6227020800 - z * (1. / 1307674368000)));
    const double s = x - x * z * (1. / 6 - z * (1. / 120 - z * (1. / 5040 - z * s9)));
    const double c12 = 1. / 479001600 - z * (1. / 87178291200);
    const double c = 1 - z * (1. / 2 - z * (1. / 24 - z * (1. / 720 - z * (1. / 40320 - z * (1. / 3628800 - z * c12)))));
    uint64_t bits_s, bits_c, first, second;
    memcpy(&bits_s, &s, 8);
    memcpy(&bits_c, &c, 8);
    first = ((bits_c & ~odd) | (bits_s & odd)) ^ ((quarter + 1) & 2) << 62;
    second = ((bits_s & ~odd) | (bits_c & odd)) ^ (quarter & 2) << 62;
    memcpy(cosine, &first, 8);
    memcpy(sine, &second, 8);
}

/* Normal numbers [pairs] each by the formula of Box and Muller, in double precision: cosines, and sines.
 *
 * Not a number where the uniform number behind them asks for more bits.
 */
static TARGET void NAME(normal)(const int64_t *restrict radii, const int64_t *restrict angles, int64_t pairs,
                                double deviation, double *restrict first, double *restrict second) {
    for (int64_t i = 0; i < pairs; i++) {
        const double u = (NAME(as_double)(radii[i] < 0 ? ~radii[i] : radii[i]) + 0.5) * 0x1p-63;
        const double radius = sqrt(-2 * NAME(logarithm)(u)) * deviation;
        const double sure = fabs(u - 0.5) <= 0.5 - LEAST ? radius : (double)NAN;
        double cosine, sine;
        NAME(on_circle)((uint64_t)angles[i], &cosine, &sine);
        first[i] = sure * cosine;
        second[i] = sure * sine;
    }
}

/* Sums [count] times `weight`, plus `normal`, rounded to whole numbers; those times `step`. Not a number where the
 * nearest whole number is not sure. Returns how many these are.
 */
static TARGET int64_t NAME(rounded)(const OnGrid *n, const double *restrict normal, const REAL *restrict sums,
                                    int64_t count, REAL *restrict out) {
    const double weight = n->weight, step = n->step, sure = 0.5 - n->deviation * ERROR;
    int64_t unsure = 0;
    for (int64_t i = 0; i < count; i++) {
        const double t = (double)sums[i] * weight + normal[i];
        const double nearest = (t + 0x1.8p52) - 0x1.8p52; /* of |t| < 2^51 */
        const int64_t doubt = fabs(t - nearest) + fabs(t) * 0x1p-47 < sure ? 0 : 1;
        out[i] = (REAL)(doubt ? (double)NAN : nearest * step);
        unsure += doubt;
    }
    return unsure;
}

/* Sums [count] with noise, on a grid.
 *
 * The first of each pair of normal numbers belongs to the first half of the sums, which has one more if `count` is odd.
 * `words` is [2, pairs]: radii, then angles.
 *
 * Where double precision does not tell which whole number is nearest, "not a number" is written, and the place to
 * `unsure` [room], if there is room left. Returns how many such places there are.
 */
int64_t NAME(on_grid)(const OnGrid *n, const int64_t *words, const REAL *sums, REAL *out, int64_t *unsure) {
    const int64_t pairs = (n->count + 1) / 2, runs = (pairs + RUN - 1) / RUN;
    int64_t total = 0;
#pragma omp parallel for num_threads(runs < 4 ? 1 : n->threads) schedule(static)
    for (int64_t run = 0; run < runs; run++) {
        double normal[2][RUN];
        const int64_t i = run * RUN, firsts = pairs - i < RUN ? pairs - i : RUN;
        NAME(normal)(words + i, words + pairs + i, firsts, n->deviation, normal[0], normal[1]);
        for (int half = 0; half < 2; half++) {
            const int64_t begin = half * pairs + i, left = n->count - begin, count = left < firsts ? left : firsts;
            int64_t doubts = NAME(rounded)(n, normal[half], sums + begin, count, out + begin);
            for (int64_t at = begin; doubts; at++)
                if (out[at] != out[at]) {
                    int64_t place;
#pragma omp atomic capture
                    place = total++;
                    if (place < n->room)
                        unsure[place] = at;
                    doubts--;
                }
        }
    }
    return total;
}
