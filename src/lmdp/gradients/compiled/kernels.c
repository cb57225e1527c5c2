/* Inner loops of a private step on CPUs: per-example gradients with their norms, and sums with noise on a grid.
 *
 * `loops.h` and `grid.h` hold the loops. They are compiled for every width of a processor's vectors and for both types
 * of numbers: lmdp_linear_float_64 works on floats in vectors of 64 bytes. `__init__.py` calls those of the widest
 * vectors that the processor has.
 *
 * Nothing is checked here. That no loop leaves the memory behind its pointers has been checked before:
 *
 *     bounds.py, Walk      once per geometry: the offsets `start`, `pixel`, `row_from` and `row_to`, and how far runs
 *                          and rows reach from there, in the image and in its frame
 *     bounds.py, check_*   at every call: type, shape and order in memory of each tensor, that they fit the walk and
 *                          each other, and that blocks of examples follow each other from the first to the last; that
 *                          scratch memory is as large as the loops here say (`patches_room`, `linear_room`)
 *     __init__.py          when the library is loaded: that both sides mean the same structures
 *
 * `make sanitize` runs the tests of the loops under the compiler's sanitizers.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define FENCE() _mm_sfence()
#else
#define FENCE() (void)0
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* by what does not see numbers that are written past the cache */
#else
#define SANITIZED 0
#endif

#define STRIP 8  /* rows of a gradient that are worked on at once */
#define SHORT 64 /* positions that are added up one after the other, where rounding matters */

/* How pixels go over the positions of an example: in runs, and within a run `step` numbers further each time. */
typedef struct {
    int64_t runs, length, step;
    const int64_t *start; /* of every run, from where a pixel begins */
} Walk;

typedef struct {
    int64_t batch, outputs, pixels, positions;
    Walk walk;
    const int64_t *pixel;              /* where the pixel of each weight of an output begins in a frame */
    int64_t image, frame, rows, width; /* numbers of an image and of the frame around it; rows to copy, if any */
    const int64_t *row_from, *row_to;  /* where each row is in the image, and where it belongs in the frame */
    int64_t positions_last;            /* whether output gradients are [outputs, positions] */
    int64_t past_cache;                /* whether gradients are too many to stay in cache */
    int64_t threads, room;             /* room: numbers of scratch memory for each thread, or each example */
} Patches;

typedef struct {
    int64_t batch, positions, outputs, inputs, past_cache, threads, room;
} Linear;

typedef struct {
    int64_t count;
    double weight, deviation, step;
    int64_t room, threads; /* room: places that may be left unsure */
} OnGrid;

/* As in `grid.py`, which says why. */
#define ERROR 0x1p-41
#define LEAST 0x1p-22
#define RUN 1024 /* pairs that are worked on at once */

/* Sizes that the caller's structures must have. */
const int64_t lmdp_structures[] = {sizeof(Patches), sizeof(Linear), sizeof(OnGrid)};

#define JOINED(a, b, c) lmdp_##a##_##b##_##c
#define JOIN(a, b, c) JOINED(a, b, c)
#define NAME(what) JOIN(what, REAL, BYTES)

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define BYTES 64
#define VECTORS 2
#define STORE_PAST_CACHE(to, value) _mm512_stream_si512((void *)(to), (__m512i)(value))
#include "width.h"

#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#define VECTORS 1
#define STORE_PAST_CACHE(to, value) _mm256_stream_si256((void *)(to), (__m256i)(value))
#include "width.h"
#endif

#define TARGET
#define BYTES 16
#define VECTORS 1
#define STORE_PAST_CACHE(to, value) (*(to) = (value))
#include "width.h"

int64_t lmdp_vector_bytes(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return 64;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 32;
#endif
    return 16;
}
