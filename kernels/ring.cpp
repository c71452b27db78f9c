// Moves the bytes of one sum around a ring, as spare_megatron/collectives/ring.py and frames.py say it: the same
// segments in the same order, the same frames on the wire. Python between two calls of the kernel finds nothing in the
// caches any more, so here a whole sum is one call, unless its elements are of a type that the caller adds or converts.
//
// Numbers of segments count as in ring.py. Epochs are not negative.
#include <cerrno>
#include <cstdint>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "spare_kernels.h"

// How far a member's sums are: hearing.Traffic, which other threads read.
struct SpareTraffic {
  int64_t sent;
  int64_t received;
  uint8_t wants;
  uint8_t offers;
  uint8_t patient;
};

constexpr int64_t HEAD_BYTES = 12;

// The frame in hand of a connection to a right neighbour. Outlives sums and epochs, as the next one does.
struct SpareOutgoing {
  int64_t epoch;
  int64_t due;        // bytes between head and last byte that are not sent yet
  int32_t open;       // a frame is in hand
  int32_t head_sent;  // bytes of the head
  uint8_t head[16];
};

// The frame in hand of a connection to a left neighbour.
struct SpareIncoming {
  int64_t epoch;
  int64_t due;       // bytes that have not come yet, without the last one
  int64_t broken;    // the newest epoch of which a frame is not whole: nothing more of it comes
  int32_t open;      // a frame is in hand: its head has come
  int32_t head_got;  // bytes of the head that comes next
  uint8_t head[16];
};

// One sum of one member.
struct SpareRingSum {
  uint8_t* wire;
  const uint8_t* source;
  uint8_t* scratch;
  uint8_t* result;  // of the sum: wire where it is not converted
  void (*convert)(const SpareConvert*, int);  // or null: the caller converts
  SpareConvert* conversion;
  SpareOutgoing* out;
  SpareIncoming* in;
  SpareTraffic* traffic;
  int64_t epoch;
  int64_t rank;
  int64_t size;
  int64_t count;     // elements of the tensor
  int64_t segment;   // elements of a segment
  int64_t first;     // where the tensor begins in what conversion tells of
  int64_t sent;      // segments, with the empty ones
  int64_t received;
  int64_t sent_bytes;      // of the segment after those
  int64_t received_bytes;
  int64_t counted_bytes;   // of those that have come, what traffic has: all but the last one until the frame is whole
  int64_t add_start;  // elements that the caller is to add or to convert before it calls again
  int64_t add_stop;
  const int64_t* borders;  // of a gather: where each member's share begins, and the end; else null
  const int64_t* hops;     // and how many members to the right of that member receive it
  uint8_t* packed_in;      // room for a packed segment that comes, with SLACK_BYTES behind it; null: nothing is packed
  uint8_t* packed_out;     // and for one that goes
  int64_t in_size;         // bytes of these
  int64_t out_size;
  int64_t error;      // errno, 0 where the other side has closed; of a frame of another size, its bytes
  int64_t due;        // and the bytes that were due
  int32_t left;       // sockets
  int32_t right;
  int32_t alarm;      // readable when the epoch is over
  int32_t itemsize;
  int32_t result_itemsize;
  int32_t type;       // of the elements: Type
  int32_t converts;   // the sum is converted where it is complete
};

namespace {

enum Outcome : int32_t { DONE = 0, OVER = 1, LOST_LEFT = 2, LOST_RIGHT = 3, OTHER_SUM = 4, ADD = 5, NO_POLL = 6, CONVERT = 7 };
enum Type : int32_t { CALLER_ADDS = 0, INT64 = 1, INT32 = 2, FLOAT32 = 3, FLOAT64 = 4 };
enum Moved : int32_t { NOTHING = -1, SOME = -2 };  // beside the outcomes

constexpr uint8_t WHOLE = 1, BROKEN = 0;
constexpr int64_t WASTE_BYTES = 1 << 16;
constexpr int64_t AHEAD_BYTES = 1024;  // so far ahead memory is fetched that no one has touched lately
constexpr int64_t STRIDE_BYTES = 64;
constexpr int64_t PACKED_BLOCK = 1024;
const uint8_t ZEROS[WASTE_BYTES] = {};

// out = a + b, where out may be a.
template <typename T>
void add(const T* a, const T* b, T* out, int64_t count) {
  constexpr int64_t stride = STRIDE_BYTES / sizeof(T), ahead = AHEAD_BYTES / sizeof(T);
  const int64_t whole = count / stride * stride;
  for (int64_t k = 0; k < whole; k += stride) {
    __builtin_prefetch(a + k + ahead);
    __builtin_prefetch(out + k + ahead, 1);
    T sums[stride];  // all are read before any is written, so that these are vectors
    for (int64_t n = 0; n < stride; ++n) sums[n] = a[k + n] + b[k + n];
    for (int64_t n = 0; n < stride; ++n) out[k + n] = sums[n];
  }
  for (int64_t n = whole; n < count; ++n) out[n] = a[n] + b[n];
}

// As spare_megatron/collectives/packing.py: of each block the width, then its elements in so many bytes. Writes up to
// SLACK_BYTES more than it returns.
int64_t pack(const int64_t* from, int64_t count, uint8_t* to) {
  uint8_t* width = to;
  uint8_t* out = to + (count + PACKED_BLOCK - 1) / PACKED_BLOCK;
  for (int64_t start = 0; start < count; start += PACKED_BLOCK) {
    const int64_t stop = start + PACKED_BLOCK < count ? start + PACKED_BLOCK : count;
    uint64_t used = 0;
    for (int64_t k = start; k < stop; ++k) used |= static_cast<uint64_t>(from[k] ^ (from[k] >> 63));
    const int64_t bytes = used ? (64 - __builtin_clzll(used)) / 8 + 1 : 1;
    *width++ = static_cast<uint8_t>(bytes);
    for (int64_t k = start; k < stop; ++k, out += bytes) __builtin_memcpy(out, from + k, 8);
  }
  return out - to;
}

// Whether `size` bytes are a packed segment of `count` elements, which are written to `to`. Reads up to SLACK_BYTES more.
bool unpack(const uint8_t* from, int64_t size, int64_t count, int64_t* to) {
  const int64_t blocks = (count + PACKED_BLOCK - 1) / PACKED_BLOCK;
  int64_t due = blocks;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t left = count - block * PACKED_BLOCK;
    if (from[block] < 1 || from[block] > 8) return false;
    due += from[block] * (left < PACKED_BLOCK ? left : PACKED_BLOCK);
  }
  if (due != size) return false;
  const uint8_t* in = from + blocks;
  for (int64_t start = 0; start < count; start += PACKED_BLOCK) {
    const int64_t stop = start + PACKED_BLOCK < count ? start + PACKED_BLOCK : count, bytes = *from++;
    const int shift = static_cast<int>(64 - 8 * bytes);
    for (int64_t k = start; k < stop; ++k, in += bytes) {
      uint64_t value;
      __builtin_memcpy(&value, in, 8);
      to[k] = static_cast<int64_t>(value << shift) >> shift;
    }
  }
  return true;
}

template <typename T>
void tell(T& place, T value) {
  __atomic_store_n(&place, value, __ATOMIC_RELAXED);
}

void put_big_endian(uint8_t* to, uint64_t value, int bytes) {
  for (int n = bytes - 1; n >= 0; --n, value >>= 8) to[n] = static_cast<uint8_t>(value);
}

uint64_t big_endian(const uint8_t* from, int bytes) {
  uint64_t value = 0;
  for (int n = 0; n < bytes; ++n) value = value << 8 | from[n];
  return value;
}

class Run {
 public:
  explicit Run(SpareRingSum& job)
      : j_(job),
        chunk_((job.count + job.size - 1) / job.size),
        adding_(job.borders ? 0 : job.size - 1),
        segments_((largest() + job.segment - 1) / job.segment),
        total_((adding_ + job.size - 1) * segments_) {}

  int32_t run() {
    if (j_.add_stop > j_.add_start) {
      j_.add_start = j_.add_stop = 0;
      next_in();
    }
    skip_empty();
    while (j_.sent < total_ || j_.received < total_) {
      pollfd alarm{j_.alarm, POLLIN, 0};
      if (poll(&alarm, 1, 0) > 0) return OVER;  // no byte may leave any more
      const int32_t pulled = pull();
      if (pulled >= 0) return pulled;
      const int32_t pushed = push();
      if (pushed >= 0) return pushed;
      if (pulled == NOTHING && pushed == NOTHING) {
        const int32_t ended = wait();
        if (ended >= 0) return ended;
      }
    }
    return DONE;
  }

 private:
  struct Range {
    int64_t start, stop;
  };

  int64_t border(int64_t place) const {
    if (j_.borders) return j_.borders[place];
    return place * chunk_ < j_.count ? place * chunk_ : j_.count;
  }

  int64_t largest() const {
    if (!j_.borders) return chunk_;
    int64_t most = 0;
    for (int64_t k = 0; k < j_.size; ++k)
      if (border(k + 1) - border(k) > most) most = border(k + 1) - border(k);
    return most;
  }

  // Segment `number` of a stream, of the chunk at `place` of the ring, in `step`.
  Range range(int64_t number, int64_t place, int64_t step) const {
    place = (place % j_.size + j_.size) % j_.size;
    const int64_t end = border(place + 1), first = border(place) + number % segments_ * j_.segment;
    if (first >= end || (j_.hops && step >= j_.hops[place])) return {end, end};
    return {first, first + j_.segment < end ? first + j_.segment : end};
  }

  Range incoming() const {
    const int64_t step = j_.received / segments_;
    return range(j_.received, j_.rank - step - 1, step);
  }
  Range outgoing() const {
    const int64_t step = j_.sent / segments_;
    return range(j_.sent, j_.rank - step, step);
  }
  bool adds() const { return j_.received / segments_ < adding_; }
  bool completes() const { return j_.received / segments_ == adding_ - 1; }
  // Bytes of an element of the segment that comes or goes next.
  int64_t item_in() const { return adds() ? j_.itemsize : j_.result_itemsize; }
  int64_t item_out() const { return j_.sent / segments_ < adding_ ? j_.itemsize : j_.result_itemsize; }
  const uint8_t* outgoing_memory() const {
    const int64_t step = j_.sent / segments_;
    return step >= adding_ ? j_.result : step == 0 ? j_.source : j_.wire;
  }
  bool packs() const { return j_.packed_in && j_.type == INT64; }
  bool comes_packed() const { return packs() && adds(); }
  bool goes_packed() const { return packs() && j_.sent / segments_ < adding_; }
  bool wants() const { return j_.received < total_; }
  bool offers() const { return j_.sent < total_ && j_.sent < j_.received + segments_; }
  bool ahead() const { return j_.in->broken >= j_.epoch || (j_.in->open && j_.in->epoch > j_.epoch); }

  void skip_empty() {
    for (Range r; j_.received < total_ && (r = incoming(), r.start == r.stop);) ++j_.received;
    for (Range r; j_.sent < total_ && (r = outgoing(), r.start == r.stop);) ++j_.sent;
  }

  void next_in() {
    ++j_.received;
    j_.received_bytes = j_.counted_bytes = 0;
    skip_empty();
  }

  int32_t lost(int32_t side, int64_t error) {
    j_.error = error;
    return side;
  }

  // Take some bytes from the left.
  int32_t pull() {
    SpareIncoming& in = *j_.in;
    while (wants() && !ahead()) {
      static thread_local uint8_t waste[WASTE_BYTES];
      const Range r = incoming();
      const int64_t item = item_in(), count = r.stop - r.start;
      const bool mine = in.open && in.epoch == j_.epoch, packed = comes_packed();
      if (mine && packed && j_.received_bytes == 0) {
        const int64_t blocks = (count + PACKED_BLOCK - 1) / PACKED_BLOCK;
        j_.due = blocks + 8 * count;
        if (in.due < blocks + count || in.due > j_.due) return lost(OTHER_SUM, in.due);
        j_.in_size = in.due;
      }
      const int64_t size = packed ? j_.in_size : count * item;
      if (mine && in.due != size - j_.received_bytes) {
        j_.due = size - j_.received_bytes;
        return lost(OTHER_SUM, in.due);
      }
      uint8_t last = BROKEN;
      iovec parts[3];
      int64_t data = 0;
      size_t number = 0;
      if (in.open) {
        uint8_t* room = waste;
        if (mine) room = (packed ? j_.packed_in : adds() ? j_.scratch : j_.result + r.start * item) + j_.received_bytes;
        data = mine || in.due < WASTE_BYTES ? in.due : WASTE_BYTES;
        if (data) parts[number++] = {room, static_cast<size_t>(data)};
        if (data == in.due) parts[number++] = {&last, 1};
      }
      if (data == in.due || !in.open)  // the next frame's head comes with this one's end
        parts[number++] = {in.head + in.head_got, static_cast<size_t>(HEAD_BYTES - in.head_got)};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = number;
      int64_t got = recvmsg(j_.left, &message, MSG_DONTWAIT);
      if (got < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN ? NOTHING : lost(LOST_LEFT, errno);
      }
      if (got == 0) return lost(LOST_LEFT, 0);
      if (in.open) {
        const int64_t taken = got < data ? got : data;
        in.due -= taken;
        got -= taken;
        if (mine) {
          j_.received_bytes += taken;
          count_received(j_.received_bytes - (in.due == 0));
        }
        if (in.due || !got) {
          if (mine) return SOME;
          continue;
        }
        --got;
        in.open = 0;
        if (last != WHOLE && in.epoch > in.broken) in.broken = in.epoch;
      }
      in.head_got += static_cast<int32_t>(got);
      if (in.head_got == HEAD_BYTES) {
        in.epoch = static_cast<int64_t>(big_endian(in.head, 8));
        in.due = static_cast<int64_t>(big_endian(in.head + 8, 4));
        in.head_got = 0;
        in.open = 1;
      }
      if (mine && last == WHOLE) {
        count_received(size);
        return take(r);
      }
    }
    return NOTHING;
  }

  void count_received(int64_t bytes) {
    if (bytes <= j_.counted_bytes) return;
    tell(j_.traffic->received, j_.traffic->received + bytes - j_.counted_bytes);
    j_.counted_bytes = bytes;
  }

  // A segment has come.
  int32_t take(Range r) {
    if (comes_packed() &&
        !unpack(j_.packed_in, j_.in_size, r.stop - r.start, reinterpret_cast<int64_t*>(j_.scratch))) {
      j_.due = 0;
      return lost(OTHER_SUM, j_.in_size);
    }
    if (completes() && j_.converts) {
      if (!j_.convert) return to_caller(CONVERT, r);
      convert(r);
    } else if (adds()) {
      if (j_.type == CALLER_ADDS) return to_caller(ADD, r);
      add_up(r);
    }
    next_in();
    return SOME;
  }

  int32_t to_caller(Outcome work, Range r) {
    j_.add_start = r.start;
    j_.add_stop = r.stop;
    return work;
  }

  void convert(Range r) {
    SpareConvert& job = *j_.conversion;
    job.sums = j_.source + r.start * j_.itemsize;
    job.addend = j_.scratch;
    job.destination = reinterpret_cast<float*>(j_.result) + r.start;
    job.start = j_.first + r.start;
    job.count = r.stop - r.start;
    j_.convert(&job, 1);
  }

  void add_up(Range r) {
    const int64_t at = r.start * j_.itemsize, count = r.stop - r.start;
    const uint8_t* source = j_.source + at;
    uint8_t* wire = j_.wire + at;
    switch (j_.type) {
      case INT64: return add_of<uint64_t>(source, wire, count);
      case INT32: return add_of<uint32_t>(source, wire, count);
      case FLOAT32: return add_of<float>(source, wire, count);
      case FLOAT64: return add_of<double>(source, wire, count);
    }
  }

  template <typename T>
  void add_of(const uint8_t* source, uint8_t* wire, int64_t count) {
    add(reinterpret_cast<const T*>(source), reinterpret_cast<const T*>(j_.scratch), reinterpret_cast<T*>(wire), count);
  }

  // Give some bytes to the right.
  int32_t push() {
    SpareOutgoing& out = *j_.out;
    while (offers()) {
      const Range r = outgoing();
      const int64_t item = item_out();
      const bool packed = goes_packed();
      int64_t size = packed ? j_.out_size : (r.stop - r.start) * item;
      if (!out.open) {
        if (packed) {
          const int64_t* from = reinterpret_cast<const int64_t*>(outgoing_memory()) + r.start;
          size = j_.out_size = pack(from, r.stop - r.start, j_.packed_out);
        }
        out.open = 1;
        out.epoch = j_.epoch;
        out.due = size;
        out.head_sent = 0;
        put_big_endian(out.head, static_cast<uint64_t>(j_.epoch), 8);
        put_big_endian(out.head + 8, static_cast<uint64_t>(size), 4);
      }
      const bool mine = out.epoch == j_.epoch;
      const int64_t most = mine || out.due < WASTE_BYTES ? out.due : WASTE_BYTES;
      const uint8_t* from = ZEROS;
      if (mine) from = (packed ? j_.packed_out : outgoing_memory() + r.start * item) + size - out.due;
      const uint8_t last = mine ? WHOLE : BROKEN;
      iovec parts[3];
      size_t number = 0;
      const int64_t head = HEAD_BYTES - out.head_sent;
      if (head) parts[number++] = {out.head + out.head_sent, static_cast<size_t>(head)};
      if (most) parts[number++] = {const_cast<uint8_t*>(from), static_cast<size_t>(most)};
      if (most == out.due) parts[number++] = {const_cast<uint8_t*>(&last), 1};
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = number;
      int64_t gone = sendmsg(j_.right, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (gone < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN ? NOTHING : lost(LOST_RIGHT, errno);
      }
      const int64_t of_head = gone < head ? gone : head;
      out.head_sent += static_cast<int32_t>(of_head);
      gone -= of_head;
      const int64_t of_data = gone < most ? gone : most;
      out.due -= of_data;
      out.open = gone == of_data;  // else the last byte is gone as well
      if (!mine) continue;
      const int64_t counted = size - out.due - (out.open && out.due == 0);
      if (counted > j_.sent_bytes) {
        tell(j_.traffic->sent, j_.traffic->sent + counted - j_.sent_bytes);
        j_.sent_bytes = counted;
      }
      if (!out.open) {
        ++j_.sent;
        j_.sent_bytes = 0;
        skip_empty();
      }
      return SOME;
    }
    return NOTHING;
  }

  // Wait until a neighbour gives or takes something, or the epoch is over.
  int32_t wait() {
    tell(j_.traffic->wants, static_cast<uint8_t>(wants()));
    tell(j_.traffic->offers, static_cast<uint8_t>(offers()));
    pollfd looked[3] = {{j_.alarm, POLLIN, 0}, {-1, POLLIN, 0}, {-1, POLLRDHUP, 0}};
    if (wants() && !ahead()) looked[1].fd = j_.left;
    if (j_.sent < total_) looked[2].fd = j_.right;
    if (offers()) looked[2].events |= POLLOUT;
    if (poll(looked, 3, -1) < 0) return errno == EINTR ? SOME : lost(NO_POLL, errno);
    if (looked[0].revents) return OVER;
    if (looked[2].revents & (POLLERR | POLLHUP | POLLRDHUP | POLLNVAL)) return lost(LOST_RIGHT, 0);
    return SOME;
  }

  SpareRingSum& j_;
  const int64_t chunk_;
  const int64_t adding_;  // steps in which what comes is added
  const int64_t segments_, total_;
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int32_t spare_ring_version() {
  return 1000 * SPARE_KERNELS_VERSION + 4;
}

// For tests.
__attribute__((visibility("default"))) int64_t spare_ring_pack(const int64_t* from, int64_t count, uint8_t* to) {
  return pack(from, count, to);
}

__attribute__((visibility("default"))) int32_t spare_ring_unpack(const uint8_t* from, int64_t size, int64_t count,
                                                                 int64_t* to) {
  return unpack(from, size, count, to);
}

// Goes on with a sum until it is over, an outcome of it is due, or the caller is to add or to convert something.
__attribute__((visibility("default"))) int32_t spare_ring_run(SpareRingSum* job) { return Run(*job).run(); }

}
