// Runs the kernels of kernels/cuda.cu on the CPU, lane by lane, and looks at every access.
//
// Blocks, the warps of a block and the lanes of a warp run in an order drawn from a seed. A lane is a fiber; it runs until it
// ends or comes to a shuffle, where it waits for the other lanes of its warp. A shuffle to which not all lanes of its mask
// come, or which they reach with different arguments, is a fault: that is what divergence would be on a device.
//
// The kernels are compiled with -fsanitize=thread,undefined, and this file has the functions which such code calls before
// each access and where something is undefined, in place of the sanitizers' own libraries. So each access is checked for:
// - bounds: it lies in a buffer that the test has declared, in the launch's arguments or in the lane's stack;
// - alignment to its size, where the code relies on it (-fsanitize=alignment calls for each pointer that is used);
// - rights: a buffer declared as read-only is not written;
// - races: a byte that one lane of a launch writes is touched by no other one, except by atomics alone.
// A fault ends the launch; later ones of the same batch are not run.

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 << 10;
constexpr int32_t kNobody = -1, kMany = -2, kAtomically = -3;

// Who has touched a byte in a launch: lanes, numbered over the grid.
struct Touched {
  uint32_t launch = 0;
  int32_t writer = kNobody, reader = kNobody;
};

struct Buffer {
  size_t bytes;
  bool writable;
  std::vector<Touched> touched;
};

struct Work {
  unsigned blocks, threads;
  void (*run)(const void*);
  std::vector<uint64_t> arguments;
  size_t size;
  void* set = nullptr;  // a memset instead of a kernel
  int value = 0;
};

enum State { kReady, kWaiting, kEnded };

struct Lane {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  unsigned thread;
  int kind, step;
  unsigned mask;
  uint64_t value;
};

std::map<uintptr_t, Buffer> buffers;
std::vector<Work> queued;
std::mt19937_64 random_numbers;
Lane lanes[kWarp];
ucontext_t scheduler;
Lane* running = nullptr;
const Work* work = nullptr;
unsigned block = 0, num_processors = 3;
int64_t first_run = 0, last_run = INT64_MAX;
uint32_t launch = 0;
int chosen_mutant = 0;
std::string fault;
std::set<void (*)(const void*)> kernels;  // which were launched
uint64_t bytes_read = 0, bytes_written = 0, launches = 0;

void fail(const char* format, ...) {
  if (!fault.empty()) return;
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fault = text;
}

// Ends the lane that runs, for good, where something is at fault.
void leave_if_failed() {
  if (!fault.empty() && running) swapcontext(&running->context, &scheduler);
}

bool within(uintptr_t address, size_t size, const void* from, size_t bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(from);
  return address >= start && address + size <= start + bytes;
}

std::pair<const uintptr_t, Buffer>* buffer_of(uintptr_t address, size_t size) {
  auto found = buffers.upper_bound(address);
  if (found == buffers.begin()) return nullptr;
  --found;
  return address + size <= found->first + found->second.bytes ? &*found : nullptr;
}

enum Access { kRead, kWrite, kAtomic };
const char* const names[] = {"reads", "writes", "changes atomically"};

void touch(Access access, uintptr_t address, size_t size) {
  const int32_t me = int32_t(block * work->threads + running->thread);
  auto* found = buffer_of(address, size);
  if (!found) {
    if (within(address, size, running->stack.get(), kStack)) return;
    if (access == kRead && within(address, size, work->arguments.data(), work->size)) return;
    fail("bounds: lane %d of block %u %s %zu bytes outside all buffers", running->thread, block, names[access], size);
    return leave_if_failed();
  }
  Buffer& buffer = found->second;
  if (access != kRead && !buffer.writable) {
    fail("rights: lane %d of block %u %s a buffer that is only read", running->thread, block, names[access]);
    return leave_if_failed();
  }
  (access == kRead ? bytes_read : bytes_written) += size;
  for (size_t at = address - found->first, end = at + size; at < end; ++at) {
    Touched& byte = buffer.touched[at];
    if (byte.launch != launch) byte = {launch, kNobody, kNobody};
    const bool others_wrote = byte.writer != kNobody && byte.writer != me;
    const bool others_read = byte.reader != kNobody && byte.reader != me;
    bool race = others_wrote || (access != kRead && others_read);
    if (access == kAtomic && byte.writer == kAtomically) race = others_read;
    if (race) {
      fail("race: lane %d of block %u %s what another lane has touched", running->thread, block, names[access]);
      return leave_if_failed();
    }
    if (access == kRead) byte.reader = byte.reader == kNobody || byte.reader == me ? me : kMany;
    if (access == kWrite) byte.writer = me;
    if (access == kAtomic) byte.writer = kAtomically;
  }
}

void run_lane() {
  work->run(work->arguments.data());
  running->state = kEnded;
  swapcontext(&running->context, &scheduler);
}

// Lets the lanes of the warp exchange what they wait with. All must have come.
void exchange() {
  for (int number = 0; number < kWarp; ++number) {
    const Lane &lane = lanes[number], &first = lanes[0];
    if (lane.state != kWaiting) return fail("divergence: lane %d has ended while others shuffle", lane.thread);
    if (lane.mask != 0xffffffffu) return fail("divergence: lane %d shuffles with mask %x", lane.thread, lane.mask);
    if (lane.kind != first.kind || lane.step != first.step)
      return fail("divergence: lane %d is at another shuffle than lane %d", lane.thread, first.thread);
  }
  uint64_t values[kWarp];
  for (int number = 0; number < kWarp; ++number) values[number] = lanes[number].value;
  for (int number = 0; number < kWarp; ++number) {
    const int from = number + lanes[number].step;
    lanes[number].value = values[from < kWarp ? from : number];
    lanes[number].state = kReady;
  }
}

void run_warp(unsigned first_thread) {
  int order[kWarp];
  for (int number = 0; number < kWarp; ++number) {
    Lane& lane = lanes[number];
    order[number] = number;
    if (!lane.stack) lane.stack.reset(new char[kStack]);
    lane.thread = first_thread + number;
    lane.state = kReady;
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = kStack;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, run_lane, 0);
  }
  while (fault.empty()) {
    std::shuffle(order, order + kWarp, random_numbers);
    for (int number : order) {
      if (lanes[number].state != kReady) continue;
      running = &lanes[number];
      swapcontext(&scheduler, &running->context);
      running = nullptr;
      if (!fault.empty()) return;
    }
    if (std::all_of(lanes, lanes + kWarp, [](const Lane& lane) { return lane.state == kEnded; })) return;
    exchange();
  }
}

void run_kernel() {
  std::vector<unsigned> order;
  for (int64_t one = std::max<int64_t>(0, first_run); one < work->blocks && one <= last_run; ++one) order.push_back(one);
  std::shuffle(order.begin(), order.end(), random_numbers);
  for (unsigned one : order) {
    block = one;
    std::vector<unsigned> warps;
    for (unsigned thread = 0; thread < work->threads; thread += kWarp) warps.push_back(thread);
    std::shuffle(warps.begin(), warps.end(), random_numbers);
    for (unsigned thread : warps) {
      run_warp(thread);
      if (!fault.empty()) return;
    }
  }
}

void undefined(const char* what) {
  fail("undefined: %s", what);
  leave_if_failed();
}

}  // namespace

namespace emulated {

unsigned thread_index() { return running->thread; }
unsigned block_index() { return block; }
unsigned grid_blocks() { return work->blocks; }
int processors() { return num_processors; }
int mutant() { return chosen_mutant; }
int last_error() { return 0; }

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int step) {
  Lane* lane = running;
  lane->kind = kind, lane->mask = mask, lane->value = value, lane->step = step;
  lane->state = kWaiting;
  swapcontext(&lane->context, &scheduler);
  return lane->value;
}

uint64_t atomic(Atomic kind, void* address, uint64_t value) {
  const size_t size = kind == kMax32 ? 4 : 8;
  if (reinterpret_cast<uintptr_t>(address) % size) undefined("an atomic at a misaligned address");
  touch(kAtomic, reinterpret_cast<uintptr_t>(address), size);
  if (kind == kMax32) {
    int32_t* at = static_cast<int32_t*>(address);
    const int32_t before = *at;
    *at = std::max(before, int32_t(value));
    return uint64_t(int64_t(before));
  }
  uint64_t* at = static_cast<uint64_t*>(address);
  const uint64_t before = *at;
  *at = kind == kAdd64 ? before + value : before | value;
  return before;
}

void set_bytes(void* address, int value, size_t bytes) {
  Work one{};
  one.set = address, one.value = value, one.size = bytes;
  queued.push_back(one);
}

void queue(unsigned blocks, unsigned threads, void (*run)(const void*), const void* arguments, size_t size) {
  Work one{blocks, threads, run, std::vector<uint64_t>((size + 7) / 8), size};
  memcpy(one.arguments.data(), arguments, size);
  kernels.insert(run);
  queued.push_back(one);
}

}  // namespace emulated

// For the test.
extern "C" {

__attribute__((visibility("default"))) void emulated_begin(uint64_t seed, int processors, int mutant) {
  random_numbers.seed(seed);
  num_processors = processors, chosen_mutant = mutant;
  first_run = 0, last_run = INT64_MAX;
  fault.clear(), queued.clear(), buffers.clear();
  bytes_read = bytes_written = launches = 0;
}

__attribute__((visibility("default"))) void emulated_buffer(void* address, size_t bytes, int writable) {
  if (bytes) buffers[reinterpret_cast<uintptr_t>(address)] = {bytes, writable != 0, std::vector<Touched>(bytes)};
}

// Of each kernel only these blocks of the grid are run.
__attribute__((visibility("default"))) void emulated_only(int64_t first, int64_t last) { first_run = first, last_run = last; }

// Runs what was queued; returns the first fault, or "".
__attribute__((visibility("default"))) const char* emulated_run() {
  for (const Work& one : queued) {
    ++launch, ++launches;
    if (one.set) {
      auto* found = buffer_of(reinterpret_cast<uintptr_t>(one.set), one.size);
      if (!found || !found->second.writable)
        fail("bounds: %zu bytes are set outside all buffers", one.size);
      else
        memset(one.set, one.value, one.size), bytes_written += one.size;
    } else {
      work = &one;
      run_kernel();
      work = nullptr;
    }
    if (!fault.empty()) break;
  }
  queued.clear();
  return fault.c_str();
}

__attribute__((visibility("default"))) void emulated_counts(uint64_t* read, uint64_t* written, uint64_t* number) {
  *read = bytes_read, *written = bytes_written, *number = launches;
}

__attribute__((visibility("default"))) int emulated_forget_kernels() {
  const int number = int(kernels.size());
  kernels.clear();
  return number;
}

// What code compiled with -fsanitize=thread calls.
#define ACCESS(size)                                                                                           \
  void __tsan_read##size(void* at) { if (running) touch(kRead, uintptr_t(at), size); }                         \
  void __tsan_write##size(void* at) { if (running) touch(kWrite, uintptr_t(at), size); }                       \
  void __tsan_unaligned_read##size(void* at) { if (running) touch(kRead, uintptr_t(at), size); }               \
  void __tsan_unaligned_write##size(void* at) { if (running) touch(kWrite, uintptr_t(at), size); }             \
  void __tsan_volatile_read##size(void* at) { if (running) touch(kRead, uintptr_t(at), size); }                \
  void __tsan_volatile_write##size(void* at) { if (running) touch(kWrite, uintptr_t(at), size); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, size_t size) { if (running) touch(kRead, uintptr_t(at), size); }
void __tsan_write_range(void* at, size_t size) { if (running) touch(kWrite, uintptr_t(at), size); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// What code compiled with -fsanitize=undefined calls.
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t pointer) {
  const uintptr_t alignment = uintptr_t(1) << data->log_alignment;
  if (!pointer) return undefined("a null pointer is used");
  if (pointer % alignment) {
    fail("alignment: line %u uses an address that is not a multiple of %zu", data->line, size_t(alignment));
    return leave_if_failed();
  }
  undefined("an object too small for its type");
}
#define UNDEFINED(name, what) \
  void __ubsan_handle_##name() { undefined(what); }
UNDEFINED(add_overflow, "an addition overflows")
UNDEFINED(sub_overflow, "a subtraction overflows")
UNDEFINED(mul_overflow, "a product overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "a quotient overflows")
UNDEFINED(shift_out_of_bounds, "a shift by too many bits, or of a negative number")
UNDEFINED(out_of_bounds, "an index out of bounds")
UNDEFINED(builtin_unreachable, "unreachable code is reached")
UNDEFINED(missing_return, "a function ends without a value")
UNDEFINED(pointer_overflow, "a pointer overflows")
UNDEFINED(load_invalid_value, "a value that its type does not have")
UNDEFINED(float_cast_overflow, "a float is too large for its integer type")
UNDEFINED(nonnull_arg, "a null argument")
UNDEFINED(invalid_builtin, "a builtin with an invalid argument")

}  // extern "C"
