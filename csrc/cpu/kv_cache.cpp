// Writing keys and values into a paged cache.
#include "kv_cache.h"

namespace octavo {
namespace {

// A vector whose largest number is below this is stored as zeros: 1 / scale would overflow.
constexpr float kSmallest = 1.0f / (1ull << 48) / (1ull << 48);

// What to multiply a vector by before it is rounded to codes, and what to multiply those by again.
struct Scale {
    float inverse, scale;
};

template <class Code>
Scale find_scale(const bf16* x, int64_t n) {
    uint16_t highest = 0;  // without its sign, bf16 is in the order of its bits; infinity and NaN above all
    for (int64_t i = 0; i < n; i++) highest = larger<uint16_t>(highest, x[i] & 0x7fff);
    if (highest >= 0x7f80) return {0.0f, __builtin_nanf("")};
    const float magnitude = to_float(highest);
    return {magnitude >= kSmallest ? Code::kLargest / magnitude : 0.0f, magnitude / Code::kLargest};
}

template <class Code>
void encode(const bf16* x, int64_t n, float inverse, uint8_t* out) {
    if (inverse == 0.0f) {
        memset(out, 0, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const float scaled = to_float(x[i]) * inverse;
        const float clamped = larger(smaller(scaled, Code::kLargest), -Code::kLargest);
        out[i] = (x[i] & 0x7fff) >= 0x7f80 ? Code::kNan : Code::encode(clamped);
    }
}

// The vector of one token and kv head among the tokens of its panel.
template <class T>
void place_key(uint8_t* panel, const T* k, int64_t head_dim, int64_t lane) {
    T* to = reinterpret_cast<T*>(panel) + 2 * lane;
    for (int64_t i = 0; i < head_dim / 2; i++) memcpy(to + i * 2 * kLanes, k + 2 * i, 2 * sizeof(T));
}

// Writing the first token of a pair clears its partner, unless that is written too: the last pair of a sequence is
// read whole, and whatever was left there (NaN, say) must not reach the sum as 0 * NaN.
template <class T>
void place_value(uint8_t* panel, const T* v, int64_t head_dim, int64_t padded_dim, int64_t lane, bool clear_partner) {
    T* to = reinterpret_cast<T*>(panel) + lane / 2 * 2 * padded_dim + lane % 2;
    for (int64_t i = 0; i < head_dim; i++) to[2 * i] = v[i];
    if (clear_partner)
        for (int64_t i = 0; i < head_dim; i++) to[2 * i + 1] = 0;
}

template <class Code>
void encode_into(const Cache& cache, const Pages& pages, const bf16* x, int64_t page, int64_t h, int64_t offset,
                 uint8_t* codes) {
    Scale scale = {1.0f / pages.fixed_scale(h), 0.0f};
    if (cache.scaled_tokens) {
        scale = find_scale<Code>(x, cache.head_dim);
        pages.scales(page, h, offset / kLanes)[offset % kLanes] = scale.scale;
    }
    encode<Code>(x, cache.head_dim, scale.inverse, codes);
}

void write_token(const Cache& cache, const bf16* k, const bf16* v, int64_t slot, bool clear_partner) {
    const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
    const int64_t index = offset / kLanes, lane = offset % kLanes, dim = cache.head_dim;
    for (int64_t h = 0; h < cache.kv_heads; h++, k += dim, v += dim) {
        uint8_t *keys = cache.keys.panel(page, h, index), *values = cache.values.panel(page, h, index);
        if (cache.format == kBf16) {
            place_key(keys, k, dim, lane);
            place_value(values, v, dim, cache.padded_dim(), lane, clear_partner);
            continue;
        }
        uint8_t codes[2][kMaxHeadDim];
        with_code(cache.format, [&](auto code) {
            encode_into<decltype(code)>(cache, cache.keys, k, page, h, offset, codes[0]);
            encode_into<decltype(code)>(cache, cache.values, v, page, h, offset, codes[1]);
        });
        place_key(keys, codes[0], dim, lane);
        place_value(values, codes[1], dim, cache.padded_dim(), lane, clear_partner);
    }
}

constexpr int64_t kElementsPerGrain = 16384;

void write_kv(const Cache& cache, const bf16* k, int64_t k_stride, const bf16* v, int64_t v_stride,
              const int64_t* slots, int64_t tokens) {
    const int64_t grain = ceil_div(kElementsPerGrain, cache.kv_heads * cache.head_dim);
    parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const bool partner_follows = t + 1 < tokens && slots[t + 1] == slots[t] + 1;
            const bool clear_partner = slots[t] % 2 == 0 && !partner_follows;
            write_token(cache, k + t * k_stride, v + t * v_stride, slots[t], clear_partner);
        }
    });
}

}  // namespace
}  // namespace octavo

// Writes k and v [tokens, kv_heads, head_dim] into `slots` of a cache; slot = page * page_size + offset. The rows of k
// and v may lie `k_stride` and `v_stride` apart.
OCT_API void OCT_KERNEL(oct_write_kv)(const uint16_t* k, int64_t k_stride, const uint16_t* v, int64_t v_stride,
                                      const OctavoKvCache* cache, const int64_t* slots, int64_t tokens) {
    octavo::write_kv(octavo::Cache(*cache), k, k_stride, v, v_stride, slots, tokens);
}
