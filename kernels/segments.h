// How a range of a tensor lies in the tensor's segments, for `convert` on CPU and GPU.
#ifndef SPARE_SEGMENTS_H
#define SPARE_SEGMENTS_H

#include <algorithm>

#include "spare_kernels.h"

namespace {

// The first segment that ends behind a position of the tensor.
inline int64_t first_segment(const SpareConvert& job, int64_t position) {
  int64_t low = 0, high = job.num_segments;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (job.segments[3 * middle + 1] > position)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Of elements start to stop of the job's range, in order: between(from, to) for those in no segment, within(from, to,
// index, number) for those of segment `number`, the first of which has `index`.
template <class Between, class Within>
void by_segments(const SpareConvert& job, int64_t start, int64_t stop, Between between, Within within) {
  int64_t at = start;
  for (int64_t number = first_segment(job, job.start + start); at < stop; ++number) {
    int64_t from = stop, to = stop, index = 0;
    if (number < job.num_segments) {
      const int64_t* segment = job.segments + 3 * number;
      from = std::min(stop, std::max(at, segment[0] - job.start));
      to = std::min(stop, std::max(from, segment[1] - job.start));
      index = segment[2] + (job.start + from - segment[0]);
    }
    if (at < from) between(at, from);
    if (from < to) within(from, to, index, number);
    at = to;
  }
}

}  // namespace

#endif
