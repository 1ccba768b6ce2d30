// Top-k, top-p and min-p over float32 logits, without sorting the vocabulary.
//
// Tokens are counted, and their probability added up, in buckets by how far they are below the best. Whole buckets are
// kept until one holds the place where a limit is reached; only that one is put in order.
#include "simd.h"

namespace octavo {
namespace {

constexpr int kBucketShift = 17;  // of a float's bits: buckets are 1/64 of a power of two wide
constexpr int64_t kBuckets = int64_t{1} << (32 - 1 - kBucketShift);

struct Candidate {
    float score;
    int64_t id;
};
OCT_INLINE bool better(Candidate a, Candidate b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

// A binary heap with the best on top.
struct Heap {
    Candidate* items;
    int64_t size = 0;

    void sink(int64_t at) {
        for (int64_t child; (child = 2 * at + 1) < size; at = child) {
            if (child + 1 < size && better(items[child + 1], items[child])) child++;
            if (!better(items[child], items[at])) return;
            const Candidate moved = items[at];
            items[at] = items[child];
            items[child] = moved;
        }
    }
    void build() {
        for (int64_t at = size / 2 - 1; at >= 0; at--) sink(at);
    }
    Candidate pop() {
        const Candidate top = items[0];
        items[0] = items[--size];
        sink(0);
        return top;
    }
};

// What a limit keeps: all better buckets, and of this one what is not worse than `last`.
struct Cut {
    int64_t bucket;
    Candidate last;
    double mass;  // kept, relative to the best token's
};

class Row {
  public:
    // Divides `scores` by the temperature in place.
    Row(float* scores, int64_t vocab, float temperature)
        : scores_(scores), vocab_(vocab), weights_(new float[vocab]), candidates_(new Candidate[vocab]) {
        F16 highest = splat(-__builtin_inff());
        for_lanes(vocab, [&](int64_t i, auto get, auto put) {
            put(scores + i, get(scores + i) / splat(temperature));
            if (i + kLanes <= vocab) highest = max(load(scores + i), highest);
        });
        best_ = max_lane(highest);
        for (int64_t i = vocab / kLanes * kLanes; i < vocab; i++) best_ = larger(best_, scores[i]);
        for_lanes(vocab,
                  [&](int64_t i, auto get, auto put) { put(weights_ + i, exp(get(scores + i) - splat(best_))); });
        memset(counts_, 0, sizeof counts_);
        memset(masses_, 0, sizeof masses_);
        for (int64_t i = 0; i < vocab; i++) {
            const int64_t b = bucket(i);
            counts_[b]++;
            masses_[b] += static_cast<double>(weights_[i]);
        }
    }
    ~Row() {
        delete[] weights_;
        delete[] candidates_;
    }
    Row(const Row&) = delete;
    Row& operator=(const Row&) = delete;

    // Keeps the best tokens while fewer than `count` and less than `mass` came before.
    Cut keep(int64_t count, double mass) const {
        Cut cut{0, {}, 0.0};
        int64_t kept = 0;
        for (; cut.bucket < kBuckets; cut.bucket++) {
            const int64_t b = cut.bucket;
            if (counts_[b] == 0) continue;
            if (kept + counts_[b] <= count && cut.mass + masses_[b] < mass) {
                kept += counts_[b];
                cut.mass += masses_[b];
                continue;
            }
            cut.last = {__builtin_inff(), -1};
            Heap heap = in_bucket(b);
            while (heap.size > 0 && kept < count && cut.mass < mass) {
                cut.last = heap.pop();
                cut.mass += static_cast<double>(weights_[cut.last.id]);
                kept++;
            }
            if (heap.size > 0) return cut;
        }
        return cut;
    }

    double mass() const {
        double total = 0.0;
        for (const double mass : masses_) total += mass;
        return total;
    }

    void drop(const Cut& cut, float min_p) {
        for (int64_t i = 0; i < vocab_; i++) {
            const int64_t b = bucket(i);
            const bool cut_off = b > cut.bucket || (b == cut.bucket && better(cut.last, {scores_[i], i}));
            if (cut_off || weights_[i] < min_p) scores_[i] = -__builtin_inff();
        }
    }

  private:
    int64_t bucket(int64_t i) const {
        const float distance = best_ - scores_[i] + 0.0f;  // 0 or more, never -0: its bits order as it does
        uint32_t bits;
        memcpy(&bits, &distance, sizeof bits);
        return smaller<int64_t>(bits >> kBucketShift, kBuckets - 1);
    }
    Heap in_bucket(int64_t b) const {
        Heap heap{candidates_};
        for (int64_t i = 0; i < vocab_; i++)
            if (bucket(i) == b) heap.items[heap.size++] = {scores_[i], i};
        heap.build();
        return heap;
    }

    float* scores_;
    int64_t vocab_;
    float* weights_;  // probability over the best token's
    Candidate* candidates_;
    float best_;
    int32_t counts_[kBuckets];
    double masses_[kBuckets];
};

void filter(float* logits, int64_t vocab, float temperature, int64_t top_k, float top_p, float min_p) {
    Row row(logits, vocab, temperature);
    const int64_t count = top_k > 0 ? top_k : vocab;
    Cut cut{kBuckets, {}, 0.0};
    if (count < vocab) cut = row.keep(count, __builtin_inf());
    if (top_p < 1.0f) cut = row.keep(count, static_cast<double>(top_p) * (count < vocab ? cut.mass : row.mass()));
    row.drop(cut, min_p);
}

}  // namespace
}  // namespace octavo

// Rows with a temperature and a filter (top_k > 0, top_p < 1 or min_p > 0) are divided by their temperature, which
// becomes 1, and lose (to -inf) what the filter drops: top-k first, top-p of what is left, then min-p.
OCT_API void OCT_KERNEL(oct_filter)(float* logits, int64_t stride, int64_t rows, int64_t vocab, float* temperature,
                                    const int32_t* top_k, const float* top_p, const float* min_p) {
    octavo::parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            if (temperature[r] == 0.0f || (top_k[r] <= 0 && top_p[r] >= 1.0f && min_p[r] <= 0.0f)) continue;
            octavo::filter(logits + r * stride, vocab, temperature[r], top_k[r], top_p[r], min_p[r]);
            temperature[r] = 1.0f;
        }
    });
}
