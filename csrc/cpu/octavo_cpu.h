// The C ABI. Matrices are row-major with unit stride inside a row; strides are in elements. bf16 travels as uint16_t.
//
// Kernels exist once for each instruction set, as NAME_ISA (oct_linear_avx2, …). `oct_best_isa` names the best one that
// this machine runs.
#pragma once

#include <cstdint>

#define OCT_API extern "C" __attribute__((visibility("default")))

// Raised whenever a signature or a layout changes; the Python side checks it.
constexpr int kAbiVersion = 4;

// A paged KV cache; kv_cache.h says how it lies in memory. page_size is a multiple of 16, head_dim one of 8, up to 256.
struct OctavoKvCache {
    void *keys, *values;
    // One a kv head, for codes that have no scales beside them; otherwise null.
    const float *key_scales, *value_scales;
    int64_t kv_heads, head_dim, page_size;
    int64_t format;  // 0 bf16, 1 int8, 2 fp8 e4m3, 3 fp8 e5m2
};

OCT_API int oct_abi_version();
OCT_API const char* oct_best_isa();
OCT_API int oct_isa_supported(const char* isa);

// Sets the number of threads that kernels use, the caller included. With `pin`, thread i is bound to the i-th CPU that
// the caller may run on; the caller is thread 0.
OCT_API void oct_set_threads(int threads, int pin);
OCT_API int oct_threads();
