// The candidates worth keeping for a part of a flow, and the two ways to join those of two parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rlinf::sched {

// Where what stands in a row of `width()` numbers, all to be minimised: devices taken of each pool, times at which
// items come out (first hand-over, middle, last item), second half, tail, period, what a further step adds, how long a
// step is held up and how far apart steps are that are not, weight sync, and for each pool bytes between turns and at
// the fullest.
struct Columns {
  int num_pools;
  int num_out;
  int num_edges;

  int first() const { return num_pools; }
  int last() const { return num_pools + num_out - 1; }
  int half() const { return last() + 1; }
  int tail() const { return last() + 2; }
  int period() const { return last() + 3; }
  int further() const { return period() + 1; }
  int held() const { return period() + 2; }
  int spaced() const { return held() + 1; }
  int sync() const { return spaced() + 1; }
  int switches() const { return sync() + 1; }
  int resident() const { return switches() + 1; }
  int peak() const { return resident() + num_pools; }
  int edges() const { return peak() + num_pools; }
  int width() const { return edges() + num_edges; }
};

// What keeps a row out of a front.
struct Limits {
  std::vector<double> devices;        // of each pool
  std::vector<double> memory;         // bytes of a device of each pool
  std::vector<double> rest_resident;  // most bytes that the rest of the flow may keep on a device of each pool
  std::vector<double> rest_peak;      // most bytes that one of its turns may need there
  int32_t steps_under_way;            // at most, at a time: 1, or more where generation may run ahead of training
  double bound_s;                     // a whole plan known to be this good; infinity for none
  double rest_area;                   // least device-seconds of the rest of the flow
  double tolerance_s;                 // times closer than this count as equal
  double tolerance_share;             // and numbers of devices, as a part of all of the pool
  bool may_mix;                       // whether a device may serve generation and training
  std::size_t most_rows;              // a front that would have more keeps those that differ more; 0: no limit
};

// Which of a row's two parts it came from and how they were joined.
struct Origin {
  int32_t kind;  // a JoinKind; -1: given
  int32_t before_part;
  int32_t before_row;
  int32_t after_row;
};

enum JoinKind : int32_t {
  kInTurn,       // on the same devices, the part after when the part before is done
  kSideBySide,   // on devices of their own, pipelined
  kInterleaved,  // on the same devices, pipelined: whichever has work, without offload
};

// How the candidates of two parts combine.
struct Join {
  int32_t kind;
  int32_t before_part;
  bool feeds;               // the part after takes items of the part before
  double moved_s;           // a hand-over from one to the other, when side by side
  double waits;             // interleaved: the share of the part after that is left to do when the part before is done
  std::vector<bool> syncs;  // of each weight edge: whether its two ends meet here
  double sync_latency_s;    // of one sync
  double sync_bytes_per_s;  // of one device's link
  bool mixes;               // one has training stages and the other generation stages
};

// A whole plan.
struct Whole {
  double step_s;
  double sync_s;
  bool is_mixed;
  Origin origin;
};

// Rows of which none is as good as another in every column. A row as good as an earlier one in all but the tolerances
// stays out. Memory counts only where, with the fullest that the rest of the flow may be, it exceeds the limit. Rows of
// different signature (where a worker group runs that has stages elsewhere too) do not compare.
class Front {
 public:
  Front(Columns columns, Limits limits, int num_groups);

  // Adds a row unless it does not fit, cannot beat the bound, or another is as good.
  bool offer(const double* row, const int64_t* signature, bool is_mixed, Origin origin);
  // Offers every pair of rows of two fronts. `forget`: groups that are complete in this part, whose signature is
  // dropped.
  void offer_joins(const Front& before, const Front& after, const Join& join, const std::vector<bool>& forget);

  // The best `count` pairs as whole plans, of those that mix generation and training on a device and of those that do
  // not.
  std::vector<Whole> best_joins(const Front& before, const Front& after, const Join& join, std::size_t count) const;

  // Seconds from the end of one step to that of the next, of a whole plan; of a part, no plan with it is quicker.
  double step_s(const double* row) const;

  std::size_t size() const { return origins_.size(); }
  const double* row(std::size_t i) const { return &rows_[i * columns_.width()]; }
  const int64_t* signature(std::size_t i) const { return signatures_.data() + i * num_groups_; }
  bool is_mixed(std::size_t i) const { return is_mixed_[i]; }
  Origin origin(std::size_t i) const { return origins_[i]; }
  // Whether rows were left out because there were too many.
  bool was_thinned() const { return was_thinned_; }
  const Columns& columns() const { return columns_; }

 private:
  bool fits(const double* row, bool mixed) const;
  bool keeps_bound(const double* row) const;
  template <typename Take>
  void for_each_join(const Front& before, const Front& after, const Join& join, const std::vector<bool>& forget,
                     Take take) const;
  void remove(std::size_t i);
  void swap(std::size_t i, std::size_t j);
  void make_key(const double* row, const int64_t* signature);
  bool insert(const double* row, const int64_t* signature, bool mixed, Origin origin);
  // Doubles the tolerances until half of the rows are left, or as few as differ in what has no tolerance.
  void thin();

  // What rows are compared by, eight of them side by side: [rows / 8][key columns][8].
  static constexpr std::size_t kLanes = 8;
  std::size_t key_at(std::size_t i, std::size_t column) const {
    return (i / kLanes * key_.size() + column) * kLanes + i % kLanes;
  }

  Columns columns_;
  Limits limits_;
  std::size_t num_groups_;
  double num_devices_;
  std::vector<double> rows_;
  std::vector<double> keys_;
  std::vector<int64_t> signatures_;
  std::vector<bool> is_mixed_;
  std::vector<Origin> origins_;
  std::vector<int> key_columns_;   // those that tell most rows apart first
  std::vector<double> tolerance_;  // of each key column
  std::vector<double> key_;        // of the row that is offered; the signature twice, once negative, to be equal
  std::vector<double> bound_;      // with the tolerances
  std::size_t most_rows_;
  bool was_thinned_ = false;
};

// The row of two parts joined; what the columns mean is in Columns, the algebra in docs/scheduling.md.
void join_rows(const Columns& columns, const Join& join, int steps_under_way, const double* a, const double* b,
               double* row);

}  // namespace rlinf::sched
