/* What a weight sync computes of weights on a CPU: the checksum of `reshard.checksum` over rows of 64-bit words, which is
   the sum of row[r] * column[w] * word[r, w] modulo 2^64, and the elements that changed. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define GROUP_BYTES 16384 /* of rows that the first-level cache holds while they are counted and copied */

/* Elements of 1 to 8 bytes, at any address. */
typedef uint64_t word __attribute__((aligned(1), may_alias));

#if defined(__x86_64__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

FOR_EACH_CPU uint64_t count(const char *values, ptrdiff_t stride, size_t rows, size_t words, const uint64_t *row,
                            const uint64_t *column)
{
    uint64_t total = 0;
    for (size_t r = 0; r < rows; r++) {
        const word *value = (const word *)(values + (ptrdiff_t)r * stride);
        uint64_t dot = 0;
        for (size_t w = 0; w < words; w++)
            dot += value[w] * column[w];
        total += row[r] * dot;
    }
    return total;
}

/* Copy rows and return the checksum of the source: each group of rows is counted and then copied from the cache.
   Strides are in bytes. */
uint64_t copy_and_count(char *target, ptrdiff_t target_stride, const char *source, ptrdiff_t source_stride, size_t rows,
                        size_t words, const uint64_t *row, const uint64_t *column)
{
    const size_t bytes = 8 * words;
    const size_t group = bytes && bytes < GROUP_BYTES ? GROUP_BYTES / bytes : 1;
    const int is_dense = target_stride == (ptrdiff_t)bytes && source_stride == (ptrdiff_t)bytes;
    uint64_t total = 0;
    for (size_t first = 0; first < rows; first += group) {
        const size_t n = rows - first < group ? rows - first : group;
        char *to = target + (ptrdiff_t)first * target_stride;
        const char *from = source + (ptrdiff_t)first * source_stride;
        total += count(from, source_stride, n, words, row + first, column);
        if (is_dense)
            memcpy(to, from, n * bytes);
        else
            for (size_t r = 0; r < n; r++)
                memcpy(to + (ptrdiff_t)r * target_stride, from + (ptrdiff_t)r * source_stride, bytes);
    }
    return total;
}

/* Write the positions of elements that differ, as far as there is room for them; return how many differ. The write comes
   before the comparison: a branch would be mispredicted at most changes. */
#define DIFFERENCES(name, type)                                                                                        \
    size_t name(const type *after, const type *before, size_t elements, int64_t *positions, size_t room)               \
    {                                                                                                                  \
        size_t found = 0, i = 0;                                                                                       \
        for (; i < elements && found < room; i++) {                                                                    \
            positions[found] = (int64_t)i;                                                                             \
            found += after[i] != before[i];                                                                            \
        }                                                                                                              \
        for (; i < elements; i++)                                                                                      \
            found += after[i] != before[i];                                                                            \
        return found;                                                                                                  \
    }

DIFFERENCES(differences_1, uint8_t)
DIFFERENCES(differences_2, uint16_t)
DIFFERENCES(differences_4, uint32_t)
DIFFERENCES(differences_8, uint64_t)
