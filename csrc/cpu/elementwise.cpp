// Norms, rotary embedding, gated activations and the rows of an embedding.
#include "simd.h"

namespace octavo {
namespace {

// A range shorter than this many elements costs less than waking a thread for it.
constexpr int64_t kElementsPerGrain = 16384;

template <class Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
    parallel_for(rows, ceil_div(kElementsPerGrain, width), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) body(r);
    });
}

OCT_INLINE void norm_row(const bf16* x, const bf16* weight, bf16* out, int64_t width, float eps) {
    F16 squares = zeros();
    for_lanes(width, [&](int64_t i, auto get, auto) {
        const F16 value = get(x + i);
        squares = fma(value, value, squares);
    });
    const F16 factor = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps));
    for_lanes(width, [&](int64_t i, auto get, auto put) { put(out + i, get(x + i) * factor * get(weight + i)); });
}

OCT_INLINE void add_row(const bf16* x, bf16* residual, int64_t width) {
    for_lanes(width, [&](int64_t i, auto get, auto put) {
        put(residual + i, get(x + i) + get(static_cast<const bf16*>(residual + i)));
    });
}

// Rotates channels i and i + half of one head.
OCT_INLINE void rotate_head(bf16* x, const float* cosines, int64_t half) {
    const float* sines = cosines + half;
    for_lanes(half, [&](int64_t i, auto get, auto put) {
        const F16 a = get(static_cast<const bf16*>(x + i)), b = get(static_cast<const bf16*>(x + half + i));
        const F16 cosine = get(cosines + i), sine = get(sines + i);
        put(x + i, a * cosine - b * sine);
        put(x + half + i, b * cosine + a * sine);
    });
}

// 1 / (1 + exp(-x)), with an exponential that cannot overflow.
OCT_INLINE F16 sigmoid(F16 x) {
    const F16 e = exp(zeros() - max(x, zeros() - x)), one = splat(1.0f);
    return where_less(x, zeros(), e, one) / (one + e);
}
OCT_INLINE F16 silu(F16 x) { return x * sigmoid(x); }
// 0.5 x (1 + tanh(u)) is x sigmoid(2 u).
OCT_INLINE F16 gelu_tanh(F16 x) {
    const F16 u = fma(x * x * x, splat(0.044715f), x) * splat(0.7978845608f);
    return x * sigmoid(u + u);
}

template <F16 (*ACTIVATION)(F16)>
void gated(const bf16* gate_up, int64_t stride, bf16* out, int64_t rows, int64_t width) {
    for_rows(rows, width, [&](int64_t r) {
        const bf16* gate = gate_up + r * stride;
        bf16* to = out + r * width;
        for_lanes(width, [&](int64_t i, auto get, auto put) {
            put(to + i, ACTIVATION(get(gate + i)) * get(gate + width + i));
        });
    });
}

}  // namespace
}  // namespace octavo

// out = x / rms(x) * weight, rows of `width`.
OCT_API void OCT_KERNEL(oct_rms_norm)(const uint16_t* x, int64_t x_stride, const uint16_t* weight, uint16_t* out,
                                      int64_t rows, int64_t width, float eps) {
    octavo::for_rows(rows, width,
                     [&](int64_t r) { octavo::norm_row(x + r * x_stride, weight, out + r * width, width, eps); });
}

// residual += x; out = rms_norm(residual).
OCT_API void OCT_KERNEL(oct_add_rms_norm)(const uint16_t* x, uint16_t* residual, const uint16_t* weight, uint16_t* out,
                                          int64_t rows, int64_t width, float eps) {
    octavo::for_rows(rows, width, [&](int64_t r) {
        octavo::add_row(x + r * width, residual + r * width, width);
        octavo::norm_row(residual + r * width, weight, out + r * width, width, eps);
    });
}

// Rotates x [tokens, heads, head_dim] in place; table: rotary_dim / 2 cosines, then as many sines, for each position.
OCT_API void OCT_KERNEL(oct_rope)(uint16_t* x, int64_t x_stride, const int64_t* positions, const float* table,
                                  int64_t tokens, int64_t heads, int64_t head_dim, int64_t rotary_dim) {
    octavo::for_rows(tokens, heads * head_dim, [&](int64_t t) {
        for (int64_t h = 0; h < heads; h++)
            octavo::rotate_head(x + t * x_stride + h * head_dim, table + positions[t] * rotary_dim, rotary_dim / 2);
    });
}

// out [rows, width] = silu(gate) * up, or with the tanh form of gelu; gate_up [rows, 2 * width], gate first.
OCT_API void OCT_KERNEL(oct_gated_silu)(const uint16_t* gate_up, int64_t stride, uint16_t* out, int64_t rows,
                                        int64_t width) {
    octavo::gated<octavo::silu>(gate_up, stride, out, rows, width);
}
OCT_API void OCT_KERNEL(oct_gated_gelu_tanh)(const uint16_t* gate_up, int64_t stride, uint16_t* out, int64_t rows,
                                             int64_t width) {
    octavo::gated<octavo::gelu_tanh>(gate_up, stride, out, rows, width);
}

// out [rows, width] = rows of `table` [vocab, width] named by `ids`. Returns 0, or 1 for an id outside the table.
OCT_API int OCT_KERNEL(oct_embed)(const uint16_t* table, int64_t vocab, const int64_t* ids, uint16_t* out, int64_t rows,
                                  int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= vocab) return 1;
    octavo::for_rows(rows, width,
                     [&](int64_t r) { memcpy(out + r * width, table + ids[r] * width, width * sizeof(uint16_t)); });
    return 0;
}
