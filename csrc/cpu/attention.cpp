// Attention over a paged cache, for decoding sequences and chunks of prompts in one call.
//
// A row is one query head of one token. Its keys are walked in blocks that start at multiples of 128 positions, with
// the online softmax of FlashAttention (arXiv:2205.14135); what a row does depends on its own position only, so its
// result is the same alone, in a batch and however the prompt was cut into chunks. Probabilities are rounded to bf16
// for the second product, and their sum is taken of the rounded ones.
//
// A block of codes is first turned into bf16, which is exact. Scales stay out of the products: a key's multiplies its
// score, a value's its probability, whose sum is then taken before; one that a kv head has for all tokens multiplies
// all scores, and the result.
#include "kv_cache.h"
#include "tile.h"

namespace octavo {
namespace {

constexpr int kRowsPerTask = 24;
constexpr int kPanelsPerBlock = 8;
constexpr int64_t kKeysPerBlock = kPanelsPerBlock * kLanes;
constexpr int64_t kLineBytes = 64;
constexpr float kMinusInfinity = -__builtin_inff();

struct Attention {
    Cache cache;
    const bf16* q;
    int64_t q_stride;
    bf16* out;
    int64_t out_stride;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t table_stride, sequences, heads;
    float scale;
    int64_t window;  // 0: none

    int64_t group() const { return heads / cache.kv_heads; }
};

// Some rows of one sequence and kv head, in the order of their positions, with their softmax so far.
struct Rows {
    int64_t count;
    const bf16* q[kRowsPerTask];
    int64_t first_key[kRowsPerTask], last_key[kRowsPerTask];
    float highest[kRowsPerTask], total[kRowsPerTask];
    alignas(64) float scores[kRowsPerTask][kKeysPerBlock];
    alignas(64) bf16 probs[kRowsPerTask][kKeysPerBlock];
    alignas(64) float sums[kRowsPerTask][kMaxHeadDim];
};

// The panels of one block of keys, of which those up to `last_key` are written. Those before `first_panel` no row sees:
// their pages may belong to others by now.
struct Block {
    int64_t first_key, last_key, first_panel, panels;
    const bf16* keys[kPanelsPerBlock];
    const bf16* values[kPanelsPerBlock];
    // Where tokens have scales of their own, those of the written keys; 0 after them.
    bool scaled;
    alignas(64) float key_scales[kKeysPerBlock];
    alignas(64) float value_scales[kKeysPerBlock];
};

// A block of codes as bf16.
struct Unpacked {
    alignas(64) bf16 keys[kKeysPerBlock * kMaxHeadDim];
    alignas(64) bf16 values[kKeysPerBlock * kMaxHeadDim];
};

template <int PANELS>
struct ScorePass {
    Rows& state;
    const Block& block;
    int64_t first_row, panel, pairs;

    template <int ROWS>
    OCT_INLINE void run(int64_t offset) const {
        const bf16* rows[ROWS];
        const bf16* panels[PANELS];
        F16 acc[ROWS][PANELS];
        OCT_UNROLL for (int p = 0; p < PANELS; p++) panels[p] = block.keys[panel + p];
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            rows[r] = state.q[first_row + offset + r];
            OCT_UNROLL for (int p = 0; p < PANELS; p++) acc[r][p] = zeros();
        }
        accumulate<ROWS, PANELS, false>(acc, rows, panels, pairs, 2 * kLanes);
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            OCT_UNROLL for (int p = 0; p < PANELS; p++) {
                store(state.scores[first_row + offset + r] + (panel + p) * kLanes, acc[r][p]);
            }
        }
    }
};

template <int PANELS>
struct ValuePass {
    Rows& state;
    const Block& block;
    int64_t first_row, channel, padded_dim, end_pair;

    template <int ROWS>
    OCT_INLINE void run(int64_t offset) const {
        F16 acc[ROWS][PANELS];
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            OCT_UNROLL for (int p = 0; p < PANELS; p++) {
                acc[r][p] = load(state.sums[first_row + offset + r] + channel + p * kLanes);
            }
        }
        for (int64_t panel = block.first_panel; panel * kLanes / 2 < end_pair; panel++) {
            const int64_t pair = panel * kLanes / 2;
            const bf16* rows[ROWS];
            const bf16* columns[PANELS];
            OCT_UNROLL for (int r = 0; r < ROWS; r++) rows[r] = state.probs[first_row + offset + r] + 2 * pair;
            OCT_UNROLL for (int p = 0; p < PANELS; p++) {
                columns[p] = block.values[panel] + 2 * (channel + p * kLanes);
            }
            accumulate<ROWS, PANELS, false>(acc, rows, columns, smaller<int64_t>(kLanes / 2, end_pair - pair),
                                            2 * padded_dim);
        }
        OCT_UNROLL for (int r = 0; r < ROWS; r++) {
            OCT_UNROLL for (int p = 0; p < PANELS; p++) {
                store(state.sums[first_row + offset + r] + channel + p * kLanes, acc[r][p]);
            }
        }
    }
};

void score(Rows& state, const Block& block, int64_t begin, int64_t end, int64_t pairs) {
    int64_t panel = block.first_panel;
    for (; panel + kTilePanels <= block.panels; panel += kTilePanels)
        for_row_tiles<kTileRows>(end - begin, ScorePass<kTilePanels>{state, block, begin, panel, pairs});
    for (; panel < block.panels; panel++)
        for_row_tiles<kTileRows>(end - begin, ScorePass<1>{state, block, begin, panel, pairs});
}

// Turns row r's scores into probabilities relative to the highest score so far, and rescales what it has summed.
void soften(Rows& state, const Block& block, int64_t r, float scale, int64_t padded_dim) {
    float* scores = state.scores[r];
    const int64_t width = block.panels * kLanes;
    if (block.scaled)
        for (int64_t i = block.first_panel * kLanes; i < width; i += kLanes)
            store(scores + i, load(scores + i) * load(block.key_scales + i));
    const int64_t begin = larger<int64_t>(state.first_key[r] - block.first_key, 0);
    const int64_t end = smaller(state.last_key[r] + 1 - block.first_key, width);
    for (int64_t i = block.first_panel * kLanes; i < begin; i++) scores[i] = kMinusInfinity;
    for (int64_t i = end; i < width; i++) scores[i] = kMinusInfinity;
    F16 highest = splat(kMinusInfinity);
    for (int64_t i = block.first_panel * kLanes; i < width; i += kLanes) highest = max(highest, load(scores + i));
    const float before = state.highest[r], now = larger(before, max_lane(highest) * scale);
    F16 total = zeros();
    for (int64_t i = block.first_panel * kLanes; i < width; i += kLanes) {
        const F16 p = exp(fma(load(scores + i), splat(scale), splat(-now)));
        store(state.probs[r] + i, block.scaled ? p * load(block.value_scales + i) : p);
        total = total + (block.scaled ? p : load(state.probs[r] + i));
    }
    if (now != before) {
        float shrink[kLanes];
        store(shrink, exp(splat(before - now)));
        state.highest[r] = now;
        state.total[r] *= shrink[0];
        for (int64_t i = 0; i < padded_dim; i += kLanes)
            store(state.sums[r] + i, load(state.sums[r] + i) * splat(shrink[0]));
    }
    state.total[r] += sum(total);
}

void add_values(Rows& state, const Block& block, int64_t begin, int64_t end, int64_t padded_dim) {
    const int64_t keys = smaller(state.last_key[end - 1] + 1 - block.first_key, block.panels * kLanes);
    const int64_t pairs = ceil_div(keys, 2);
    int64_t channel = 0;
    for (; channel + kTilePanels * kLanes <= padded_dim; channel += kTilePanels * kLanes)
        for_row_tiles<kTileRows>(end - begin, ValuePass<kTilePanels>{state, block, begin, channel, padded_dim, pairs});
    for (; channel < padded_dim; channel += kLanes)
        for_row_tiles<kTileRows>(end - begin, ValuePass<1>{state, block, begin, channel, padded_dim, pairs});
}

struct Place {
    int64_t page, index;  // of a panel, in its kv head's part of the page
};

Place find_panel(const Attention& call, int64_t sequence, int64_t key) {
    const int64_t page_size = call.cache.page_size;
    return {call.block_table[sequence * call.table_stride + key / page_size], key % page_size / kLanes};
}

// Unpacks panel p of a block of codes.
void unpack_panel(const Cache& cache, Place from, int64_t kv_head, int64_t p, Block& block, Unpacked& unpacked) {
    bf16 *keys = unpacked.keys + p * cache.keys.panel_bytes, *values = unpacked.values + p * cache.values.panel_bytes;
    with_code(cache.format, [&](auto code) {
        decode<decltype(code)>(cache.keys.panel(from.page, kv_head, from.index), cache.keys.panel_bytes, keys);
        decode<decltype(code)>(cache.values.panel(from.page, kv_head, from.index), cache.values.panel_bytes, values);
    });
    block.keys[p] = keys;
    block.values[p] = values;
    if (!block.scaled) return;
    const int64_t written = smaller<int64_t>(block.last_key + 1 - block.first_key - p * kLanes, kLanes);
    float *key_scales = block.key_scales + p * kLanes, *value_scales = block.value_scales + p * kLanes;
    memset(key_scales, 0, kLanes * sizeof(float));
    memset(value_scales, 0, kLanes * sizeof(float));
    memcpy(key_scales, cache.keys.scales(from.page, kv_head, from.index), written * sizeof(float));
    memcpy(value_scales, cache.values.scales(from.page, kv_head, from.index), written * sizeof(float));
}

// A page is a run of its own, too short for the machine to see it coming: without this, fp8 took 1.6 times as long on
// one core of an AMD EPYC (Zen 5), decoding over 1,024 tokens of SmolLM2-135M from memory.
OCT_INLINE void prefetch_panel(const Cache& cache, Place from, int64_t kv_head) {
    const uint8_t* keys = cache.keys.panel(from.page, kv_head, from.index);
    const uint8_t* values = cache.values.panel(from.page, kv_head, from.index);
    for (int64_t i = 0; i < cache.keys.panel_bytes; i += kLineBytes) {
        __builtin_prefetch(keys + i);
        __builtin_prefetch(values + i);
    }
    if (cache.scaled_tokens) {
        __builtin_prefetch(cache.keys.scales(from.page, kv_head, from.index));
        __builtin_prefetch(cache.values.scales(from.page, kv_head, from.index));
    }
}

// Fills the block that starts at `block.first_key`, but for what no row from `first_seen` on sees.
void find_block(const Attention& call, int64_t sequence, int64_t kv_head, int64_t first_seen, Block& block,
                Unpacked& unpacked) {
    const Cache& cache = call.cache;
    block.scaled = cache.scaled_tokens;
    block.panels = smaller<int64_t>(kPanelsPerBlock, ceil_div(block.last_key + 1 - block.first_key, kLanes));
    block.first_panel = larger<int64_t>(0, first_seen - block.first_key) / kLanes;
    for (int64_t p = block.first_panel; p < block.panels; p++) {
        const int64_t key = block.first_key + p * kLanes, ahead = key + kKeysPerBlock;
        const Place at = find_panel(call, sequence, key);
        if (cache.format == kBf16) {
            block.keys[p] = reinterpret_cast<const bf16*>(cache.keys.panel(at.page, kv_head, at.index));
            block.values[p] = reinterpret_cast<const bf16*>(cache.values.panel(at.page, kv_head, at.index));
            continue;
        }
        if (ahead <= block.last_key) prefetch_panel(cache, find_panel(call, sequence, ahead), kv_head);
        unpack_panel(cache, at, kv_head, p, block, unpacked);
    }
}

void start_rows(const Attention& call, Rows& state, int64_t sequence, int64_t kv_head, int64_t first_row) {
    const int64_t group = call.group(), first_token = call.query_start[sequence];
    const int64_t tokens = call.query_start[sequence + 1] - first_token;
    state.count = smaller<int64_t>(kRowsPerTask, tokens * group - first_row);
    for (int64_t r = 0; r < state.count; r++) {
        const int64_t token = (first_row + r) / group, head = kv_head * group + (first_row + r) % group;
        state.q[r] = call.q + (first_token + token) * call.q_stride + head * call.cache.head_dim;
        state.last_key[r] = call.seq_lens[sequence] - tokens + token;
        state.first_key[r] = call.window == 0 ? 0 : larger<int64_t>(0, state.last_key[r] + 1 - call.window);
        state.highest[r] = kMinusInfinity;
        state.total[r] = 0.0f;
        memset(state.sums[r], 0, call.cache.padded_dim() * sizeof(float));
    }
}

void finish_rows(const Attention& call, const Rows& state, int64_t sequence, int64_t kv_head, int64_t first_row) {
    const int64_t group = call.group(), dim = call.cache.head_dim;
    for (int64_t r = 0; r < state.count; r++) {
        const int64_t token = call.query_start[sequence] + (first_row + r) / group;
        const int64_t head = kv_head * group + (first_row + r) % group;
        bf16* out = call.out + token * call.out_stride + head * dim;
        const F16 factor = splat(call.cache.values.fixed_scale(kv_head) / state.total[r]);
        for_lanes(dim, [&](int64_t i, auto, auto put) { put(out + i, load(state.sums[r] + i) * factor); });
    }
}

void attend_rows(const Attention& call, int64_t sequence, int64_t kv_head, int64_t first_row) {
    Rows state;
    Block block;
    Unpacked unpacked;
    start_rows(call, state, sequence, kv_head, first_row);
    const int64_t padded_dim = call.cache.padded_dim();
    const float scale = call.scale * call.cache.keys.fixed_scale(kv_head);
    block.first_key = state.first_key[0] / kKeysPerBlock * kKeysPerBlock;
    block.last_key = state.last_key[state.count - 1];
    int64_t begin = 0, end = 0;  // rows that see something of the block; a row never meets one it sees nothing of
    for (; block.first_key <= block.last_key; block.first_key += kKeysPerBlock) {
        while (begin < state.count && state.last_key[begin] < block.first_key) begin++;
        while (end < state.count && state.first_key[end] < block.first_key + kKeysPerBlock) end++;
        find_block(call, sequence, kv_head, state.first_key[begin], block, unpacked);
        score(state, block, begin, end, call.cache.head_dim / 2);
        for (int64_t r = begin; r < end; r++) soften(state, block, r, scale, padded_dim);
        add_values(state, block, begin, end, padded_dim);
    }
    finish_rows(call, state, sequence, kv_head, first_row);
}

// A task is up to 24 rows of one sequence and kv head. `tasks_before` counts them, [sequences + 1].
int64_t count_tasks(const Attention& call, int64_t* tasks_before) {
    tasks_before[0] = 0;
    for (int64_t s = 0; s < call.sequences; s++) {
        const int64_t rows = (call.query_start[s + 1] - call.query_start[s]) * call.group();
        tasks_before[s + 1] = tasks_before[s] + ceil_div(rows, kRowsPerTask) * call.cache.kv_heads;
    }
    return tasks_before[call.sequences];
}

void run_task(const Attention& call, const int64_t* tasks_before, int64_t task) {
    int64_t low = 0, high = call.sequences - 1;  // the last sequence with tasks_before <= task
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (tasks_before[middle] <= task)
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t tiles = (tasks_before[low + 1] - tasks_before[low]) / call.cache.kv_heads;
    const int64_t index = task - tasks_before[low];
    attend_rows(call, low, index / tiles, index % tiles * kRowsPerTask);
}

void attention(const Attention& call) {
    constexpr int64_t kOnStack = 1024;
    int64_t on_stack[kOnStack + 1];
    int64_t* tasks_before = call.sequences <= kOnStack ? on_stack : new int64_t[call.sequences + 1];
    const int64_t tasks = count_tasks(call, tasks_before);
    // The last tiles of a prompt see the most keys; they go first, so that the threads end together.
    parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) run_task(call, tasks_before, tasks - 1 - task);
    });
    if (tasks_before != on_stack) delete[] tasks_before;
}

}  // namespace
}  // namespace octavo

// Causal attention of q [tokens, heads, head_dim] over the cache; `window` 0 means none.
OCT_API void OCT_KERNEL(oct_attention)(const uint16_t* q, int64_t q_stride, uint16_t* out, int64_t out_stride,
                                       const OctavoKvCache* cache, const int32_t* query_start, const int32_t* seq_lens,
                                       const int32_t* block_table, int64_t table_stride, int64_t sequences,
                                       int64_t heads, float scale, int64_t window) {
    octavo::attention({octavo::Cache(*cache), q, q_stride, out, out_stride, query_start, seq_lens, block_table,
                       table_stride, sequences, heads, scale, window});
}
