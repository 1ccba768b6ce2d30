// The C ABI. Matrices are row-major with unit stride inside a row; strides are in elements. bf16 travels as uint16_t.
//
// Kernels exist once for each instruction set, as NAME_ISA (oct_linear_avx2, …). `oct_best_isa` names the best one that
// this machine runs.
#pragma once

#include <cstdint>

#define OCT_API extern "C" __attribute__((visibility("default")))

// Raised whenever a signature or a layout changes; the Python side checks it.
constexpr int kAbiVersion = 1;

OCT_API int oct_abi_version();
OCT_API const char* oct_best_isa();
OCT_API int oct_isa_supported(const char* isa);

// Sets the number of threads that kernels use, the caller included. With `pin`, thread i is bound to the i-th CPU that
// the caller may run on; the caller is thread 0.
OCT_API void oct_set_threads(int threads, int pin);
OCT_API int oct_threads();
