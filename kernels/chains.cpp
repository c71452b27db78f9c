// Chains of units over hosts, as spare_megatron/protocol/assign_chains.py has them: the same plans, sooner.
//
// Tables are layer-major, [layers, groups], as there. Distances are shortest paths, which are unique however they are
// found, and chains walk over the same arcs in the same order; so both give the same units, and the same proof where
// the caps are too small.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace {

constexpr int64_t NEVER = int64_t{1} << 60;
constexpr int64_t FAR_MAX = NEVER / 2;
enum Outcome : int32_t { DONE = 0, SHORTAGE = 1, NEGATIVE_CYCLE = 2, NO_MEMORY = 3, UNEVEN = 4 };

}  // namespace

// What Python hands over: a redistribution. Tables of int64, but for those of bytes.
struct SpareChains {
  int64_t layers;
  int64_t groups;
  int64_t units;          // of each shard
  int64_t hop;
  int64_t move;
  const int64_t* hosts;   // group of shard i at layer l
  const int64_t* stacks;  // shard of group g at layer l
  const uint8_t* among;   // by shard: whether that group hosts the shard and lives
  const uint8_t* live;    // [groups]
  const int64_t* kept;    // units by shard that live groups owned
  const int64_t* extra;   // cost by shard of a unit beyond those, or null for 0
  const int64_t* caps;    // [groups]
  int64_t* owned;         // units by shard: the outcome
  int64_t* shard_far;     // [groups]: distances, at the end those behind the outcome
  int64_t* group_far;     // [groups]
};

// And who had which piece, for those who have it now.
struct SparePieces {
  int64_t layers;
  int64_t groups;
  int64_t pieces;         // of each shard
  const int64_t* hosts;   // group of shard i at layer l
  const uint8_t* real;    // by shard: whether that group hosts the shard; null where all do
  const int64_t* before;  // units by shard that groups owned
  const int64_t* owned;   // units by shard that they own now
  int32_t* owner;         // [groups, pieces]: group of piece j of shard i
};

namespace {

class Run {
 public:
  explicit Run(const SpareChains& job)
      : j_(job),
        cells_(job.layers * job.groups),
        take_(cells_),
        give_(cells_),
        room_(job.caps, job.caps + job.groups),
        waiting_(job.groups, job.units),
        following_(2 * job.groups),
        waits_(2 * job.groups) {
    const int64_t n = j_.groups, give = j_.move * j_.hop + 1;
    for (int64_t base = 0; base < cells_; base += n)
      for (int64_t shard = 0; shard < n; ++shard) {
        const int64_t cell = base + shard, group = j_.hosts[cell], kept = j_.kept[cell];
        take_[cell] = j_.among[cell] ? extra_of(cell) * j_.hop + 1 : NEVER;
        give_[base + group] = kept > 0 ? give : NEVER;
        room_[group] -= kept;
        waiting_[shard] -= kept;
      }
    std::copy(j_.kept, j_.kept + cells_, j_.owned);
    for (int64_t group = 0; group < n; ++group)
      if (!j_.live[group]) room_[group] = 0;
  }

  Outcome run() {
    std::vector<int64_t> shards, groups;
    while (true) {
      shards.clear();
      groups.clear();
      for (int64_t n = 0; n < j_.groups; ++n) {
        if (waiting_[n] != 0) shards.push_back(n);
        if (room_[n] < 0) groups.push_back(n);
      }
      if (shards.empty() && groups.empty()) return DONE;
      if (!measure()) return NEGATIVE_CYCLE;
      for (int64_t shard : shards)
        if (j_.shard_far[shard] > FAR_MAX) return SHORTAGE;
      for (int64_t group : groups)
        if (j_.group_far[group] > FAR_MAX) return SHORTAGE;
      for (int64_t n = 0; n < j_.groups; ++n) following_[n] = following_[j_.groups + n] = n;
      for (int64_t shard : shards) {
        int64_t wanted = waiting_[shard];
        while (wanted && walk(shard)) wanted -= move_along(wanted);
        waiting_[shard] = wanted;
      }
      for (int64_t group : groups)
        while (room_[group] < 0 && walk(j_.groups + group)) room_[group] += move_along(-room_[group]);
    }
  }

 private:
  // Bellman-Ford, which goes on from what became nearer only. False: there is a cycle of negative length.
  bool measure() {
    const int64_t n = j_.groups;
    nearer_.clear();
    for (int64_t i = 0; i < n; ++i) {
      j_.group_far[i] = room_[i] > 0 ? 0 : NEVER;
      j_.shard_far[i] = NEVER;
      if (room_[i] > 0) nearer_.push_back(n + i);
    }
    for (int64_t round = 0; round < 2 * n + 2; ++round) {
      if (nearer_.empty()) return true;
      now_.swap(nearer_);
      nearer_.clear();
      for (int64_t node : now_) waits_[node] = false;
      for (int64_t node : now_) {
        if (node >= n) {
          for (int64_t cell = node - n; cell < cells_; cell += n) {
            const int64_t shard = j_.stacks[cell];
            lower(j_.shard_far, shard, take_[cell - (node - n) + shard] + j_.group_far[node - n], shard);
          }
        } else {
          for (int64_t cell = node; cell < cells_; cell += n) {
            const int64_t group = j_.hosts[cell];
            lower(j_.group_far, group, give_[cell - node + group] + j_.shard_far[node], n + group);
          }
        }
      }
    }
    return false;
  }

  void lower(int64_t* far, int64_t at, int64_t over, int64_t node) {
    if (over >= far[at]) return;
    far[at] = over;
    if (!waits_[node]) {
      waits_[node] = true;
      nearer_.push_back(node);
    }
  }

  // path_: a chain from `start` to a group with room; false where there is none.
  bool walk(int64_t start) {
    const int64_t n = j_.groups;
    path_.clear();
    int64_t node = start;
    while (true) {
      const bool takes = node < n;
      const int64_t own = takes ? node : node - n;
      const int64_t far = takes ? j_.shard_far[own] : j_.group_far[own];
      if (!takes && far == 0 && room_[own] > 0) {
        path_.emplace_back(node, -1);
        return true;
      }
      const std::vector<int64_t>& length = takes ? take_ : give_;
      const int64_t* to = takes ? j_.hosts : j_.stacks;
      const int64_t* there = takes ? j_.group_far : j_.shard_far;
      // Every arc has a length, so none is exact at a group that had room and is full now.
      int64_t at = takes || far ? following_[node] : cells_;
      while (at < cells_ && length[at] + there[to[at]] != far) at += n;
      following_[node] = at;
      if (at < cells_) {
        path_.emplace_back(node, at);
        node = (takes ? n : 0) + to[at];
      } else if (!path_.empty()) {
        node = path_.back().first;
        path_.pop_back();
        following_[node] += n;
      } else {
        return false;
      }
    }
  }

  // Moves as many units along path_ as its arcs and the room at its end allow, at most `wanted`; returns how many.
  int64_t move_along(int64_t wanted) {
    const int64_t n = j_.groups, end = path_.back().first - n;
    int64_t amount = wanted < room_[end] ? wanted : room_[end];
    for (std::size_t hop = 0; hop + 1 < path_.size(); ++hop) {
      const auto [node, arc] = path_[hop];
      const int64_t cell = cell_of(node, arc), above = j_.owned[cell] - j_.kept[cell];
      if (node >= n) {
        const int64_t most = above > 0 ? above : j_.owned[cell];
        if (most < amount) amount = most;
      } else if (above < 0 && -above < amount) {
        amount = -above;
      }
    }
    for (std::size_t hop = 0; hop + 1 < path_.size(); ++hop) {
      const auto [node, arc] = path_[hop];
      const int64_t cell = cell_of(node, arc);
      j_.owned[cell] += node < n ? amount : -amount;
      relength(cell);
    }
    room_[end] -= amount;
    return amount;
  }

  // Position by shard of what an arc of a node is about.
  int64_t cell_of(int64_t node, int64_t arc) const {
    return node < j_.groups ? arc : arc - (node - j_.groups) + j_.stacks[arc];
  }

  void relength(int64_t cell) {
    const int64_t owned = j_.owned[cell], kept = j_.kept[cell], extra = extra_of(cell);
    take_[cell] = (owned < kept ? -j_.move : extra) * j_.hop + 1;
    const int64_t give = cell - cell % j_.groups + j_.hosts[cell];
    give_[give] = owned ? (owned > kept ? -extra : j_.move) * j_.hop + 1 : NEVER;
  }

  int64_t extra_of(int64_t cell) const { return j_.extra ? j_.extra[cell] : 0; }

  const SpareChains& j_;
  const int64_t cells_;
  std::vector<int64_t> take_;     // lengths by shard of the arcs to its hosts
  std::vector<int64_t> give_;     // lengths by group of the arcs to its shards
  std::vector<int64_t> room_;     // [groups]
  std::vector<int64_t> waiting_;  // [groups]: units of each shard that nobody owns
  std::vector<int64_t> following_, nearer_, now_;
  std::vector<char> waits_;
  std::vector<std::pair<int64_t, int64_t>> path_;
};

// Of each shard every host keeps its first pieces, and the freed ones go to the hosts that gain, in layer order. UNEVEN:
// more are freed than gained.
Outcome hand_over(const SparePieces& j) {
  std::vector<int64_t> left(j.layers);
  for (int64_t shard = 0; shard < j.groups; ++shard) {
    bool changed = false;
    for (int64_t layer = 0; layer < j.layers; ++layer) {
      const int64_t cell = layer * j.groups + shard;
      left[layer] = j.owned[cell];
      changed |= j.owned[cell] != j.before[cell];
    }
    if (!changed) continue;
    int64_t gains_at = 0, gained = 0;
    int32_t* owner = j.owner + shard * j.pieces;
    for (int64_t piece = 0; piece < j.pieces; ++piece) {
      int64_t layer = 0, cell = shard;
      for (; layer < j.layers; ++layer, cell += j.groups)
        if (j.hosts[cell] == owner[piece] && (!j.real || j.real[cell])) break;
      if (layer < j.layers && left[layer]-- > 0) continue;
      for (; gains_at < j.layers; ++gains_at, gained = 0) {
        const int64_t at = gains_at * j.groups + shard;
        if (gained < j.owned[at] - j.before[at]) break;
      }
      if (gains_at == j.layers) return UNEVEN;
      owner[piece] = static_cast<int32_t>(j.hosts[gains_at * j.groups + shard]);
      ++gained;
    }
  }
  return DONE;
}

}  // namespace

#ifdef __GNUC__
#define SPARE_EXPORT __attribute__((visibility("default")))
#else
#define SPARE_EXPORT
#endif

extern "C" {

// Grows when a struct or what it means changes; the Python package refuses a library with another number.
SPARE_EXPORT int32_t spare_chains_version(void) { return 2; }

SPARE_EXPORT int32_t spare_chains_run(const SpareChains* job) {
  try {
    return Run(*job).run();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

SPARE_EXPORT int32_t spare_chains_hand_over(const SparePieces* job) {
  try {
    return hand_over(*job);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // extern "C"
