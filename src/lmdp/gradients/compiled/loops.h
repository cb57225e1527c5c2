/* The loops for one type of numbers, REAL, and one width of vectors, BYTES.
 *
 * Every per-example gradient is a product over positions t:
 *
 *     gradient[k][o] = sum_t  factor_k(t) * panel[t][o]
 *
 * with a strip of STRIP rows k and a panel of PANEL columns o at a time, so that all sums stay in registers. Of a
 * convolution, factor_k reads the pixel that weight k multiplies, wherever it is in the image, so patches are never
 * written; columns are outputs. Of a linear layer, rows are outputs and columns are inputs.
 *
 * In shapes, `panels` is the number of columns by PANEL, and `strips` that of rows by STRIP, rounded up.
 */
#define LANES ((int64_t)(BYTES / sizeof(REAL)))
#define PANEL (VECTORS * LANES)

typedef REAL NAME(vector) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));

/* sum [STRIP, PANEL] of factor_k(t) * panel[t], over positions that come in runs. `panel` is [runs * length, PANEL]. */
static inline __attribute__((always_inline)) TARGET void NAME(products)(
    const int vectors, const REAL *const *from, const Walk *walk, const REAL *panel,
    NAME(vector) sum[STRIP][VECTORS]) {
    const int64_t runs = walk->runs, length = walk->length, step = walk->step;
    const REAL *factor[STRIP];
    for (int k = 0; k < STRIP; k++) {
        factor[k] = from[k];
        for (int v = 0; v < vectors; v++)
            sum[k][v] = (NAME(vector)){0};
    }
    for (int64_t run = 0; run < runs; run++)
        for (int64_t t = 0, at = walk->start[run]; t < length; t++, at += step, panel += PANEL) {
            NAME(vector) column[VECTORS]; /* [PANEL] */
            for (int v = 0; v < vectors; v++)
                column[v] = *(const NAME(vector) *)(panel + v * LANES);
            for (int k = 0; k < STRIP; k++)
                for (int v = 0; v < vectors; v++)
                    sum[k][v] += factor[k][at] * column[v];
        }
}

/* Writes `rows` rows of `columns` numbers, which are `stride` apart. */
static inline __attribute__((always_inline)) TARGET void NAME(write)(
    const int vectors, const NAME(vector) sum[STRIP][VECTORS], REAL *to, int64_t stride, int64_t rows, int64_t columns,
    int64_t past_cache) {
    const int whole = columns == vectors * LANES;
    const int past = past_cache && !SANITIZED && (uintptr_t)to % BYTES == 0 && stride % LANES == 0;
    for (int64_t k = 0; k < rows; k++, to += stride)
        for (int v = 0; v < vectors; v++) {
            NAME(vector) *place = (NAME(vector) *)(to + v * LANES);
            const int64_t left = columns - v * LANES;
            if (!whole && left > 0)
                memcpy(place, &sum[k][v], (left < LANES ? left : LANES) * sizeof(REAL));
            else if (!whole)
                break;
            else if (past)
                STORE_PAST_CACHE(place, sum[k][v]);
            else
                *place = sum[k][v];
        }
}

/* One block [rows, columns] of a gradient, written to `to`. Returns the sum of its squares. */
static inline __attribute__((always_inline)) TARGET double NAME(block_of)(
    const int vectors, const REAL *const *from, const Walk *walk, const REAL *panel, REAL *to, int64_t stride,
    int64_t rows, int64_t columns, int64_t past_cache) {
    NAME(vector) sum[STRIP][VECTORS], squares = {0}; /* [STRIP, PANEL], [LANES] */
    NAME(products)(vectors, from, walk, panel, sum);
    NAME(write)(vectors, sum, to, stride, rows, columns, past_cache);
    for (int64_t k = 0; k < rows; k++)
        for (int v = 0; v < vectors; v++)
            squares += sum[k][v] * sum[k][v];
    double total = 0;
    for (int lane = 0; lane < LANES; lane++)
        total += squares[lane];
    return total;
}

static TARGET double NAME(block)(const REAL *const *from, const Walk *walk, const REAL *panel, REAL *to,
                                 int64_t stride, int64_t rows, int64_t columns, int64_t past_cache) {
    if (columns <= LANES)
        return NAME(block_of)(1, from, walk, panel, to, stride, rows, columns, past_cache);
    return NAME(block_of)(VECTORS, from, walk, panel, to, stride, rows, columns, past_cache);
}

/* Columns of a matrix [positions, count], `width` at a time: [panels, positions, width], with zeros at the end. */
static inline __attribute__((always_inline)) TARGET void NAME(cut)(const REAL *from, int64_t positions, int64_t count,
                                                                   const int64_t width, REAL *to) {
    for (int64_t first = 0; first + width <= count; first += width)
        for (int64_t t = 0; t < positions; t++, to += width)
            memcpy(to, from + t * count + first, width * sizeof(REAL));
    const int64_t left = count % width;
    for (int64_t t = 0; t < positions && left; t++, to += width) {
        memcpy(to, from + t * count + count - left, left * sizeof(REAL));
        memset(to + left, 0, (width - left) * sizeof(REAL));
    }
}

/* The same of a matrix [count, positions], with `width` PANEL: [panels, positions, PANEL]. */
static TARGET void NAME(turn)(const REAL *from, int64_t positions, int64_t count, REAL *to) {
    for (int64_t first = 0; first < count; first += PANEL, to += positions * PANEL) {
        const int64_t columns = count - first < PANEL ? count - first : PANEL;
        for (int64_t begin = 0; begin < positions; begin += 16) {
            const int64_t end = positions < begin + 16 ? positions : begin + 16;
            for (int64_t o = 0; o < columns; o++)
                for (int64_t t = begin; t < end; t++)
                    to[t * PANEL + o] = from[(first + o) * positions + t];
            for (int64_t t = begin; t < end && columns < PANEL; t++)
                memset(to + t * PANEL + columns, 0, (PANEL - columns) * sizeof(REAL));
        }
    }
}

/* Sums [count] of the columns of panels [panels, positions, width]; of runs of positions first, so that rounding does
 * not grow with their number.
 */
static inline __attribute__((always_inline)) TARGET void NAME(column_sums)(const REAL *panel, const int64_t width,
                                                                           int64_t positions, int64_t count,
                                                                           REAL *to) {
    for (int64_t first = 0; first < count; first += width) {
        REAL total[PANEL > STRIP ? PANEL : STRIP] = {0}; /* [width] */
        for (int64_t begin = 0; begin < positions; begin += SHORT) {
            REAL part[PANEL > STRIP ? PANEL : STRIP] = {0}; /* [width] */
            for (int64_t t = begin; t < positions && t < begin + SHORT; t++, panel += width)
                for (int64_t o = 0; o < width; o++)
                    part[o] += panel[o];
            for (int64_t o = 0; o < width; o++)
                total[o] += part[o];
        }
        memcpy(to + first, total, (count - first < width ? count - first : width) * sizeof(REAL));
    }
}

/* An example's image, in its frame [frame], and its output gradient, in panels [panels, positions, PANEL] behind it.
 * Returns where the image is.
 */
static TARGET const REAL *NAME(prepare)(const Patches *p, const REAL *x, const REAL *g, REAL *frame) {
    for (int64_t row = 0; row < p->rows; row++)
        memcpy(frame + p->row_to[row], x + p->row_from[row], p->width * sizeof(REAL));
    if (p->positions_last)
        NAME(turn)(g, p->positions, p->outputs, frame + p->frame);
    else
        NAME(cut)(g, p->positions, p->outputs, PANEL, frame + p->frame);
    return p->rows ? frame : x;
}

/* Where the pixels [STRIP] from `first` on are in an image. Returns how many there are; rows beyond are ignored. */
static inline __attribute__((always_inline)) TARGET int64_t NAME(pixels_from)(const Patches *p, int64_t first,
                                                                              const REAL *image, const REAL **from) {
    const int64_t rows = p->pixels - first < STRIP ? p->pixels - first : STRIP;
    for (int64_t k = 0; k < STRIP; k++)
        from[k] = image + p->pixel[first + (k < rows ? k : 0)];
    return rows;
}

/* Weight gradient [pixels, outputs] of one example of a convolution. Returns its squared norm. */
static TARGET double NAME(patches_of_one)(const Patches *p, const REAL *x, const REAL *g, REAL *to, REAL *bias,
                                          REAL *room) {
    const REAL *image = NAME(prepare)(p, x, g, room);
    const REAL *panels = room + p->frame; /* [panels, positions, PANEL] */
    if (bias)
        NAME(column_sums)(panels, PANEL, p->positions, p->outputs, bias);
    double norm = 0;
    for (int64_t k = 0; k < p->pixels; k += STRIP) {
        const REAL *from[STRIP];
        const int64_t rows = NAME(pixels_from)(p, k, image, from);
        for (int64_t o = 0; o < p->outputs; o += PANEL) {
            const int64_t columns = p->outputs - o < PANEL ? p->outputs - o : PANEL;
            norm += NAME(block)(from, &p->walk, panels + o * p->positions, to + k * p->outputs + o, p->outputs, rows,
                                columns, p->past_cache);
        }
    }
    return norm;
}

/* Weight gradients [batch, pixels, outputs], bias gradients [batch, outputs] and squared norms [batch].
 *
 * `scratch` is [threads, room].
 */
void NAME(patches)(const Patches *p, const REAL *x, const REAL *g, REAL *out, REAL *bias, double *norms,
                   REAL *scratch) {
#pragma omp parallel num_threads(p->threads)
    {
        REAL *mine = scratch + omp_get_thread_num() * p->room;
        if (p->rows)
            memset(mine, 0, p->frame * sizeof(REAL));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->batch; i++)
            norms[i] =
                NAME(patches_of_one)(p, x + i * p->image, g + i * p->outputs * p->positions,
                                     out + i * p->pixels * p->outputs, bias ? bias + i * p->outputs : bias, mine);
        FENCE();
    }
}

/* Scratch memory of one example, in numbers: its frame, and panels [panels, positions, PANEL]. */
int64_t NAME(patches_room)(const Patches *p) {
    return p->frame + (p->outputs + PANEL - 1) / PANEL * PANEL * p->positions;
}

/* One block of both sums of a batch of gradients: every example's block is formed once, and added to both.
 *
 * In parts of SHORT positions, so that rounding does not grow with their number: the norms that clipped these gradients
 * are not those of the very same numbers.
 */
static TARGET void NAME(block_of_sums)(const Patches *p, const REAL *x, const REAL *scratch, const REAL *weights,
                                       int64_t k, int64_t o, REAL *out) {
    const int64_t columns = p->outputs - o < PANEL ? p->outputs - o : PANEL;
    const int64_t runs = p->walk.runs, length = p->walk.length;
    const int64_t runs_at_once = length < SHORT ? SHORT / length : 1;
    const int64_t next = p->rows ? p->room : p->image; /* from one example to the next */
    const REAL *panel = scratch + p->frame + o * p->positions; /* [positions, PANEL] of the first example */
    const REAL *pixel[STRIP];
    const int64_t rows = NAME(pixels_from)(p, k, p->rows ? scratch : x, pixel);
    NAME(vector) total[2][STRIP][VECTORS]; /* [2, STRIP, PANEL] */
    memset(total, 0, sizeof total);
    for (int64_t i = 0; i < p->batch; i++, panel += p->room)
        for (int64_t run = 0; run < runs; run += runs_at_once)
            for (int64_t t = 0; t < length; t += SHORT) {
                const Walk part = {runs - run < runs_at_once ? runs - run : runs_at_once,
                                   length - t < SHORT ? length - t : SHORT, p->walk.step, p->walk.start + run};
                const REAL *from[STRIP];
                for (int j = 0; j < STRIP; j++)
                    from[j] = pixel[j] + i * next + t * p->walk.step;
                NAME(vector) sum[STRIP][VECTORS]; /* [STRIP, PANEL] */
                NAME(products)(VECTORS, from, &part, panel + (run * length + t) * PANEL, sum);
                for (int s = 0; s < 2; s++)
                    for (int j = 0; j < STRIP; j++)
                        for (int v = 0; v < VECTORS; v++)
                            total[s][j][v] += weights[s * p->batch + i] * sum[j][v];
            }
    for (int s = 0; s < 2; s++)
        for (int64_t c = 0; c < columns; c++)
            for (int64_t j = 0; j < rows; j++)
                out[(s * p->outputs + o + c) * p->pixels + k + j] = total[s][j][c / LANES][c % LANES];
}

/* Two sums [2, outputs, pixels] of the weight gradients of a batch, under weights [2, batch].
 *
 * `scratch` is [batch, room].
 */
void NAME(patch_sums)(const Patches *p, const REAL *x, const REAL *g, const REAL *weights, REAL *out, REAL *scratch) {
    const int64_t blocks = (p->pixels + STRIP - 1) / STRIP, panels = (p->outputs + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(p->threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->batch; i++) {
            if (p->rows)
                memset(scratch + i * p->room, 0, p->frame * sizeof(REAL));
            NAME(prepare)(p, x + i * p->image, g + i * p->outputs * p->positions, scratch + i * p->room);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < blocks * panels; item++)
            NAME(block_of_sums)(p, x, scratch, weights, item % blocks * STRIP, item / blocks * PANEL, out);
    }
}

/* Weight gradient [outputs, inputs] of one example of a linear layer, and its squared norm. */
static TARGET double NAME(linear_of_one)(const Linear *p, const REAL *x, const REAL *g, REAL *to, REAL *bias,
                                         REAL *panels) {
    REAL *strips = panels + (p->inputs + PANEL - 1) / PANEL * PANEL * p->positions;
    NAME(cut)(x, p->positions, p->inputs, PANEL, panels);  /* [panels, positions, PANEL] */
    NAME(cut)(g, p->positions, p->outputs, STRIP, strips); /* [strips, positions, STRIP] */
    if (bias)
        NAME(column_sums)(strips, STRIP, p->positions, p->outputs, bias);
    const int64_t start = 0;
    const Walk walk = {1, p->positions, STRIP, &start};
    double norm = 0;
    for (int64_t first = 0; first < p->inputs; first += PANEL) {
        const int64_t columns = p->inputs - first < PANEL ? p->inputs - first : PANEL;
        for (int64_t o = 0; o < p->outputs; o += STRIP) {
            const int64_t rows = p->outputs - o < STRIP ? p->outputs - o : STRIP;
            const REAL *from[STRIP];
            for (int64_t j = 0; j < STRIP; j++)
                from[j] = strips + o * p->positions + j;
            norm += NAME(block)(from, &walk, panels + first * p->positions, to + o * p->inputs + first, p->inputs, rows,
                                columns, p->past_cache);
        }
    }
    return norm;
}

/* Weight gradients [batch, outputs, inputs], bias gradients [batch, outputs] and squared norms [batch].
 *
 * `scratch` is [threads, room].
 */
void NAME(linear)(const Linear *p, const REAL *x, const REAL *g, REAL *out, REAL *bias, double *norms, REAL *scratch) {
#pragma omp parallel num_threads(p->threads)
    {
        REAL *mine = scratch + omp_get_thread_num() * p->room;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p->batch; i++)
            norms[i] = NAME(linear_of_one)(p, x + i * p->positions * p->inputs, g + i * p->positions * p->outputs,
                                           out + i * p->outputs * p->inputs, bias ? bias + i * p->outputs : bias, mine);
        FENCE();
    }
}

/* Scratch memory of one example, in numbers: [panels, positions, PANEL] and [strips, positions, STRIP]. */
int64_t NAME(linear_room)(const Linear *p) {
    const int64_t columns = (p->inputs + PANEL - 1) / PANEL * PANEL, rows = (p->outputs + STRIP - 1) / STRIP * STRIP;
    return (columns + rows) * p->positions;
}

#undef LANES
#undef PANEL
