// simd.h for AVX-512 (F, BW, VL, DQ), with or without its bf16 dot product.
#pragma once

#include <immintrin.h>

namespace octavo {
namespace {

struct F16 {
    __m512 v;
};

OCT_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
OCT_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCT_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCT_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
OCT_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCT_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
OCT_INLINE F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OCT_INLINE F16 scale_by_power(F16 a, F16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
OCT_INLINE F16 zeros() { return {_mm512_setzero_ps()}; }
OCT_INLINE F16 splat(float x) { return {_mm512_set1_ps(x)}; }
OCT_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCT_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }

OCT_INLINE F16 load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

OCT_INLINE void store(bf16* p, F16 x) {
#if defined(__AVX512BF16__)
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(x.v);
#else
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

OCT_INLINE F16 split_power(F16 a, F16& n) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i power = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(0x3f3504f3)), 23);
    n.v = _mm512_cvtepi32_ps(power);
    return {_mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(power, 23)))};
}

OCT_INLINE F16 where_less(F16 a, F16 b, F16 x, F16 y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
OCT_INLINE uint32_t greater_mask(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }

OCT_INLINE float sum(F16 a) {
    __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
OCT_INLINE float max_lane(F16 a) {
    __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

#if defined(__AVX512BF16__)
struct Pairs {
    __m512i v;
};
OCT_INLINE Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
OCT_INLINE Pairs splat_pair(uint32_t word) { return {_mm512_set1_epi32(static_cast<int>(word))}; }
OCT_INLINE F16 dot_pairs(F16 acc, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
constexpr int kTileRows = 6, kTilePanels = 4, kLinearRows = 8, kLinearPanels = 3;
#else
struct Pairs {
    __m512 first, second;
};
OCT_INLINE Pairs widen(__m512i words) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
OCT_INLINE Pairs load_pairs(const bf16* p) { return widen(_mm512_loadu_si512(p)); }
OCT_INLINE Pairs splat_pair(uint32_t word) { return widen(_mm512_set1_epi32(static_cast<int>(word))); }
OCT_INLINE F16 dot_pairs(F16 acc, Pairs a, Pairs b) {
    return {_mm512_fmadd_ps(a.second, b.second, _mm512_fmadd_ps(a.first, b.first, acc.v))};
}
constexpr int kTileRows = 6, kTilePanels = 2, kLinearRows = 6, kLinearPanels = 2;
#endif

#if defined(__AVX512VBMI__)
#define OCT_LOOKUP
// A table of 128 bf16, as lower and upper bytes.
struct Lookup {
    __m512i low[2], high[2];
};
OCT_INLINE Lookup load_lookup(const uint8_t* low, const uint8_t* high) {
    return {{_mm512_loadu_si512(low), _mm512_loadu_si512(low + 64)},
            {_mm512_loadu_si512(high), _mm512_loadu_si512(high + 64)}};
}
// out[i] = the entry at the lower seven bits of codes[i], or at its absolute value, with its top bit for a sign.
OCT_INLINE void look_up(const Lookup& table, const uint8_t* codes, bool twos_complement, bf16* out) {
    // Bytes are interleaved within each 128 bits, so the eights of codes go where that puts them in order.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    const __m512i index = twos_complement ? _mm512_abs_epi8(code) : code;
    const __m512i low = _mm512_permutex2var_epi8(table.low[0], index, table.low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(table.high[0], index, table.high[1]);
    const __m512i high = _mm512_or_si512(magnitude, _mm512_and_si512(code, _mm512_set1_epi8(-128)));
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi8(low, high));
}
#endif

struct HashBits {
    __m512i v;
};

OCT_INLINE __m512i hash_eight(uint64_t key, uint64_t token) {
    const __m512i step = _mm512_set1_epi64(static_cast<int64_t>(0x9E3779B97F4A7C15u));
    const __m512i lane = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
    const __m512i index = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(token)), lane);
    __m512i x = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(key)), _mm512_mullo_epi64(index, step));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<int64_t>(0xFF51AFD7ED558CCDu)));
    x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
    x = _mm512_mullo_epi64(x, _mm512_set1_epi64(static_cast<int64_t>(0xC4CEB9FE1A85EC53u)));
    return _mm512_srli_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 33)), 32);
}

OCT_INLINE HashBits hash_high(uint64_t key, uint64_t token) {
    const __m256i low = _mm512_cvtepi64_epi32(hash_eight(key, token));
    const __m256i high = _mm512_cvtepi64_epi32(hash_eight(key, token + 8));
    return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
OCT_INLINE HashBits complement(HashBits h) { return {_mm512_xor_si512(h.v, _mm512_set1_epi32(-1))}; }
OCT_INLINE F16 as_float(HashBits h) { return {_mm512_cvtepu32_ps(h.v)}; }

}  // namespace
}  // namespace octavo
