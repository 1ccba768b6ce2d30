// How a paged KV cache lies in memory, and its 8-bit codes.
//
// A page of keys holds, for each kv head, panels of 16 tokens, laid out as a packed weight with tokens for columns:
// [head_dim / 2][16 tokens][2]. One of values has channels for columns: [8 token pairs][channels][2], channels padded
// to a multiple of 16. Both products of attention then are tiles of tile.h. Elements are bf16 or codes of one byte;
// where each token has scales of its own, they follow the page's panels, float [kv_heads][page_size].
#pragma once

#include "simd.h"

namespace octavo {
namespace {

constexpr int kMaxHeadDim = 256;
enum Format : int64_t { kBf16, kInt8, kE4m3, kE5m2 };

// Keys or values.
struct Pages {
    uint8_t* data;
    const float* fixed_scales;  // of each kv head; null where there are none
    int64_t kv_heads, panels_per_head, panel_bytes, page_bytes;

    uint8_t* panel(int64_t page, int64_t kv_head, int64_t index) const {
        return data + page * page_bytes + (kv_head * panels_per_head + index) * panel_bytes;
    }
    // Those of the sixteen tokens of a panel, in a page that has them.
    float* scales(int64_t page, int64_t kv_head, int64_t index) const {
        float* first = reinterpret_cast<float*>(data + page * page_bytes + kv_heads * panels_per_head * panel_bytes);
        return first + (kv_head * panels_per_head + index) * kLanes;
    }
    float fixed_scale(int64_t kv_head) const { return fixed_scales == nullptr ? 1.0f : fixed_scales[kv_head]; }
};

struct Cache {
    Pages keys, values;
    int64_t kv_heads, head_dim, page_size, format;
    bool scaled_tokens;

    explicit Cache(const OctavoKvCache& c)
        : kv_heads(c.kv_heads),
          head_dim(c.head_dim),
          page_size(c.page_size),
          format(c.format),
          scaled_tokens(c.format != kBf16 && c.key_scales == nullptr) {
        keys = pages(c.keys, c.key_scales, head_dim);
        values = pages(c.values, c.value_scales, padded_dim());
    }
    int64_t padded_dim() const { return ceil_div(head_dim, kLanes) * kLanes; }

  private:
    Pages pages(void* data, const float* fixed_scales, int64_t width) const {
        const int64_t panels = page_size / kLanes, panel_bytes = width * kLanes * (format == kBf16 ? 2 : 1);
        const int64_t scale_bytes = scaled_tokens ? kv_heads * page_size * int64_t{sizeof(float)} : 0;
        return {static_cast<uint8_t*>(data),
                fixed_scales,
                kv_heads,
                panels,
                panel_bytes,
                kv_heads * panels * panel_bytes + scale_bytes};
    }
};

OCT_INLINE uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Each code has
//   kLargest         the number it saturates at
//   kTwosComplement  how it holds negative numbers; else its top bit is a sign
//   kNan             what NaN and infinity become where they are stored by themselves
//   encode(x)        the code of x, rounded to nearest even, for |x| up to kLargest
//   decode(c)        its number as bf16, which is exact
//   magnitude(t)     of the code t from 0 to 127, as bf16
// in arithmetic that compilers turn into vectors.
//
// As bits of bf16, numbers rise along a line within a power of two, and ever flatter from one to the next: a few small
// ones are the least of as many lines.

struct Int8 {
    static constexpr float kLargest = 127.0f;
    static constexpr bool kTwosComplement = true;
    static constexpr uint8_t kNan = 0;  // never asked for: int8 always scales tokens

    // Adding 1.5 * 2**23 leaves the rounded integer in the low bits.
    static OCT_INLINE uint8_t encode(float x) { return static_cast<uint8_t>(float_bits(x + 12582912.0f)); }
    static OCT_INLINE bf16 decode(uint8_t code) {
        return static_cast<bf16>(float_bits(static_cast<float>(static_cast<int8_t>(code))) >> 16);
    }
    static constexpr bf16 magnitude(int t) {
        int bits = 0x3f00 + t * 0x80;
        for (int power = 1; power < 7; power++) bits = smaller(bits, 0x3f00 + power * 0x80 + (t * 0x80 >> power));
        return static_cast<bf16>(t == 0 ? 0 : bits);
    }
};

// A floating-point code: sign, exponent, MANTISSA bits; its smallest normal number is 2**MIN_EXPONENT.
template <int MANTISSA, int MIN_EXPONENT>
OCT_INLINE uint8_t encode_float(float x) {
    const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffff, sign = bits >> 31;
    constexpr int kShift = 23 - MANTISSA;
    constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 + MIN_EXPONENT) << 23;
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + (magnitude >> kShift & 1);
    const uint32_t normal = (rounded - kMinNormal + (1u << 23)) >> kShift;
    // The magic number's last bit is worth as much as the least subnormal.
    constexpr uint32_t kMagicBits = static_cast<uint32_t>(127 + MIN_EXPONENT + kShift) << 23;
    float magic, plain;
    memcpy(&magic, &kMagicBits, sizeof magic);
    memcpy(&plain, &magnitude, sizeof plain);
    const uint32_t subnormal = float_bits(plain + magic) - kMagicBits;
    return static_cast<uint8_t>((magnitude < kMinNormal ? subnormal : normal) | sign << 7);
}

struct E4m3 {
    static constexpr float kLargest = 448.0f;
    static constexpr bool kTwosComplement = false;
    static constexpr uint8_t kNan = 0x7f;

    static OCT_INLINE uint8_t encode(float x) { return encode_float<3, -6>(x); }
    static OCT_INLINE bf16 decode(uint8_t code) { return magnitude(code & 0x7f) | (code & 0x80) << 8; }
    static constexpr bf16 magnitude(int16_t t) {
        int16_t bits = smaller<int16_t>(0x3c00 + t * 0x10, 0x3b80 + t * 0x20);
        bits = smaller<int16_t>(bits, 0x3b00 + t * 0x40);
        bits = t == 1 ? 0x3b00 : t == 0 ? 0 : bits;
        return static_cast<bf16>(t == kNan ? 0x7fc0 : bits);
    }
};

struct E5m2 {
    static constexpr float kLargest = 57344.0f;
    static constexpr bool kTwosComplement = false;
    static constexpr uint8_t kNan = 0x7f;

    static OCT_INLINE uint8_t encode(float x) { return encode_float<2, -14>(x); }
    static OCT_INLINE bf16 decode(uint8_t code) { return magnitude(code & 0x7f) | (code & 0x80) << 8; }
    static constexpr bf16 magnitude(int16_t t) {
        int16_t bits = smaller<int16_t>(0x3800 + t * 0x20, 0x3780 + t * 0x40);
        bits = smaller<int16_t>(bits, 0x3700 + t * 0x80);
        bits = t == 0 ? 0 : bits;
        return static_cast<bf16>(t >= 0x7c ? 0x7000 | t << 5 : bits);  // infinity and NaN
    }
};

#if defined(OCT_LOOKUP)
template <class Code>
struct Magnitudes {
    uint8_t low[128], high[128];
    constexpr Magnitudes() : low(), high() {
        for (int t = 0; t < 128; t++) {
            low[t] = static_cast<uint8_t>(Code::magnitude(t));
            high[t] = static_cast<uint8_t>(Code::magnitude(t) >> 8);
        }
    }
};
#endif

// The numbers of n codes, a multiple of 64, as bf16.
template <class Code>
void decode(const uint8_t* codes, int64_t n, bf16* out) {
#if defined(OCT_LOOKUP)
    static constexpr Magnitudes<Code> kTable;
    const Lookup table = load_lookup(kTable.low, kTable.high);
    for (int64_t i = 0; i < n; i += 64) look_up(table, codes + i, Code::kTwosComplement, out + i);
#else
    for (int64_t i = 0; i < n; i++) out[i] = Code::decode(codes[i]);
#endif
}

// Calls body(code) with the code of a quantized `format`.
template <class Body>
OCT_INLINE void with_code(int64_t format, const Body& body) {
    if (format == kInt8)
        body(Int8{});
    else if (format == kE4m3)
        body(E4m3{});
    else
        body(E5m2{});
}

}  // namespace
}  // namespace octavo
