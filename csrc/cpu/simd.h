// Sixteen float lanes, whatever the machine: one 512-bit register, two of 256 or four of 128. Kernels are written once
// on top of this, and sums over lanes go in one order everywhere.
//
// Everything here is compiled once for each instruction set, so all of it is in an unnamed namespace, and kernels use
// no inline function of the standard library: the linker could pick the copy that another instruction set compiled.
#pragma once

#include <cstdint>
#include <cstring>

#include "octavo_cpu.h"
#include "pool.h"

#define OCT_JOIN_(a, b) a##_##b
#define OCT_JOIN(a, b) OCT_JOIN_(a, b)
// The name of an exported kernel of this instruction set.
#define OCT_KERNEL(name) OCT_JOIN(name, OCT_ISA)

#define OCT_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define OCT_UNROLL _Pragma("unroll")
#else
#define OCT_UNROLL _Pragma("GCC unroll 32")
#endif

namespace octavo {
namespace {

using bf16 = uint16_t;
constexpr int kLanes = 16;

OCT_INLINE float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// A pair of bf16 as one 32-bit word, as `Pairs` wants it.
OCT_INLINE uint32_t load_pair(const bf16* p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

template <class T>
constexpr OCT_INLINE T smaller(T a, T b) {
    return b < a ? b : a;
}
template <class T>
OCT_INLINE T larger(T a, T b) {
    return a < b ? b : a;
}
OCT_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
    run_parallel(
        count, grain,
        [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
        const_cast<Body*>(&body));
}

}  // namespace
}  // namespace octavo

// Each of these defines:
//   F16                 sixteen floats, with + - * / and
//   zeros() splat(x) load(const float*) store(float*, F16) load(const bf16*) store(bf16*, F16), rounding to nearest
//   even fma(a, b, c) = a * b + c, max(a, b), round(a) to nearest even scale_by_power(a, n): a * 2**n for integer n
//   from -126 to 127 split_power(a, n) for normal a > 0: m from sqrt(1/2) to sqrt(2) and integer n with a = m * 2**n
//   where_less(a, b, x, y): x where a < b, else y;  greater_mask(a, b): bit i set where a > b
//   sum(a), max_lane(a): over lanes, halves folded onto each other
//   Pairs               sixteen pairs of bf16: load_pairs(const bf16*), splat_pair(word)
//   dot_pairs(acc, a, b): acc + a.first * b.first + a.second * b.second in each lane
//   hash_high(key, token): the upper halves of sixteen 64-bit hashes, token to token + 15, as `HashBits`;
//   as_float(h), complement(h)
//   kTileRows, kTilePanels: how large a block of sums the registers hold; kLinearRows, kLinearPanels: the same for
//   linear layers, where more rows a pass over the weights are better
#if defined(OCT_ISA_avx512) || defined(OCT_ISA_avx512_bf16)
#include "simd_avx512.h"
#elif defined(OCT_ISA_avx2)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace octavo {
namespace {

OCT_INLINE F16 load_some(const float* p, int64_t n) {
    float buffer[kLanes] = {};
    memcpy(buffer, p, n * sizeof(float));
    return load(buffer);
}
OCT_INLINE F16 load_some(const bf16* p, int64_t n) {
    bf16 buffer[kLanes] = {};
    memcpy(buffer, p, n * sizeof(bf16));
    return load(buffer);
}
template <class T>
OCT_INLINE void store_some(T* p, F16 x, int64_t n) {
    T buffer[kLanes];
    store(buffer, x);
    memcpy(p, buffer, n * sizeof(T));
}

// Calls body(i, load16, store16) for each sixteen of n elements, the last maybe partial.
template <class Body>
OCT_INLINE void for_lanes(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, [](auto* p) { return load(p); }, [](auto* p, F16 x) { store(p, x); });
    if (i < n)
        body(i, [n, i](auto* p) { return load_some(p, n - i); }, [n, i](auto* p, F16 x) { store_some(p, x, n - i); });
}

// exp(x) to about 1 ulp for x up to 88; exactly 0 below -87.3, the normal range's end. Polynomial of Cephes' expf
// (S. Moshier).
OCT_INLINE F16 exp(F16 x) {
    const F16 lowest = splat(-87.33654f);
    const F16 clamped = max(x, lowest);
    const F16 n = round(clamped * splat(1.44269504f));
    F16 r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r + splat(1.0f));
    return where_less(x, lowest, zeros(), scale_by_power(p, n));
}

// log(1 + f) for f from sqrt(1/2) - 1 to sqrt(2) - 1, relative error about 1e-7. Polynomial of Cephes' logf.
OCT_INLINE F16 log1p_near_zero(F16 f) {
    F16 p = splat(7.0376836292e-2f);
    p = fma(p, f, splat(-1.1514610310e-1f));
    p = fma(p, f, splat(1.1676998740e-1f));
    p = fma(p, f, splat(-1.2420140846e-1f));
    p = fma(p, f, splat(1.4249322787e-1f));
    p = fma(p, f, splat(-1.6668057665e-1f));
    p = fma(p, f, splat(2.0000714765e-1f));
    p = fma(p, f, splat(-2.4999993993e-1f));
    p = fma(p, f, splat(3.3333331174e-1f));
    const F16 square = f * f;
    return f + fma(square, splat(-0.5f), p * f * square);
}

}  // namespace
}  // namespace octavo
