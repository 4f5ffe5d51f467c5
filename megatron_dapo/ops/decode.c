/* What a decoding step of the embedded engine computes between its matrix products, on a CPU. Arithmetic is in float32,
   whatever the model's dtype. A row is a running response: its prompt is in a prefix slot, its own tokens in slot `row`
   of the responses. Compiled for one model: HEAD_DIM is its size of a head, which keeps short loops in registers, and
   BFLOAT16 is defined for weights of that type. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 64 /* vocabulary entries that are added up in float32 before they enter a sum in float64 */

#ifdef BFLOAT16
typedef uint16_t real;
INLINE float load(real value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
INLINE real round_to_real(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (real)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
typedef float real;
INLINE float load(real value) { return value; }
INLINE real round_to_real(float value) { return value; }
#endif

typedef struct {
    int64_t heads, kv_heads, response_slots, response_columns, prefix_slots, prefix_columns, vocabulary;
    int64_t stop_width;                           /* stop ids of a row, -1: none */
    float scale, epsilon;
    const float *cosines, *sines;                 /* [positions, head_dim / 2] */
    real *responses, *prefixes;                   /* [layers, 2, slots, kv_heads, columns, head_dim] */
    int64_t *token, *column;                      /* [slots], as are the next five */
    const int64_t *limit, *prefix_length, *seed, *prefix_slot;
    const float *temperature;
    const int64_t *stops;                         /* [slots, stop_width] */
    int64_t *tokens;                              /* [slots, response_columns] */
    float *logprobs;                              /* [slots, response_columns] */
    uint8_t *done;                                /* [slots] */
} Decoder;

/* e^x = 2^n e^r, |r| <= ln(2) / 2, to 2e-7 of its value; 0 below the normal numbers of float32, at most e^88. */
INLINE float exponential(float argument)
{
    const float x = argument < -87.0f ? -87.0f : argument > 88.0f ? 88.0f : argument;
    const float n = rintf(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return argument < -87.0f ? 0.0f : y * power;
}

INLINE float inverse_rms(const float *x, float epsilon)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < HEAD_DIM; i++)
        sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / HEAD_DIM + epsilon);
}

/* RMSNorm of rows [rows, width]. */
void normalize(const real *x, const real *weight, real *y, int64_t rows, int64_t width, float epsilon)
{
    for (int64_t row = 0; row < rows; row++, x += width, y += width) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++)
            sum += load(x[i]) * load(x[i]);
        const float factor = 1.0f / sqrtf(sum / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++)
            y[i] = round_to_real(load(weight[i]) * load(round_to_real(load(x[i]) * factor)));
    }
}

/* silu(gate) * up of rows [rows, 2 * width], which hold gate and then up. */
void gate(const real *gate_up, real *product, int64_t rows, int64_t width)
{
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * width, product += width)
        for (int64_t i = 0; i < width; i++) {
            const float x = load(gate_up[i]);
            product[i] = round_to_real(x / (1.0f + exponential(-x)) * load(gate_up[width + i]));
        }
}

/* A head, normalized if there is a weight, and turned to its position. */
INLINE void turn(const real *head, const real *weight, float epsilon, const float *cosine, const float *sine, float *to)
{
    float x[HEAD_DIM];
    const int64_t half = HEAD_DIM / 2;
    for (int64_t i = 0; i < HEAD_DIM; i++)
        x[i] = load(head[i]);
    if (weight) {
        const float factor = inverse_rms(x, epsilon);
        for (int64_t i = 0; i < HEAD_DIM; i++)
            x[i] = load(round_to_real(load(weight[i]) * load(round_to_real(x[i] * factor))));
    }
    for (int64_t i = 0; i < half; i++) {
        to[i] = x[i] * cosine[i] - x[half + i] * sine[i];
        to[half + i] = x[half + i] * cosine[i] + x[i] * sine[i];
    }
}

/* Eight lanes. A head is VECTORS of them, its last ones zero if HEAD_DIM is no multiple of eight. */
typedef float lanes __attribute__((vector_size(32)));
#define LANES 8
#define VECTORS ((HEAD_DIM + LANES - 1) / LANES)

INLINE lanes load_lanes(const real *from, int64_t vector)
{
    lanes result = {0};
    if ((vector + 1) * LANES > HEAD_DIM) {
        for (int64_t i = 0; vector * LANES + i < HEAD_DIM; i++)
            result[i] = load(from[vector * LANES + i]);
        return result;
    }
#ifdef BFLOAT16
    typedef uint16_t halves __attribute__((vector_size(16)));
    typedef uint32_t words __attribute__((vector_size(32)));
    halves stored;
    memcpy(&stored, from + vector * LANES, sizeof stored);
    return (lanes)(__builtin_convertvector(stored, words) << 16);
#else
    memcpy(&result, from + vector * LANES, sizeof result);
    return result;
#endif
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* The sums over the lanes of eight vectors. */
INLINE lanes sum_lanes(const lanes *x)
{
    lanes pairs[4], fours[2];
    for (int64_t i = 0; i < 4; i++)
        pairs[i] = SHUFFLE(x[2 * i], x[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13) +
                   SHUFFLE(x[2 * i], x[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    for (int64_t i = 0; i < 2; i++)
        fours[i] = SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   SHUFFLE(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           SHUFFLE(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* Scores of columns, eight at a time: one addition of lanes serves all of them. Keys have room for the last eight. */
INLINE void dot_columns(const lanes *query, const real *keys, int64_t columns, float *scores)
{
    for (int64_t column = 0; column < columns; column += LANES, keys += LANES * HEAD_DIM) {
        lanes sums[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            sums[i] = query[0] * load_lanes(keys + i * HEAD_DIM, 0);
            for (int64_t vector = 1; vector < VECTORS; vector++)
                sums[i] += query[vector] * load_lanes(keys + i * HEAD_DIM, vector);
        }
        const lanes result = sum_lanes(sums);
        memcpy(scores + column, &result, sizeof result);
    }
}

INLINE void add_columns(const float *weights, const real *values, int64_t columns, lanes *total)
{
    lanes even[VECTORS], odd[VECTORS] = {{0}};
    int64_t column = 0;
    memcpy(even, total, sizeof even);
    for (; column + 1 < columns; column += 2, values += 2 * HEAD_DIM)
        for (int64_t vector = 0; vector < VECTORS; vector++) {
            even[vector] += weights[column] * load_lanes(values, vector);
            odd[vector] += weights[column + 1] * load_lanes(values + HEAD_DIM, vector);
        }
    for (int64_t vector = 0; vector < VECTORS; vector++)
        total[vector] = even[vector] + odd[vector] +
                        (column < columns ? weights[column] * load_lanes(values, vector) : (lanes){0});
}

INLINE float greatest(const float *values, int64_t count)
{
    float most = -INFINITY;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++)
        most = values[i] > most ? values[i] : most;
    return most;
}

/* Replace values by e^(value - most); return their sum. */
INLINE float exponentials(float *values, int64_t count, float most)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        values[i] = exponential(values[i] - most);
        sum += values[i];
    }
    return sum;
}

/* Store the keys and values of one row's token and attend to all its columns. `qkv` holds the row's heads. */
INLINE void attend_row(const Decoder *d, int64_t layer, int64_t row, const real *qkv, const real *query_norm,
                       const real *key_norm, float *scores, real *output)
{
    const int64_t column = d->column[row], prompt = d->prefix_length[row], position = prompt + column;
    const int64_t repeats = d->heads / d->kv_heads, columns = d->response_columns;
    const int64_t values_after = d->response_slots * d->kv_heads * columns * HEAD_DIM;
    const int64_t prefix_values_after = d->prefix_slots * d->kv_heads * d->prefix_columns * HEAD_DIM;
    const float *cosine = d->cosines + position * (HEAD_DIM / 2), *sine = d->sines + position * (HEAD_DIM / 2);
    for (int64_t group = 0; group < d->kv_heads; group++) {
        const real *prefix = d->prefixes + 2 * layer * prefix_values_after +
                             (d->prefix_slot[row] * d->kv_heads + group) * d->prefix_columns * HEAD_DIM;
        real *response = d->responses + 2 * layer * values_after + (row * d->kv_heads + group) * columns * HEAD_DIM;
        const real *key = qkv + (d->heads + group) * HEAD_DIM;
        float turned[HEAD_DIM];
        turn(key, key_norm, d->epsilon, cosine, sine, turned);
        for (int64_t i = 0; i < HEAD_DIM; i++)
            response[column * HEAD_DIM + i] = round_to_real(turned[i]);
        memcpy(response + values_after + column * HEAD_DIM, key + d->kv_heads * HEAD_DIM, HEAD_DIM * sizeof(real));
        for (int64_t head = group * repeats; head < (group + 1) * repeats; head++) {
            turn(qkv + head * HEAD_DIM, query_norm, d->epsilon, cosine, sine, turned);
            lanes query[VECTORS] = {{0}}, total[VECTORS] = {{0}};
            for (int64_t i = 0; i < HEAD_DIM; i++)
                query[i / LANES][i % LANES] = turned[i] * d->scale;
            dot_columns(query, prefix, prompt, scores);
            dot_columns(query, response, column + 1, scores + prompt);
            const float sum = exponentials(scores, position + 1, greatest(scores, position + 1));
            add_columns(scores, prefix + prefix_values_after, prompt, total);
            add_columns(scores + prompt, response + values_after, column + 1, total);
            for (int64_t i = 0; i < HEAD_DIM; i++)
                output[head * HEAD_DIM + i] = round_to_real(total[i / LANES][i % LANES] / sum);
        }
    }
}

/* Attention of rows [first, last) of qkv [rows, heads + 2 kv_heads, head_dim]; the norms of heads may be null. */
void attend(const Decoder *d, int64_t layer, const real *qkv, const real *query_norm, const real *key_norm,
            float *scores, real *output, int64_t first, int64_t last)
{
    for (int64_t row = first; row < last; row++)
        attend_row(d, layer, row, qkv + row * (d->heads + 2 * d->kv_heads) * HEAD_DIM, query_norm, key_norm, scores,
                   output + row * d->heads * HEAD_DIM);
}

INLINE uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* `sampling.uniforms` */
INLINE double uniform(int64_t seed, int64_t position)
{
    return (double)(mix(mix((uint64_t)seed) + (uint64_t)(position + 1) * 0x9E3779B97F4A7C15u) >> 40) * 0x1p-24;
}

/* The first token whose cumulative mass exceeds share * total, of masses [count] added up by blocks. */
INLINE int64_t invert(const float *masses, int64_t count, double share, double *total)
{
    double blocks[(count + BLOCK - 1) / BLOCK];
    *total = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        float sum = 0;
        const int64_t end = start + BLOCK < count ? start + BLOCK : count;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = start; i < end; i++)
            sum += masses[i];
        *total += sum;
        blocks[start / BLOCK] = *total;
    }
    const double target = share * *total;
    int64_t block = 0, token = 0;
    while (blocks[block] <= target && (block + 1) * BLOCK < count)
        block++;
    double cumulative = block ? blocks[block - 1] : 0;
    for (int64_t i = block * BLOCK; i < count && i < (block + 1) * BLOCK && cumulative <= target; i++)
        if (masses[i] > 0) { /* rounding may leave the target above the last one */
            cumulative += masses[i];
            token = i;
        }
    return token;
}

/* Draw a token for each row from logits [rows, vocabulary], as `sampling.draw` without top-k and top-p, and append it.
   Return how many rows are done then; -1 if a log-probability is not finite. `masses` has room for the vocabulary. */
int64_t draw(const Decoder *d, const real *logits, float *masses, int64_t rows)
{
    int64_t num_done = 0;
    for (int64_t row = 0; row < rows; row++, logits += d->vocabulary) {
        const float temperature = d->temperature[row], factor = temperature > 0 ? temperature : 1.0f;
        for (int64_t i = 0; i < d->vocabulary; i++)
            masses[i] = load(logits[i]) / factor;
        const float most = greatest(masses, d->vocabulary);
        int64_t token = 0;
        while (token < d->vocabulary - 1 && masses[token] != most)
            token++;
        const int64_t column = d->column[row], likely = token;
        exponentials(masses, d->vocabulary, most);
        double total;
        token = invert(masses, d->vocabulary, uniform(d->seed[row], d->prefix_length[row] + column + 1), &total);
        if (!(temperature > 0))
            token = likely;
        const double logprob = (double)(load(logits[token]) / factor) - (double)most - log(total);
        if (!isfinite(logprob))
            return -1;
        d->tokens[row * d->response_columns + column] = d->token[row] = token;
        d->logprobs[row * d->response_columns + column] = (float)logprob;
        d->column[row] = column + 1;
        uint8_t done = column + 1 >= d->limit[row];
        for (int64_t i = 0; i < d->stop_width; i++)
            done |= d->stops[row * d->stop_width + i] == token;
        d->done[row] = done;
        num_done += done;
    }
    return num_done;
}
