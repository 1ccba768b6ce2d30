// y = x Wᵀ + bias for bf16, summed in float32. Each output is one sum over K from first to last, whatever the number of
// rows, threads or blocks, so that a row's result is the same alone and in any batch.
//
// A packed weight is panels of 16 output features, [ceil(N / 16)][ceil(K / 2)][16][2], padded with zeros.
#include "tile.h"

namespace octavo {
namespace {

// Beyond this many pairs of K a block of weights would leave the L2 cache before the next rows want it, and sums wait
// in memory between blocks.
constexpr int64_t kPairsPerBlock = 1024;
constexpr int64_t kRowsPerBlock = 96;
constexpr int64_t kPackedColumns = 2 * kLanes;

struct Linear {
    const bf16* x;
    int64_t x_stride, rows, in_features;
    const bf16* weight;
    const bf16* bias;
    int64_t out_features;
    void* y;
    int64_t y_stride;
    bool float_output;

    int64_t pairs() const { return ceil_div(in_features, 2); }
    int64_t panels() const { return ceil_div(out_features, kLanes); }
};

template <class T>
OCT_INLINE void store_panel(const Linear& call, int64_t row, int64_t column, F16 value) {
    const int64_t width = call.out_features - column;
    if (call.bias) value = value + (width >= kLanes ? load(call.bias + column) : load_some(call.bias + column, width));
    T* y = static_cast<T*>(call.y) + row * call.y_stride + column;
    if (width >= kLanes)
        store(y, value);
    else
        store_some(y, value, width);
}

// One pass of a row block over PANELS panels and some pairs of K.
template <int PANELS>
struct Pass {
    const Linear& call;
    int64_t first_row, panel, first_pair, last_pair;
    float (*sums)[kLinearPanels * kLanes];  // of the row block, between passes

    template <int ROWS>
    OCT_INLINE void run(int64_t offset) const {
        const bf16* rows[ROWS];
        const bf16* panels[PANELS];
        F16 acc[ROWS][PANELS];
        OCT_UNROLL for (int p = 0; p < PANELS; p++) {
            panels[p] = call.weight + ((panel + p) * call.pairs() + first_pair) * kPackedColumns;
        }
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            rows[r] = call.x + (first_row + offset + r) * call.x_stride + 2 * first_pair;
            OCT_UNROLL for (int p = 0; p < PANELS; p++) {
                acc[r][p] = first_pair == 0 ? zeros() : load(sums[offset + r] + p * kLanes);
            }
        }
        const int64_t whole_pairs = smaller(last_pair, call.in_features / 2) - first_pair;
        accumulate<ROWS, PANELS, true>(acc, rows, panels, whole_pairs, kPackedColumns);
        if (first_pair + whole_pairs < last_pair) add_odd_feature(acc, rows, panels, whole_pairs);
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            OCT_UNROLL for (int p = 0; p < PANELS; p++) finish(offset + r, p, acc[r][p]);
        }
    }

    // The last of an odd number of features has no partner; its partner's weight is zero.
    template <int ROWS>
    OCT_INLINE void add_odd_feature(F16 (&acc)[ROWS][PANELS], const bf16* const (&rows)[ROWS],
                                    const bf16* const (&panels)[PANELS], int64_t pair) const {
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            const Pairs a = splat_pair(rows[r][2 * pair]);
            OCT_UNROLL for (int p = 0; p < PANELS; p++) {
                acc[r][p] = dot_pairs(acc[r][p], a, load_pairs(panels[p] + pair * kPackedColumns));
            }
        }
    }

    OCT_INLINE void finish(int64_t offset, int p, F16 acc) const {
        if (last_pair < call.pairs())
            store(sums[offset] + p * kLanes, acc);
        else if (call.float_output)
            store_panel<float>(call, first_row + offset, (panel + p) * kLanes, acc);
        else
            store_panel<bf16>(call, first_row + offset, (panel + p) * kLanes, acc);
    }
};

template <int PANELS>
void row_block(const Linear& call, int64_t first_row, int64_t rows, int64_t panel) {
    float sums[kRowsPerBlock][kLinearPanels * kLanes];
    for (int64_t pair = 0; pair < call.pairs(); pair += kPairsPerBlock) {
        const int64_t last = smaller(pair + kPairsPerBlock, call.pairs());
        for_row_tiles<kLinearRows>(rows, Pass<PANELS>{call, first_row, panel, pair, last, sums});
    }
}

void panel_range(const Linear& call, int64_t first_row, int64_t rows, int64_t begin, int64_t end) {
    int64_t panel = begin;
    for (; panel + kLinearPanels <= end; panel += kLinearPanels) row_block<kLinearPanels>(call, first_row, rows, panel);
    if (kLinearPanels > 2 && panel + 2 == end)
        row_block<smaller(2, kLinearPanels)>(call, first_row, rows, panel);
    else if (panel < end)
        row_block<1>(call, first_row, rows, panel);
}

// Few rows: the weights are read once, and threads take runs of panels. Many: blocks of rows times groups of panels.
void linear(const Linear& call) {
    if (call.rows <= kRowsPerBlock) {
        parallel_for(call.panels(), kLinearPanels,
                     [&](int64_t begin, int64_t end) { panel_range(call, 0, call.rows, begin, end); });
        return;
    }
    const int64_t blocks = ceil_div(call.rows, kRowsPerBlock), groups = ceil_div(call.panels(), kLinearPanels);
    parallel_for(blocks * groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t first_row = call.rows * (i % blocks) / blocks;
            const int64_t last_row = call.rows * (i % blocks + 1) / blocks;
            const int64_t panel = i / blocks * kLinearPanels;
            panel_range(call, first_row, last_row - first_row, panel, smaller(panel + kLinearPanels, call.panels()));
        }
    });
}

void pack(const bf16* weight, int64_t stride, int64_t out_features, int64_t in_features, bf16* packed) {
    const int64_t pairs = ceil_div(in_features, 2);
    parallel_for(ceil_div(out_features, kLanes), 1, [&](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++) {
            bf16* to = packed + panel * pairs * kPackedColumns;
            memset(to, 0, pairs * kPackedColumns * sizeof(bf16));
            const int64_t columns = smaller<int64_t>(kLanes, out_features - panel * kLanes);
            const bf16* from = weight + panel * kLanes * stride;
            for (int64_t pair = 0; pair < in_features / 2; pair++)
                for (int64_t c = 0; c < columns; c++)
                    memcpy(to + pair * kPackedColumns + 2 * c, from + c * stride + 2 * pair, 2 * sizeof(bf16));
            if (in_features % 2 != 0)
                for (int64_t c = 0; c < columns; c++)
                    to[(pairs - 1) * kPackedColumns + 2 * c] = from[c * stride + in_features - 1];
        }
    });
}

}  // namespace
}  // namespace octavo

// Packs bf16 weight [N, K] into ceil(N / 16) * 16 * ceil(K / 2) * 2 elements, 64-byte aligned.
OCT_API void OCT_KERNEL(oct_pack_linear)(const uint16_t* weight, int64_t stride, int64_t out_features,
                                         int64_t in_features, uint16_t* packed) {
    octavo::pack(weight, stride, out_features, in_features, packed);
}

// y [rows, N] = x [rows, K] times the packed weight, plus bias [N] if not null; y is float32 or bf16.
OCT_API void OCT_KERNEL(oct_linear)(const uint16_t* x, int64_t x_stride, int64_t rows, const uint16_t* packed,
                                    const uint16_t* bias, int64_t out_features, int64_t in_features, void* y,
                                    int64_t y_stride, int float_output) {
    octavo::linear({x, x_stride, rows, in_features, packed, bias, out_features, y, y_stride, float_output != 0});
}
