// The inner block of every matrix product here: a few rows of bf16 times a few panels of sixteen columns.
#pragma once

#include "simd.h"

namespace octavo {
namespace {

// acc[r][p] += rows[r] · panel p, over `pairs` pairs of the inner dimension, in order and one after the other: the sum
// of an output does not depend on how many rows and panels share the tile.
//
// A panel holds, for each pair, sixteen columns' two values together: 32 bf16, `pair_stride` apart.
template <int ROWS, int PANELS, bool PREFETCH>
OCT_INLINE void accumulate(F16 (&acc)[ROWS][PANELS], const bf16* const (&rows)[ROWS],
                           const bf16* const (&panels)[PANELS], int64_t pairs, int64_t pair_stride) {
    constexpr int64_t ahead = 2048 / sizeof(bf16);
    for (int64_t i = 0; i < pairs; i++) {
        Pairs w[PANELS];
        OCT_UNROLL for (int p = 0; p < PANELS; p++) {
            w[p] = load_pairs(panels[p] + i * pair_stride);
            if (PREFETCH) __builtin_prefetch(panels[p] + i * pair_stride + ahead);
        }
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            const Pairs a = splat_pair(load_pair(rows[r] + 2 * i));
            OCT_UNROLL for (int p = 0; p < PANELS; p++) acc[r][p] = dot_pairs(acc[r][p], a, w[p]);
        }
    }
}

// Calls body.template run<ROWS>(first) for tiles of at most LIMIT rows that cover `count`, as even as possible: a tile
// of two rows would wait for its few sums, where two of four do not.
template <int LIMIT>
struct RowTiles {
    template <class Body>
    static OCT_INLINE void call(int64_t rows, int64_t first, const Body& body) {
        if (rows == LIMIT)
            body.template run<LIMIT>(first);
        else
            RowTiles<LIMIT - 1>::call(rows, first, body);
    }
};
template <>
struct RowTiles<0> {
    template <class Body>
    static OCT_INLINE void call(int64_t, int64_t, const Body&) {}
};

template <int LIMIT, class Body>
OCT_INLINE void for_row_tiles(int64_t count, const Body& body) {
    const int64_t tiles = ceil_div(count, LIMIT);
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = count * t / tiles;
        RowTiles<LIMIT>::call(count * (t + 1) / tiles - first, first, body);
    }
}

}  // namespace
}  // namespace octavo
