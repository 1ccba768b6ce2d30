// GGUF block formats to float32 or bf16. Layouts and arithmetic are those of the ggml format: the results equal
// gguf-py's bit for bit, for which a product and a sum must round separately (no fused multiply-add here).
#include "simd.h"

namespace octavo {
namespace {

constexpr int kSmallBlock = 32, kSuperBlock = 256;

OCT_INLINE uint32_t read16(const uint8_t* p) { return p[0] | p[1] << 8; }

OCT_INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// IEEE half: exponent and mantissa move up 13 bits and are rebiased; a subnormal is its mantissa times 2**-24.
OCT_INLINE float half(const uint8_t* p) {
    const uint32_t bits = read16(p), sign = (bits & 0x8000) << 16, exponent = bits & 0x7c00, rest = bits & 0x7fff;
    const float subnormal = static_cast<float>(rest) * 0x1p-24f;
    if (exponent == 0) return sign ? -subnormal : subnormal;
    const uint32_t bias = exponent == 0x7c00 ? 0x70000000u : 0x38000000u;
    return bits_to_float(sign | (bias + (rest << 13)));
}

OCT_INLINE void emit(float* out, float value) { *out = value; }
OCT_INLINE void emit(bf16* out, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    *out = static_cast<bf16>((bits & 0x7fffffff) > 0x7f800000 ? (bits | 0x400000) >> 16 : rounded);
}

// Each format: elements and bytes of a block, and how to write one out.
struct F16Format {
    static constexpr int elements = 1, bytes = 2;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        emit(out, half(p));
    }
};

struct BF16Format {
    static constexpr int elements = 1, bytes = 2;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        emit(out, bits_to_float(read16(p) << 16));
    }
};

struct Q4_0 {
    static constexpr int elements = kSmallBlock, bytes = 18;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p);
        for (int i = 0; i < 16; i++) emit(out + i, d * static_cast<float>((p[2 + i] & 15) - 8));
        for (int i = 0; i < 16; i++) emit(out + 16 + i, d * static_cast<float>((p[2 + i] >> 4) - 8));
    }
};

struct Q4_1 {
    static constexpr int elements = kSmallBlock, bytes = 20;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p), m = half(p + 2);
        for (int i = 0; i < 16; i++) emit(out + i, d * static_cast<float>(p[4 + i] & 15) + m);
        for (int i = 0; i < 16; i++) emit(out + 16 + i, d * static_cast<float>(p[4 + i] >> 4) + m);
    }
};

// The fifth bits of a block stand in one 32-bit word, element i's at bit i.
OCT_INLINE int five_bits(const uint8_t* low, uint32_t high, int i) {
    const int nibble = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
    return nibble | static_cast<int>(high >> i & 1) << 4;
}

struct Q5_0 {
    static constexpr int elements = kSmallBlock, bytes = 22;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p);
        const uint32_t high = read16(p + 2) | read16(p + 4) << 16;
        for (int i = 0; i < 32; i++) emit(out + i, d * static_cast<float>(five_bits(p + 6, high, i) - 16));
    }
};

struct Q5_1 {
    static constexpr int elements = kSmallBlock, bytes = 24;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p), m = half(p + 2);
        const uint32_t high = read16(p + 4) | read16(p + 6) << 16;
        for (int i = 0; i < 32; i++) emit(out + i, d * static_cast<float>(five_bits(p + 8, high, i)) + m);
    }
};

struct Q8_0 {
    static constexpr int elements = kSmallBlock, bytes = 34;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p);
        for (int i = 0; i < 32; i++) emit(out + i, d * static_cast<float>(static_cast<int8_t>(p[2 + i])));
    }
};

// Scale and minimum of each group of 32, six bits each, packed into twelve bytes.
OCT_INLINE void six_bit_scales(const uint8_t* p, int group, float d, float dmin, float& scale, float& minimum) {
    int s, m;
    if (group < 4) {
        s = p[group] & 63;
        m = p[group + 4] & 63;
    } else {
        s = (p[group + 4] & 15) | (p[group - 4] >> 2 & 48);
        m = p[group + 4] >> 4 | (p[group] >> 2 & 48);
    }
    scale = d * static_cast<float>(s);
    minimum = dmin * static_cast<float>(m);
}

struct Q4_K {
    static constexpr int elements = kSuperBlock, bytes = 144;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p), dmin = half(p + 2);
        for (int g = 0; g < 8; g++) {
            float scale, minimum;
            six_bit_scales(p + 4, g, d, dmin, scale, minimum);
            const uint8_t* low = p + 16 + g / 2 * 32;
            for (int i = 0; i < 32; i++)
                emit(out + 32 * g + i, scale * static_cast<float>(low[i] >> g % 2 * 4 & 15) - minimum);
        }
    }
};

struct Q5_K {
    static constexpr int elements = kSuperBlock, bytes = 176;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p), dmin = half(p + 2);
        const uint8_t* high = p + 16;
        for (int g = 0; g < 8; g++) {
            float scale, minimum;
            six_bit_scales(p + 4, g, d, dmin, scale, minimum);
            const uint8_t* low = p + 48 + g / 2 * 32;
            for (int i = 0; i < 32; i++) {
                const int q = (low[i] >> g % 2 * 4 & 15) | (high[i] >> g & 1) << 4;
                emit(out + 32 * g + i, scale * static_cast<float>(q) - minimum);
            }
        }
    }
};

struct Q6_K {
    static constexpr int elements = kSuperBlock, bytes = 210;
    template <class T>
    static OCT_INLINE void block(const uint8_t* p, T* out) {
        const float d = half(p + 208);
        for (int g = 0; g < 8; g++) {  // of 32; low bits: 64 bytes hold 128 elements, high bits: 32 bytes do
            const uint8_t *low = p + g / 4 * 64 + g % 2 * 32, *high = p + 128 + g / 4 * 32, *scales = p + 192 + 2 * g;
            for (int i = 0; i < 32; i++) {
                const int q = (low[i] >> g % 4 / 2 * 4 & 15) | (high[i] >> g % 4 * 2 & 3) << 4;
                const float scale = d * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
                emit(out + 32 * g + i, scale * static_cast<float>(q - 32));
            }
        }
    }
};

constexpr int64_t kElementsPerGrain = 65536;

template <class Format, class T>
int run(const uint8_t* data, int64_t bytes, T* out, int64_t elements) {
    const int64_t blocks = elements / Format::elements;
    if (blocks * Format::elements != elements || blocks * Format::bytes != bytes) return 1;
    parallel_for(blocks, kElementsPerGrain / Format::elements, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) Format::block(data + i * Format::bytes, out + i * Format::elements);
    });
    return 0;
}

template <class T>
int dequantize(int type, const uint8_t* data, int64_t bytes, T* out, int64_t elements) {
    switch (type) {  // ggml's numbers
        case 1:
            return run<F16Format>(data, bytes, out, elements);
        case 2:
            return run<Q4_0>(data, bytes, out, elements);
        case 3:
            return run<Q4_1>(data, bytes, out, elements);
        case 6:
            return run<Q5_0>(data, bytes, out, elements);
        case 7:
            return run<Q5_1>(data, bytes, out, elements);
        case 8:
            return run<Q8_0>(data, bytes, out, elements);
        case 12:
            return run<Q4_K>(data, bytes, out, elements);
        case 13:
            return run<Q5_K>(data, bytes, out, elements);
        case 14:
            return run<Q6_K>(data, bytes, out, elements);
        case 30:
            return run<BF16Format>(data, bytes, out, elements);
        default:
            return 1;
    }
}

}  // namespace
}  // namespace octavo

// Dequantizes whole blocks of a ggml type to `elements` of float32 or bf16. Returns 0, or 1, having written nothing,
// for an unknown type or when `bytes` is not the size of that many.
OCT_API int OCT_KERNEL(oct_dequantize)(int type, const uint8_t* data, int64_t bytes, void* out, int64_t elements,
                                       int float_output) {
    if (float_output) return octavo::dequantize(type, data, bytes, static_cast<float*>(out), elements);
    return octavo::dequantize(type, data, bytes, static_cast<uint16_t*>(out), elements);
}
