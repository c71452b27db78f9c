// The CUDA half of the C interface. Each kernel strides over blocks of SPARE_BLOCK elements with a grid sized to the GPU,
// reads and writes a thread's four neighbouring elements with accesses of up to 16 bytes where the addresses allow it,
// and queues on the caller's stream without waiting. Gradients are added one parameter at a time, as they come; whatever
// there is a list of goes by list (Batch).
//
// Results have the same bits as on the CPU: checksums, flags and peaks are integers, and atomics may add them in any
// order. A thread has the same indices in every block, so it computes its weights once.

#include <cuda_runtime.h>

#include "arithmetic.h"
#include "segments.h"
#include "spare_kernels.h"

namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = SPARE_BLOCK / kThreads;  // 4
constexpr unsigned kFull = 0xffffffffu;
constexpr int kArgumentBytes = 4096;  // what a launch takes on every device and driver
typedef unsigned long long Word;

template <class Element, int count>
struct alignas(sizeof(Element) * count > 16 ? 16 : sizeof(Element) * count) Pack {
  Element of[count];
};

__device__ bool aligned_here(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

int grid_for(int64_t blocks) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = int64_t(processors) * 8;
  return int(blocks < most ? (blocks > 0 ? blocks : 1) : most);
}

__host__ __device__ int64_t blocks_of(int64_t first_index, int64_t count) {
  return (first_index + count - 1) / SPARE_BLOCK - first_index / SPARE_BLOCK + 1;
}

__device__ Word warp_sum(Word value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(kFull, value, step);
  return value;
}

__device__ void add_sum(int64_t* to, Word value) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0 && value) atomicAdd(reinterpret_cast<Word*>(to), value);
}

__device__ void checksum_weights(uint64_t* weights) {
  for (int k = 0; k < kPerThread; ++k)
    weights[k] = (splitmix64(SPARE_CHECKSUM_SEED + threadIdx.x * kPerThread + k) >> 32) | 1;
}

// Loads the thread's elements of a block; those outside 0..count-1 are 0. A 16-byte access for each 16 bytes.
template <class Element>
__device__ void load_four(const Element* data, int64_t at, int64_t count, Element* out) {
  typedef Pack<Element, kPerThread> Four;
  if (at >= 0 && at + kPerThread <= count && aligned_here(data + at, alignof(Four))) {
    const Four four = *reinterpret_cast<const Four*>(data + at);
    for (int k = 0; k < kPerThread; ++k) out[k] = four.of[k];
    return;
  }
  for (int k = 0; k < kPerThread; ++k) out[k] = at + k >= 0 && at + k < count ? data[at + k] : Element(0);
}

template <class Element>
__device__ void store_four(Element* data, int64_t at, int64_t count, const Element* values) {
  typedef Pack<Element, kPerThread> Four;
  if (at >= 0 && at + kPerThread <= count && aligned_here(data + at, alignof(Four))) {
    Four four;
    for (int k = 0; k < kPerThread; ++k) four.of[k] = values[k];
    *reinterpret_cast<Four*>(data + at) = four;
    return;
  }
  for (int k = 0; k < kPerThread; ++k)
    if (at + k >= 0 && at + k < count) data[at + k] = values[k];
}

// What is done with the other gradient.
enum Other { kNone, kSummed, kApart };

// What is rounded, as bits of a format: gradients, or the sum of two in fp32.
template <class Source, Other other>
struct Rounded {
  typedef Source Format;
  enum { kGradients = 1 };
};

template <class Source>
struct Rounded<Source, kSummed> {
  typedef Fp32 Format;
  enum { kGradients = 1 };
};

// Of bf16 and fp16 as fp32, so that the other one may be fp32 too: the value is the same.
template <class Source>
struct Rounded<Source, kApart> {
  typedef Fp32 Format;
  enum { kGradients = 2 };
};

template <class Source>
__device__ void load_singles(const void* gradient, int64_t at, int64_t count, float* values) {
  typename Source::Bits bits[kPerThread];
  load_four(static_cast<const typename Source::Bits*>(gradient), at, count, bits);
  for (int k = 0; k < kPerThread; ++k) values[k] = Source::any(bits[k]);
}

template <class Source, Other other>
__device__ void load_rounded(const SpareAccumulate& job, int64_t at,
                             typename Rounded<Source, other>::Format::Bits (*bits)[kPerThread]) {
  if constexpr (other == kNone) {
    load_four(static_cast<const typename Source::Bits*>(job.source), at, job.count, bits[0]);
  } else {
    float own[kPerThread], others[kPerThread];
    load_singles<Source>(job.source, at, job.count, own);
    if (job.other_type == SPARE_FP32)
      load_singles<Fp32>(job.other, at, job.count, others);
    else
      load_singles<Source>(job.other, at, job.count, others);
    for (int k = 0; k < kPerThread; ++k) {
      if constexpr (other == kSummed) {
        bits[0][k] = float_to_bits(__fadd_rn(others[k], own[k]));
      } else {
        bits[0][k] = float_to_bits(own[k]);
        bits[1][k] = float_to_bits(others[k]);
      }
    }
  }
}

template <class Source, class Accumulator, Other other>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(SpareAccumulate job, int64_t blocks) {
  typedef Rounded<Source, other> Chosen;
  typedef typename Chosen::Format Format;
  uint64_t weights[kPerThread];
  checksum_weights(weights);
  const int64_t first_block = job.first_index / SPARE_BLOCK;
  const double bound = power_of_two(job.bound_bits);
  Accumulator* accumulator = static_cast<Accumulator*>(job.accumulator);
  uint32_t flags = 0;
  uint64_t total = 0;
  for (int64_t number = blockIdx.x; number < blocks; number += gridDim.x) {
    const int64_t block = first_block + number;
    const int64_t at = block * SPARE_BLOCK - job.first_index + threadIdx.x * kPerThread;
    const int exponent = job.exponents ? job.exponents[number] : job.exponent;
    const double scale = power_of_two(exponent);
    const uint32_t limit = threshold<Format>(job.bound_bits - exponent);
    typename Format::Bits bits[Chosen::kGradients][kPerThread];
    Accumulator sums[kPerThread] = {};
    load_rounded<Source, other>(job, at, bits);
    if (!job.first) load_four(accumulator, at, job.count, sums);
    uint64_t sum = 0;
    for (int gradient = 0; gradient < Chosen::kGradients; ++gradient)
      for (int k = 0; k < kPerThread; ++k) {
        const typename Format::Bits one = bits[gradient][k];
        uint64_t value;
        if ((one & Format::magnitude) <= limit)
          value = static_cast<uint64_t>(__double2ll_rn(value_of<Format>(one) * scale));
        else
          value = round_checked<Format>(one, scale, bound, &flags);
        sums[k] = static_cast<Accumulator>(static_cast<uint64_t>(sums[k]) + value);
        sum += value * weights[k];
      }
    store_four(accumulator, at, job.count, sums);
    total += checksum_factor(block) * sum;
  }
  add_sum(job.report, total);
  if (flags) atomicOr(reinterpret_cast<Word*>(job.report + 1), static_cast<Word>(flags));
}

// Jobs that one launch does. They are an argument of the kernel, so nothing of the host's is read later and nobody waits.
// Each has as many thread blocks as it would have in a launch of its own, and a thread block works for one of them.
template <class Job>
struct Batch {
  static constexpr int kMost = (kArgumentBytes - 8) / (sizeof(Job) + sizeof(uint32_t));
  int32_t jobs = 0;
  uint32_t ends[kMost];  // thread blocks of the jobs up to this one
  Job of[kMost];
};

template <class Job>
__global__ void __launch_bounds__(kThreads) batch_kernel(const __grid_constant__ Batch<Job> batch) {
  int low = 0, high = batch.jobs - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (batch.ends[middle] > blockIdx.x)
      high = middle;
    else
      low = middle + 1;
  }
  const uint32_t first = low ? batch.ends[low - 1] : 0;
  const Job job = batch.of[low];
  job.run(blockIdx.x - first, batch.ends[low] - first);
}

// Of a Job: blocks() is how many blocks of SPARE_BLOCK it has, run(from, step) does block `from` and each `step`-th behind.
template <class Element>
struct Checksum {
  const Element* values;
  int64_t* to;
  int64_t count, first_index;

  __host__ __device__ int64_t blocks() const { return blocks_of(first_index, count); }

  __device__ void run(int64_t from, int64_t step) const {
    uint64_t weights[kPerThread];
    checksum_weights(weights);
    uint64_t total = 0;
    for (int64_t number = from, end = blocks(); number < end; number += step) {
      const int64_t block = first_index / SPARE_BLOCK + number;
      Element four[kPerThread];
      load_four(values, block * SPARE_BLOCK - first_index + threadIdx.x * kPerThread, count, four);
      uint64_t sum = 0;
      for (int k = 0; k < kPerThread; ++k) sum += static_cast<uint64_t>(int64_t(four[k])) * weights[k];
      total += checksum_factor(block) * sum;
    }
    add_sum(to, total);
  }
};

// One segment's elements of a range; `first_index` is that of the first. Those of no segment have no integers: they become 0.
template <class Element>
struct Convert {
  const Element* integers;
  const Element* addend;
  float* destination;
  const int16_t* exponents;
  int64_t* found;  // the segment's two sums, or null
  int64_t count, first_index;

  __host__ __device__ int64_t blocks() const { return blocks_of(first_index, count); }

  __device__ void run(int64_t from, int64_t step) const {
    uint64_t weights[kPerThread];
    checksum_weights(weights);
    uint64_t totals[2] = {0, 0};
    for (int64_t number = from, end = blocks(); number < end; number += step) {
      const int64_t block = first_index / SPARE_BLOCK + number;
      const int64_t at = block * SPARE_BLOCK - first_index + threadIdx.x * kPerThread;
      float out[kPerThread] = {};
      if (integers) {
        const double scale = power_of_two(-exponents[block]);
        Element values[kPerThread], others[kPerThread] = {};
        load_four(integers, at, count, values);
        if (addend) load_four(addend, at, count, others);
        uint64_t sums[2] = {0, 0};
        for (int k = 0; k < kPerThread; ++k) {
          const Element value =
              static_cast<Element>(static_cast<uint64_t>(values[k]) + static_cast<uint64_t>(others[k]));
          out[k] = static_cast<float>(static_cast<double>(value) * scale);
          sums[0] += static_cast<uint64_t>(int64_t(value)) * weights[k];
          sums[1] += static_cast<uint64_t>(int64_t(static_cast<int32_t>(float_to_bits(out[k])))) * weights[k];
        }
        for (int k = 0; k < 2; ++k) totals[k] += checksum_factor(block) * sums[k];
      }
      store_four(destination, at, count, out);
    }
    if (!found) return;
    add_sum(found, totals[0]);
    add_sum(found + 1, totals[1]);
  }
};

__device__ void store_one(float* to, double value) { *to = static_cast<float>(value); }
__device__ void store_one(uint16_t* to, double value) { *to = to_bf16(value); }

__device__ void raise(int32_t* peak, int32_t value) {
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_down_sync(kFull, value, step));
  if (threadIdx.x % 32 == 0 && value > 0) atomicMax(peak, value);
}

template <class Destination>
struct Finalize {
  const float* total;
  Destination* destination;
  int32_t* peaks;  // of the block that holds first_index
  double divisor;
  int64_t count, first_index;

  __host__ __device__ int64_t blocks() const { return blocks_of(first_index, count); }

  __device__ void run(int64_t from, int64_t step) const {
    for (int64_t number = from, end = blocks(); number < end; number += step) {
      const int64_t block = first_index / SPARE_BLOCK + number;
      const int64_t at = block * SPARE_BLOCK - first_index + threadIdx.x * kPerThread;
      float four[kPerThread];
      Destination out[kPerThread];
      load_four(total, at, count, four);
      int32_t peak = 0;
      for (int k = 0; k < kPerThread; ++k) {
        peak = max(peak, static_cast<int32_t>(float_to_bits(four[k]) & Fp32::magnitude));
        store_one(out + k, static_cast<double>(four[k]) / divisor);
      }
      store_four(destination, at, count, out);
      raise(peaks + number, peak);
    }
  }
};

__device__ uint64_t nonlinear(uint64_t word, uint64_t key) {
  const uint64_t keyed = word + key;
  return (keyed & 0xffffffffull) * (keyed >> 32);
}

struct Digest {
  const uint8_t* data;
  int64_t count;  // bytes
  int64_t* sums;

  __host__ __device__ int64_t words() const { return (count + 7) / 8; }
  __host__ __device__ int64_t blocks() const { return blocks_of(0, words()); }

  __device__ void run(int64_t from, int64_t step) const {
    uint64_t weights[kPerThread], keys[kPerThread];
    checksum_weights(weights);
    for (int k = 0; k < kPerThread; ++k) keys[k] = splitmix64(SPARE_DIGEST_SEED + threadIdx.x * kPerThread + k);
    const int64_t whole = count / 8;
    uint64_t totals[2] = {0, 0};
    for (int64_t block = from, end = blocks(); block < end; block += step) {
      const int64_t at = block * SPARE_BLOCK + threadIdx.x * kPerThread;
      uint64_t four[kPerThread] = {};
      if (at + kPerThread <= whole && aligned_here(data, 16)) {
        load_four(reinterpret_cast<const uint64_t*>(data), at, whole, four);
      } else {
        for (int64_t byte = at * 8; byte < (at + kPerThread) * 8 && byte < count; ++byte)
          four[byte / 8 - at] |= static_cast<uint64_t>(data[byte]) << (8 * (byte % 8));
      }
      uint64_t linear = 0;
      for (int k = 0; k < kPerThread; ++k) {
        if (at + k >= words()) break;
        totals[0] += nonlinear(four[k], digest_factor(block) + keys[k]);
        linear += four[k] * weights[k];
      }
      totals[1] += checksum_factor(block) * linear;
    }
    add_sum(sums, totals[0]);
    add_sum(sums + 1, totals[1]);
  }
};

struct Largest {
  const float* values;
  int64_t count;
  int32_t* top;

  __host__ __device__ int64_t blocks() const { return blocks_of(0, count); }

  __device__ void run(int64_t from, int64_t step) const {
    int32_t peak = 0;
    for (int64_t block = from, end = blocks(); block < end; block += step) {
      float four[kPerThread];
      load_four(values, block * SPARE_BLOCK + threadIdx.x * kPerThread, count, four);
      for (int k = 0; k < kPerThread; ++k)
        peak = max(peak, static_cast<int32_t>(float_to_bits(four[k]) & Fp32::magnitude));
    }
    raise(top, peak);
  }
};

struct Squares {
  const float* values;
  int64_t count;
  int64_t* sums;
  int32_t exponent;

  __host__ __device__ int64_t blocks() const { return blocks_of(0, count); }

  __device__ void run(int64_t from, int64_t step) const {
    const double scale = power_of_two(exponent);
    uint64_t totals[2] = {0, 0};
    for (int64_t block = from, end = blocks(); block < end; block += step) {
      float four[kPerThread];
      load_four(values, block * SPARE_BLOCK + threadIdx.x * kPerThread, count, four);
      uint64_t sum = 0;
      for (int k = 0; k < kPerThread; ++k) sum += round_square(four[k], scale);
      totals[0] += sum & 0xffffffffull;
      totals[1] += sum >> 32;
    }
    add_sum(sums, totals[0]);
    add_sum(sums + 1, totals[1]);
  }
};

// Launches jobs, as many at a time as an argument has room for.
template <class Job>
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  void add(const Job& job) {
    if (job.count == 0) return;
    if (batch_.jobs == Batch<Job>::kMost) launch();
    grid_ += grid_for(job.blocks());
    batch_.of[batch_.jobs] = job;
    batch_.ends[batch_.jobs++] = grid_;
  }

  void launch() {
    static_assert(sizeof(Batch<Job>) <= kArgumentBytes, "more than a launch takes");
    if (batch_.jobs > 0) batch_kernel<Job><<<grid_, kThreads, 0, stream_>>>(batch_);
    batch_.jobs = 0;
    grid_ = 0;
  }

 private:
  cudaStream_t stream_;
  Batch<Job> batch_;
  uint32_t grid_ = 0;
};

template <class Source, class Accumulator>
void accumulate_into(const SpareAccumulate& job, int64_t blocks, cudaStream_t stream) {
  if (!job.other)
    accumulate_kernel<Source, Accumulator, kNone><<<grid_for(blocks), kThreads, 0, stream>>>(job, blocks);
  else if (!job.apart)
    accumulate_kernel<Source, Accumulator, kSummed><<<grid_for(blocks), kThreads, 0, stream>>>(job, blocks);
  else
    accumulate_kernel<Source, Accumulator, kApart><<<grid_for(blocks), kThreads, 0, stream>>>(job, blocks);
}

template <class Source>
void accumulate_from(const SpareAccumulate& job, int64_t blocks, cudaStream_t stream) {
  if (job.accumulator_type == SPARE_INT64)
    accumulate_into<Source, int64_t>(job, blocks, stream);
  else
    accumulate_into<Source, int32_t>(job, blocks, stream);
}

template <class Element>
void checksum_segments(const Element* values, const int64_t* segments, int64_t num_segments, int64_t* sums,
                       cudaStream_t stream) {
  Launches<Checksum<Element>> launches(stream);
  for (int64_t number = 0; number < num_segments; ++number) {
    const int64_t* segment = segments + 3 * number;
    launches.add({values + segment[0], sums + number, segment[1] - segment[0], segment[2]});
  }
  launches.launch();
}

template <class Element>
void convert_segments(const SpareConvert& job, cudaStream_t stream) {
  Launches<Convert<Element>> launches(stream);
  const Element* integers = static_cast<const Element*>(job.sums);
  const Element* addend = static_cast<const Element*>(job.addend);
  auto zero = [&](int64_t from, int64_t to) {
    launches.add({nullptr, nullptr, job.destination + from, nullptr, nullptr, to - from, 0});
  };
  auto convert = [&](int64_t from, int64_t to, int64_t index, int64_t number) {
    launches.add({integers + from, addend ? addend + from : nullptr, job.destination + from, job.exponents,
                  job.found ? job.found + 2 * number : nullptr, to - from, index});
  };
  by_segments(job, 0, job.count, zero, convert);
  launches.launch();
}

template <class Destination>
void finalize_segments(const SpareFinalize& job, cudaStream_t stream) {
  Launches<Finalize<Destination>> launches(stream);
  for (int64_t number = 0; number < job.num_segments; ++number) {
    const int64_t* segment = job.segments + 4 * number;
    launches.add({job.total + segment[0], static_cast<Destination*>(job.destination) + segment[2],
                  job.peaks + segment[3] / SPARE_BLOCK, job.divisor, segment[1] - segment[0], segment[3]});
  }
  launches.launch();
}

}  // namespace

extern "C" {

int spare_kernels_version(void) { return SPARE_KERNELS_VERSION; }

const char* spare_cuda_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int spare_cuda_accumulate(const SpareAccumulate* job, void* stream) {
  if (job->count == 0) return 0;
  const int64_t blocks = blocks_of(job->first_index, job->count);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  if (job->source_type == SPARE_FP32) accumulate_from<Fp32>(*job, blocks, queue);
  if (job->source_type == SPARE_BF16) accumulate_from<Bf16>(*job, blocks, queue);
  if (job->source_type == SPARE_FP16) accumulate_from<Fp16>(*job, blocks, queue);
  return cudaGetLastError();
}

int spare_cuda_checksums(const void* values, int type, const int64_t* segments, int64_t num_segments, int64_t* sums,
                         void* stream) {
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  if (type == SPARE_INT64)
    checksum_segments(static_cast<const int64_t*>(values), segments, num_segments, sums, queue);
  else
    checksum_segments(static_cast<const int32_t*>(values), segments, num_segments, sums, queue);
  return cudaGetLastError();
}

int spare_cuda_convert(const SpareConvert* job, void* stream) {
  if (job->type == SPARE_INT64)
    convert_segments<int64_t>(*job, static_cast<cudaStream_t>(stream));
  else
    convert_segments<int32_t>(*job, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int spare_cuda_finalize(const SpareFinalize* job, void* stream) {
  if (job->destination_type == SPARE_FP32)
    finalize_segments<float>(*job, static_cast<cudaStream_t>(stream));
  else
    finalize_segments<uint16_t>(*job, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}

int spare_cuda_digests(const void* const* parts, const int64_t* num_bytes, int64_t num_parts, int64_t* sums,
                       void* stream) {
  Launches<Digest> launches(static_cast<cudaStream_t>(stream));
  for (int64_t number = 0; number < num_parts; ++number)
    launches.add({static_cast<const uint8_t*>(parts[number]), num_bytes[number], sums + 2 * number});
  launches.launch();
  return cudaGetLastError();
}

int spare_cuda_largest(const void* const* parts, const int64_t* counts, int64_t num_parts, int32_t* top, void* stream) {
  Launches<Largest> launches(static_cast<cudaStream_t>(stream));
  for (int64_t number = 0; number < num_parts; ++number)
    launches.add({static_cast<const float*>(parts[number]), counts[number], top});
  launches.launch();
  return cudaGetLastError();
}

int spare_cuda_squares(const void* const* parts, const int64_t* counts, int64_t num_parts, int exponent, int64_t* sums,
                       void* stream) {
  Launches<Squares> launches(static_cast<cudaStream_t>(stream));
  for (int64_t number = 0; number < num_parts; ++number)
    launches.add({static_cast<const float*>(parts[number]), counts[number], sums, exponent});
  launches.launch();
  return cudaGetLastError();
}

}  // extern "C"
