// simd.h for AVX2 with FMA: two registers of eight.
#pragma once

#include <immintrin.h>

namespace octavo {
namespace {

struct F16 {
    __m256 a, b;
};

OCT_INLINE F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OCT_INLINE F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OCT_INLINE F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OCT_INLINE F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OCT_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
OCT_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OCT_INLINE F16 round(F16 x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
OCT_INLINE F16 zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OCT_INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
OCT_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OCT_INLINE void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}

OCT_INLINE __m256 load_eight(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
OCT_INLINE F16 load(const bf16* p) { return {load_eight(p), load_eight(p + 8)}; }

// The bf16 of each lane in the lower half of its 32 bits.
OCT_INLINE __m256i round_eight(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
OCT_INLINE void store(bf16* p, F16 x) {
    const __m256i packed = _mm256_packus_epi32(round_eight(x.a), round_eight(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

OCT_INLINE __m256 scale_eight(__m256 x, __m256 n) {
    const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}
OCT_INLINE F16 scale_by_power(F16 x, F16 n) { return {scale_eight(x.a, n.a), scale_eight(x.b, n.b)}; }

OCT_INLINE __m256 split_eight(__m256 x, __m256& n) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i power = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)), 23);
    n = _mm256_cvtepi32_ps(power);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(power, 23)));
}
OCT_INLINE F16 split_power(F16 x, F16& n) {
    const __m256 low = split_eight(x.a, n.a);
    return {low, split_eight(x.b, n.b)};
}

OCT_INLINE F16 where_less(F16 a, F16 b, F16 x, F16 y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
OCT_INLINE uint32_t greater_mask(F16 x, F16 y) {
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ));
    const int high = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
    return static_cast<uint32_t>(low | high << 8);
}

OCT_INLINE float sum(F16 x) {
    const __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
OCT_INLINE float max_lane(F16 x) {
    const __m256 b = _mm256_max_ps(x.a, x.b);
    __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    c = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

struct Pairs {
    F16 first, second;
};
OCT_INLINE Pairs widen(__m256i a, __m256i b) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))}};
}
OCT_INLINE Pairs load_pairs(const bf16* p) {
    const __m256i* words = reinterpret_cast<const __m256i*>(p);
    return widen(_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1));
}
OCT_INLINE Pairs splat_pair(uint32_t word) {
    const __m256i words = _mm256_set1_epi32(static_cast<int>(word));
    return widen(words, words);
}
OCT_INLINE F16 dot_pairs(F16 acc, Pairs x, Pairs y) { return fma(x.second, y.second, fma(x.first, y.first, acc)); }
constexpr int kTileRows = 4, kTilePanels = 1, kLinearRows = 4, kLinearPanels = 1;

struct HashBits {
    __m256i a, b;
};

OCT_INLINE __m256i multiply64(__m256i x, uint64_t factor) {
    const __m256i y = _mm256_set1_epi64x(static_cast<int64_t>(factor));
    const __m256i cross =
        _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), y), _mm256_mul_epu32(x, _mm256_srli_epi64(y, 32)));
    return _mm256_add_epi64(_mm256_mul_epu32(x, y), _mm256_slli_epi64(cross, 32));
}
OCT_INLINE __m256i hash_four(uint64_t key, uint64_t token) {
    const __m256i lane = _mm256_setr_epi64x(1, 2, 3, 4);
    const __m256i index = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(token)), lane);
    __m256i x = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(key)), multiply64(index, 0x9E3779B97F4A7C15u));
    x = multiply64(_mm256_xor_si256(x, _mm256_srli_epi64(x, 33)), 0xFF51AFD7ED558CCDu);
    x = multiply64(_mm256_xor_si256(x, _mm256_srli_epi64(x, 33)), 0xC4CEB9FE1A85EC53u);
    return _mm256_xor_si256(x, _mm256_srli_epi64(x, 33));
}
OCT_INLINE __m256i hash_eight(uint64_t key, uint64_t token) {
    const __m256 low = _mm256_castsi256_ps(hash_four(key, token));
    const __m256 high = _mm256_castsi256_ps(hash_four(key, token + 4));
    const __m256i upper = _mm256_castps_si256(_mm256_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1)));
    return _mm256_permute4x64_epi64(upper, _MM_SHUFFLE(3, 1, 2, 0));
}
OCT_INLINE HashBits hash_high(uint64_t key, uint64_t token) {
    return {hash_eight(key, token), hash_eight(key, token + 8)};
}
OCT_INLINE HashBits complement(HashBits h) {
    const __m256i ones = _mm256_set1_epi32(-1);
    return {_mm256_xor_si256(h.a, ones), _mm256_xor_si256(h.b, ones)};
}
// Both halves are exact, so the sum rounds once, as a conversion of unsigned numbers would.
OCT_INLINE __m256 unsigned_to_float(__m256i x) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low);
}
OCT_INLINE F16 as_float(HashBits h) { return {unsigned_to_float(h.a), unsigned_to_float(h.b)}; }

}  // namespace
}  // namespace octavo
