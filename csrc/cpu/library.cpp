// What the library knows about itself and the machine.
#include "octavo_cpu.h"

#include <cstring>

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }  // these all have F16C
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() {
    return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif
bool always() { return true; }

struct Isa {
    const char* name;
    bool (*supported)();
};

// Best first.
constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512_bf16", has_avx512_bf16},
    {"avx512", has_avx512},
    {"avx2", has_avx2},
#endif
    {"generic", always},
};

}  // namespace

int oct_abi_version() { return kAbiVersion; }

const char* oct_best_isa() {
    for (const Isa& isa : kIsas)
        if (isa.supported()) return isa.name;
    return nullptr;
}

int oct_isa_supported(const char* name) {
    for (const Isa& isa : kIsas)
        if (std::strcmp(isa.name, name) == 0) return isa.supported();
    return 0;
}
