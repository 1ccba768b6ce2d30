// The choice of a token from float32 logits, and logprobs.
//
// A row's token is the argmax of softmax(logits / temperature) / noise, where noise is exponential and a pure function
// of the row's key and the token id (octavo.backends.reference.exponential_noise says how). The sum of the softmax
// changes nothing about the winner and is left out.
#include "simd.h"

namespace octavo {
namespace {

constexpr int64_t kMostLeaders = 256;  // sorted as they are found; a whole vocabulary above it stays unsorted
constexpr int64_t kChunk = 4096;  // tokens a task looks at: a row is shared by threads, in pieces that never change

struct Best {
    float value;
    int64_t index;
};

// The first index of the highest value; NaN never wins.
Best argmax(const float* values, int64_t n) {
    F16 highest = splat(-__builtin_inff());
    for_lanes(n, [&](int64_t i, auto get, auto) {
        if (i + kLanes <= n) highest = max(get(values + i), highest);
    });
    Best best{max_lane(highest), 0};
    for (int64_t i = n / kLanes * kLanes; i < n; i++) best.value = larger(best.value, values[i]);
    while (best.index < n - 1 && values[best.index] != best.value) best.index++;
    return best;
}

// Standard exponential variates for tokens `token` to `token + 15`: -log(1 - u) with u = (hash + 0.5) / 2**32.
OCT_INLINE F16 exponential(uint64_t key, int64_t token) {
    const HashBits hash = hash_high(key, static_cast<uint64_t>(token));
    const F16 unit = splat(0x1p-32f), half = splat(0.5f);
    const F16 u = (as_float(hash) + half) * unit;
    F16 power;
    const F16 mantissa = split_power((as_float(complement(hash)) + half) * unit, power);
    // Near 0, where races are won, 1 - u would lose digits of u.
    const F16 f = where_less(u, splat(0.25f), zeros() - u, mantissa - splat(1.0f));
    power = where_less(u, splat(0.25f), zeros(), power);
    return zeros() - fma(power, splat(0.69314718f), log1p_near_zero(f));
}

Best race(const float* logits, int64_t first, int64_t n, float highest, float temperature, uint64_t key) {
    alignas(64) float values[kChunk];
    const F16 divisor = splat(temperature), top = splat(highest / temperature);
    for_lanes(n, [&](int64_t i, auto get, auto put) {
        const F16 weight = exp(get(logits + i) / divisor - top);
        put(values + i, weight / exponential(key, first + i));
    });
    return argmax(values, n);
}

Best best_of(const Best* candidates, int64_t n) {
    Best best = candidates[0];
    for (int64_t i = 1; i < n; i++)
        if (candidates[i].value > best.value) best = candidates[i];
    return best;
}

void sample(const float* logits, int64_t stride, int64_t rows, int64_t vocab, const float* temperature,
            const uint64_t* keys, int64_t* tokens) {
    const int64_t chunks = ceil_div(vocab, kChunk);
    Best* candidates = new Best[rows * chunks];
    const auto for_chunks = [&](const auto& body) {
        parallel_for(rows * chunks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++) {
                const int64_t first = i % chunks * kChunk;
                candidates[i] = body(i / chunks, first, smaller(kChunk, vocab - first), candidates[i]);
            }
        });
    };
    for_chunks([&](int64_t r, int64_t first, int64_t n, Best) {
        Best best = argmax(logits + r * stride + first, n);
        best.index += first;
        return best;
    });
    bool racing = false;
    float* highest = new float[rows];
    for (int64_t r = 0; r < rows; r++) {
        const Best best = best_of(candidates + r * chunks, chunks);
        tokens[r] = best.index;
        highest[r] = best.value;
        racing = racing || temperature[r] != 0.0f;
    }
    if (racing) {
        for_chunks([&](int64_t r, int64_t first, int64_t n, Best before) {
            if (temperature[r] == 0.0f) return before;
            Best best = race(logits + r * stride + first, first, n, highest[r], temperature[r], keys[r]);
            best.index += first;
            return best;
        });
        for (int64_t r = 0; r < rows; r++)
            if (temperature[r] != 0.0f) tokens[r] = best_of(candidates + r * chunks, chunks).index;
    }
    delete[] highest;
    delete[] candidates;
}

void mask(float* row, int64_t vocab, const uint32_t* bits) {
    constexpr int64_t kBits = 32;
    const auto apply = [](float* values, uint32_t word, int64_t n) {
        for (int64_t i = 0; i < n; i++) values[i] = word >> i & 1 ? values[i] : -__builtin_inff();
    };
    const int64_t whole = vocab / kBits * kBits;
    for (int64_t i = 0; i < whole; i += kBits, bits++)
        if (*bits != 0xffffffffu) apply(row + i, *bits, kBits);
    if (whole < vocab) apply(row + whole, *bits, vocab - whole);
}

// Keeps the `top` best seen, best first; of equals the lower id, which comes first.
struct Leaders {
    float* values;
    int64_t* ids;
    int64_t top, count;

    bool wants(float value) const { return count < top || value > values[count - 1]; }
    void add(float value, int64_t id) {
        int64_t at = count < top ? count++ : count - 1;
        for (; at > 0 && values[at - 1] < value; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = value;
        ids[at] = id;
    }
};

void find_leaders(const float* logits, int64_t vocab, Leaders& leaders) {
    if (leaders.top == 0) return;
    for_lanes(vocab, [&](int64_t i, auto get, auto) {
        const bool full = leaders.count == leaders.top;
        if (full && greater_mask(get(logits + i), splat(leaders.values[leaders.top - 1])) == 0) return;
        for (int64_t j = i; j < smaller(i + kLanes, vocab); j++)
            if (leaders.wants(logits[j])) leaders.add(logits[j], j);
    });
}

float log_sum_exp(const float* logits, int64_t vocab) {
    const F16 highest = splat(argmax(logits, vocab).value);
    F16 total = zeros();
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes) total = total + exp(load(logits + i) - highest);
    float rest[kLanes] = {};
    if (i < vocab) store_some(rest, exp(load_some(logits + i, vocab - i) - highest), vocab - i);
    return __builtin_logf(sum(total + load(rest))) + max_lane(highest);
}

int64_t count_above(const float* logits, int64_t vocab, float value) {
    int64_t above = 0, i = 0;
    for (; i + kLanes <= vocab; i += kLanes) above += __builtin_popcount(greater_mask(load(logits + i), splat(value)));
    for (; i < vocab; i++) above += logits[i] > value;
    return above;
}

}  // namespace
}  // namespace octavo

// Sets to -inf, in each row rows[i] of `count` rows of logits, the tokens that the i-th row of `bits` does not allow:
// token t's is bit t % 32 of word t / 32.
OCT_API void OCT_KERNEL(oct_mask)(float* logits, int64_t stride, int64_t count, int64_t vocab, const int64_t* rows,
                                  const uint32_t* bits) {
    const int64_t words = octavo::ceil_div(vocab, 32);
    octavo::parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) octavo::mask(logits + rows[i] * stride, vocab, bits + i * words);
    });
}

// Penalties on `count` rows of logits: row rows[i] on the tokens at `starts[i]` and the `lengths[i] - 1` places after
// it, each in the output counts[place] times (octavo.backends.base.Penalties).
OCT_API void OCT_KERNEL(oct_penalize)(float* logits, int64_t stride, int64_t count, const int64_t* rows,
                                      const int64_t* starts, const int64_t* lengths, const float* repetition,
                                      const float* frequency, const float* presence, const int32_t* tokens,
                                      const float* counts) {
    octavo::parallel_for(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            float* row = logits + rows[i] * stride;
            for (int64_t at = starts[i]; at < starts[i] + lengths[i]; at++) {
                const float old = row[tokens[at]];
                const float repeated = old > 0.0f ? old / repetition[i] : old * repetition[i];
                const float often = repeated - frequency[i] * counts[at];
                row[tokens[at]] = often - presence[i] * static_cast<float>(counts[at] > 0.0f);
            }
        }
    });
}

// Token ids of `rows` rows of logits; temperature 0 takes the highest logit.
OCT_API void OCT_KERNEL(oct_sample)(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                    const float* temperature, const uint64_t* keys, int64_t* tokens) {
    octavo::sample(logits, stride, rows, vocab, temperature, keys, tokens);
}

// The noise itself, for tests.
OCT_API void OCT_KERNEL(oct_exponential_noise)(const uint64_t* keys, int64_t rows, int64_t vocab, float* noise) {
    using namespace octavo;
    for (int64_t r = 0; r < rows; r++)
        for_lanes(vocab, [&](int64_t i, auto, auto put) { put(noise + r * vocab + i, exponential(keys[r], i)); });
}

// For each row: logprob and rank (1 is best) of token_ids[row], and the `top` best logprobs with their ids: best first,
// but by id where `top` is a whole vocabulary of more than kMostLeaders.
OCT_API void OCT_KERNEL(oct_logprobs)(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                                      const int64_t* token_ids, float* chosen, int64_t* ranks, int64_t top,
                                      float* top_values, int64_t* top_ids) {
    using namespace octavo;
    parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* row = logits + r * stride;
            const float normalizer = log_sum_exp(row, vocab), value = row[token_ids[r]];
            chosen[r] = value - normalizer;
            ranks[r] = count_above(row, vocab, value) + 1;
            Leaders leaders{top_values + r * top, top_ids + r * top, top, 0};
            if (top == vocab && top > kMostLeaders) {
                for (int64_t i = 0; i < top; i++) leaders.values[i] = row[i], leaders.ids[i] = i;
            } else {
                find_leaders(row, vocab, leaders);
            }
            for (int64_t i = 0; i < top; i++) leaders.values[i] -= normalizer;
        }
    });
}
