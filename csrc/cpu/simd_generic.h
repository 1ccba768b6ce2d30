// simd.h in the compiler's vector extension, sixteen lanes wide, for any machine, Arm among them.
#pragma once

namespace octavo {
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t LongWords __attribute__((vector_size(128)));
typedef uint16_t Halves __attribute__((vector_size(32)));

template <class To, class From>
OCT_INLINE To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
template <class V, class T>
OCT_INLINE V read(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

struct F16 {
    Floats v;
};

OCT_INLINE F16 operator+(F16 a, F16 b) { return {a.v + b.v}; }
OCT_INLINE F16 operator-(F16 a, F16 b) { return {a.v - b.v}; }
OCT_INLINE F16 operator*(F16 a, F16 b) { return {a.v * b.v}; }
OCT_INLINE F16 operator/(F16 a, F16 b) { return {a.v / b.v}; }
OCT_INLINE F16 max(F16 a, F16 b) { return {a.v > b.v ? a.v : b.v}; }
OCT_INLINE F16 splat(float x) { return {x - Floats{}}; }
OCT_INLINE F16 zeros() { return {Floats{}}; }
OCT_INLINE F16 load(const float* p) { return {read<Floats>(p)}; }
OCT_INLINE void store(float* p, F16 x) { memcpy(p, &x.v, sizeof x.v); }

// Where the machine has no fused instruction this rounds twice: a library call for each lane would be far too slow.
OCT_INLINE F16 fma(F16 a, F16 b, F16 c) {
#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    OCT_UNROLL for (int i = 0; i < kLanes; i++) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return c;
#else
    return {a.v * b.v + c.v};
#endif
}

// Adding and taking away 1.5 * 2**23 rounds to an integer, for |x| under 2**22.
OCT_INLINE F16 round(F16 a) { return {(a.v + 12582912.0f) - 12582912.0f}; }

OCT_INLINE F16 load(const bf16* p) {
    return {same_bits<Floats>(__builtin_convertvector(read<Halves>(p), Words) << 16)};
}
OCT_INLINE void store(bf16* p, F16 x) {
    const Words bits = same_bits<Words>(x.v);
    const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
    const Words chosen = x.v == x.v ? rounded : bits | 0x400000;
    const Halves halves = __builtin_convertvector(chosen >> 16, Halves);
    memcpy(p, &halves, sizeof halves);
}

OCT_INLINE F16 scale_by_power(F16 a, F16 n) {
    return {a.v * same_bits<Floats>((__builtin_convertvector(n.v, Ints) + 127) << 23)};
}
OCT_INLINE F16 split_power(F16 a, F16& n) {
    const Ints bits = same_bits<Ints>(a.v), power = (bits - 0x3f3504f3) >> 23;
    n.v = __builtin_convertvector(power, Floats);
    return {same_bits<Floats>(bits - (power << 23))};
}
OCT_INLINE F16 where_less(F16 a, F16 b, F16 x, F16 y) { return {a.v < b.v ? x.v : y.v}; }
OCT_INLINE uint32_t greater_mask(F16 a, F16 b) {
    uint32_t mask = 0;
    for (int i = 0; i < kLanes; i++) mask |= static_cast<uint32_t>(a.v[i] > b.v[i]) << i;
    return mask;
}

OCT_INLINE float sum(F16 a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
    return a.v[0];
}
OCT_INLINE float max_lane(F16 a) {
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}

struct Pairs {
    F16 first, second;
};
OCT_INLINE Pairs widen(Words words) {
    return {{same_bits<Floats>(words << 16)}, {same_bits<Floats>(words & 0xffff0000)}};
}
OCT_INLINE Pairs load_pairs(const bf16* p) { return widen(read<Words>(p)); }
OCT_INLINE Pairs splat_pair(uint32_t word) { return widen(word - Words{}); }
OCT_INLINE F16 dot_pairs(F16 acc, Pairs a, Pairs b) { return fma(a.second, b.second, fma(a.first, b.first, acc)); }
#if defined(__aarch64__)
constexpr int kTileRows = 4;  // of 32 registers
#else
constexpr int kTileRows = 1;
#endif
constexpr int kTilePanels = 1, kLinearRows = kTileRows, kLinearPanels = 1;

struct HashBits {
    Words v;
};
OCT_INLINE HashBits hash_high(uint64_t key, uint64_t token) {
    LongWords x = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
    x = (x + token) * 0x9E3779B97F4A7C15u + key;
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDu;
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53u;
    return {__builtin_convertvector((x ^ x >> 33) >> 32, Words)};
}
OCT_INLINE HashBits complement(HashBits h) { return {~h.v}; }
OCT_INLINE F16 as_float(HashBits h) { return {__builtin_convertvector(h.v, Floats)}; }

}  // namespace
}  // namespace octavo
