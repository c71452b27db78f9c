// The CPU's half of the C interface: picks the loops of this processor, cuts the work into ranges, one for each thread,
// and adds what they found. Sums that threads share are integers, so the number of threads is not in the result.

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <system_error>
#include <thread>
#include <vector>

#include "arithmetic.h"
#include "cpu_loops.h"
#include "segments.h"

namespace {

// A thread takes some 20 us to start, and waits for a core where torch's own threads still spin on all of them: below
// this many bytes for each it is not worth it (benchmarks/checksum_cost.py).
std::atomic<int64_t> bytes_per_thread{16 << 20};
// What is larger does not stay in a cache until somebody reads it, and is written past it.
constexpr int64_t kStreamBytes = 4 << 20;

Tables make_tables() {
  Tables tables = {};
  for (uint64_t k = 0; k < SPARE_BLOCK; ++k) {
    tables.checksum[k] = (splitmix64(SPARE_CHECKSUM_SEED + k) >> 32) | 1;
    tables.checksum32[k] = static_cast<uint32_t>(tables.checksum[k]);
    tables.checksum_twice[k] = tables.checksum[k] << 32 | tables.checksum[k];
    tables.checksum_below[k + 1] = tables.checksum_below[k] + tables.checksum[k];
    tables.digest[k] = splitmix64(SPARE_DIGEST_SEED + k);
  }
  return tables;
}

const Tables& tables() {
  static const Tables made = make_tables();
  return made;
}

int detected_level() {
#ifdef SPARE_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

std::atomic<int> limit{2};

int level() {
  static const int detected = detected_level();
  return std::min(detected, limit.load(std::memory_order_relaxed));
}

const Loops& loops() {
#ifdef SPARE_X86
  if (level() == 2) return spare_loops_avx512;
  if (level() == 1) return spare_loops_avx2;
#endif
  return spare_loops_plain;
}

// Round-to-nearest-even without flushing denormal numbers, whatever the calling thread had set.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { fesetenv(&saved_); }

 private:
  fenv_t saved_;
};

// work(thread, start, stop) over ranges of positions that hold whole blocks of the index space. When the system gives no
// more threads, the calling one does their ranges.
template <class Work>
void in_ranges(int64_t count, int64_t first_index, int64_t element_bytes, int threads, Work work) {
  const int64_t shift = first_index % SPARE_BLOCK, blocks = (shift + count + SPARE_BLOCK - 1) / SPARE_BLOCK;
  const int64_t useful = count * element_bytes / bytes_per_thread.load(std::memory_order_relaxed);
  const int64_t parts = std::max<int64_t>(1, std::min({static_cast<int64_t>(threads), useful, blocks}));
  auto begin = [&](int64_t part) {
    return std::min(count, std::max<int64_t>(0, blocks * part / parts * SPARE_BLOCK - shift));
  };
  auto run = [&](int64_t part) {
    DefaultArithmetic arithmetic;
    work(part, begin(part), begin(part + 1));
  };
  std::vector<std::thread> helpers;
  helpers.reserve(parts - 1);
  int64_t started = 1;
  for (; started < parts; ++started) {
    try {
      helpers.emplace_back(run, started);
    } catch (const std::system_error&) {
      break;
    }
  }
  run(0);
  for (int64_t part = started; part < parts; ++part) run(part);
  for (auto& helper : helpers) helper.join();
}

// Two sums of each thread, on a cache line of their own.
struct alignas(64) Sums {
  uint64_t of[2] = {0, 0};
};

void digest(const uint8_t* bytes, int64_t num_bytes, int64_t* sums, int threads) {
  std::vector<Sums> found(std::max(1, threads));
  const Loops& table = loops();
  const int64_t words = num_bytes / 8;
  in_ranges(words, 0, 8, threads, [&](int64_t part, int64_t start, int64_t stop) {
    table.digest(bytes, start, stop, tables(), found[part].of);
  });
  uint64_t total[2] = {0, 0};
  for (const Sums& one : found)
    for (int k = 0; k < 2; ++k) total[k] += one.of[k];
  if (num_bytes % 8) {
    uint64_t last = 0;
    memcpy(&last, bytes + 8 * words, num_bytes % 8);
    const uint64_t block = words / SPARE_BLOCK, k = words % SPARE_BLOCK;
    const uint64_t keyed = last + digest_factor(block) + tables().digest[k];
    total[0] += (keyed & 0xffffffffull) * (keyed >> 32);
    total[1] += checksum_factor(block) * tables().checksum[k] * last;
  }
  for (int k = 0; k < 2; ++k) sums[k] = static_cast<int64_t>(total[k]);
}

int64_t size_of(int type) { return type == SPARE_INT64 ? 8 : 4; }

}  // namespace

extern "C" {

int spare_kernels_version(void) { return SPARE_KERNELS_VERSION; }

int spare_cpu_level(void) { return level(); }

int spare_cpu_limit(int new_limit) {
  limit.store(new_limit, std::memory_order_relaxed);
  return level();
}

int64_t spare_cpu_bytes_per_thread(int64_t bytes) {
  return bytes_per_thread.exchange(std::max<int64_t>(1, bytes), std::memory_order_relaxed);
}

void spare_cpu_accumulate(const SpareAccumulate* job, int threads) {
  std::vector<Sums> found(std::max(1, threads));
  const Loops& table = loops();
  in_ranges(job->count, job->first_index, 16, threads, [&](int64_t part, int64_t start, int64_t stop) {
    table.accumulate(*job, start, stop, tables(), found[part].of);
  });
  uint64_t sum = static_cast<uint64_t>(job->report[0]);
  for (const Sums& one : found) {
    sum += one.of[0];
    job->report[1] |= static_cast<int64_t>(one.of[1]);
  }
  job->report[0] = static_cast<int64_t>(sum);
}

void spare_cpu_checksums(const void* values, int type, const int64_t* segments, int64_t num_segments, int64_t* sums,
                         int threads) {
  const Loops& table = loops();
  std::vector<std::atomic<uint64_t>> found(num_segments);
  int64_t count = 0;
  for (int64_t number = 0; number < num_segments; ++number) {
    found[number] = 0;
    count += segments[3 * number + 1] - segments[3 * number];
  }
  // Ranges of all segments laid end to end.
  in_ranges(count, 0, size_of(type), threads, [&](int64_t, int64_t start, int64_t stop) {
    int64_t before = 0;
    for (int64_t number = 0; number < num_segments && before < stop; ++number) {
      const int64_t* segment = segments + 3 * number;
      const int64_t size = segment[1] - segment[0];
      const int64_t from = std::max<int64_t>(0, start - before), to = std::min(size, stop - before);
      before += size;
      if (from >= to) continue;
      uint64_t sum[2] = {0, 0};
      const char* first = static_cast<const char*>(values) + segment[0] * size_of(type);
      table.checksum(first, type, from, to, segment[2], tables(), sum);
      found[number].fetch_add(sum[0], std::memory_order_relaxed);
    }
  });
  for (int64_t number = 0; number < num_segments; ++number)
    sums[number] = static_cast<int64_t>(static_cast<uint64_t>(sums[number]) + found[number].load());
}

void spare_cpu_convert(const SpareConvert* job, int threads) {
  const Loops& table = loops();
  const bool stream = job->count * 4 >= kStreamBytes;
  const int64_t bytes = size_of(job->type) * (job->addend ? 2 : 1) + 4;
  in_ranges(job->count, 0, bytes, threads, [&](int64_t, int64_t start, int64_t stop) {
    auto zero = [&](int64_t from, int64_t to) { memset(job->destination + from, 0, (to - from) * 4); };
    auto convert = [&](int64_t from, int64_t to, int64_t index, int64_t number) {
      uint64_t sums[2] = {0, 0};
      table.convert(*job, from, to, index, tables(), sums, stream);
      if (!job->found) return;
      for (int k = 0; k < 2; ++k)
        __atomic_fetch_add(job->found + 2 * number + k, static_cast<int64_t>(sums[k]), __ATOMIC_RELAXED);
    };
    by_segments(*job, start, stop, zero, convert);
  });
}

void spare_cpu_finalize(const SpareFinalize* job, int threads) {
  const Loops& table = loops();
  const int64_t element = job->destination_type == SPARE_FP32 ? 4 : 2;
  for (int64_t number = 0; number < job->num_segments; ++number) {
    const int64_t* segment = job->segments + 4 * number;
    const int64_t count = segment[1] - segment[0];
    const bool stream = count * element >= kStreamBytes;
    in_ranges(count, segment[3], 4 + element, threads,
              [&](int64_t, int64_t start, int64_t stop) { table.finalize(*job, segment, start, stop, stream); });
  }
}

void spare_cpu_digests(const void* const* parts, const int64_t* num_bytes, int64_t num_parts, int64_t* sums,
                       int threads) {
  for (int64_t number = 0; number < num_parts; ++number)
    digest(static_cast<const uint8_t*>(parts[number]), num_bytes[number], sums + 2 * number, threads);
}

void spare_cpu_largest(const void* const* parts, const int64_t* counts, int64_t num_parts, int32_t* top, int threads) {
  const Loops& table = loops();
  std::vector<Sums> found(std::max(1, threads));
  for (int64_t number = 0; number < num_parts; ++number)
    in_ranges(counts[number], 0, 4, threads, [&](int64_t part, int64_t start, int64_t stop) {
      const int32_t here = table.largest(static_cast<const float*>(parts[number]), start, stop);
      found[part].of[0] = std::max<uint64_t>(found[part].of[0], here);
    });
  for (const Sums& one : found) *top = std::max(*top, static_cast<int32_t>(one.of[0]));
}

void spare_cpu_squares(const void* const* parts, const int64_t* counts, int64_t num_parts, int exponent, int64_t* sums,
                       int threads) {
  const Loops& table = loops();
  std::vector<Sums> found(std::max(1, threads));
  for (int64_t number = 0; number < num_parts; ++number)
    in_ranges(counts[number], 0, 4, threads, [&](int64_t part, int64_t start, int64_t stop) {
      table.squares(static_cast<const float*>(parts[number]), start, stop, exponent, found[part].of);
    });
  for (const Sums& one : found)
    for (int k = 0; k < 2; ++k) sums[k] += static_cast<int64_t>(one.of[k]);
}

}  // extern "C"
