#include "front.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "../interrupts.h"

namespace rlinf::sched {

namespace {

constexpr int64_t kNoSignature = -1;

double sum_of_devices(const Columns& c, const double* row) {
  return std::accumulate(row, row + c.num_pools, 0.0);
}

// Two doubles in one register; a comparison gives -1 where it holds.
using Pair = double __attribute__((vector_size(16)));
using PairMask = int64_t __attribute__((vector_size(16)));

// A bit for each of eight rows side by side: whether each of its columns is at most the bound, or at least.
template <bool at_most>
unsigned eight_rows(const double* keys, const double* bounds, std::size_t num_columns) {
  PairMask good[4] = {{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
  for (std::size_t k = 0; k < num_columns; ++k) {
    const Pair bound = {bounds[k], bounds[k]};
    PairMask any = {0, 0};
    for (std::size_t i = 0; i < 4; ++i) {
      Pair pair;
      std::memcpy(&pair, keys + 8 * k + 2 * i, sizeof(pair));
      good[i] &= at_most ? pair <= bound : pair >= bound;
      any |= good[i];
    }
    if ((any[0] | any[1]) == 0)
      return 0;
  }
  unsigned result = 0;
  for (unsigned row = 0; row < 8; ++row) result |= static_cast<unsigned>(good[row / 2][row % 2] & 1) << row;
  return result;
}

}  // namespace

void join_rows(const Columns& c, const Join& join, int steps_under_way, const double* a, const double* b,
               double* row) {
  const bool in_turn = join.kind == kInTurn, same_devices = join.kind != kSideBySide;
  for (int p = 0; p < c.num_pools; ++p) {
    const int resident = c.resident() + p, peak = c.peak() + p;
    if (same_devices) {
      row[p] = std::max(a[p], b[p]);
      row[resident] = a[resident] + b[resident];
      row[peak] = std::max(a[peak] + b[resident], a[resident] + b[peak]);
    } else {
      row[p] = a[p] + b[p];
      row[resident] = std::max(a[resident], b[resident]);
      row[peak] = std::max(a[peak], b[peak]);
    }
  }
  const int first = c.first(), middle = first + 1, last = c.last(), half = c.half(), tail = c.tail();
  if (in_turn) {
    for (int i = first; i <= last; ++i) row[i] = a[last] + b[i];
    row[half] = a[half] + b[last];
    row[tail] = a[tail] + b[last];
  } else if (same_devices) {
    for (int i = first; i <= last; ++i) row[i] = a[i] + b[i];
    for (int i = half; i <= tail; ++i) row[i] = a[i] + std::max(b[i], b[i] + (b[last] - b[i]) * join.waits);
  } else if (join.feeds) {
    // The part after is done no sooner than what came last, the second half since its middle came, and all since the
    // first came are served: a maximum-plus convolution at three points, rising in every number.
    row[first] = a[first] + b[first] + join.moved_s;
    row[middle] = std::max(a[middle] + b[first], a[first] + b[middle]) + join.moved_s;
    row[last] = std::max({a[last] + b[tail], a[middle] + b[half], a[first] + b[last]}) + join.moved_s;
    row[half] = std::max(a[half] + b[tail], a[first] + b[half]) + join.moved_s;
    row[tail] = a[tail] + b[tail] + join.moved_s;
  } else {
    for (int i = first; i <= tail; ++i) row[i] = std::max(a[i], b[i]);
  }
  // On the same devices, the part before takes all steps that are under way before it lets the part after have them.
  const int period = c.period(), further = c.further(), held = c.held(), spaced = c.spaced();
  const int num_more = steps_under_way - 1;
  if (same_devices) {
    row[further] = a[further] + b[further];
    row[period] = (row[last] + num_more * row[further]) / steps_under_way;
    row[held] = num_more * a[further] + b[held];
    row[spaced] = row[last];
  } else {
    row[further] = std::max({a[further], b[further], a[period], b[period]});
    row[period] = num_more > 0 ? std::max(a[period], b[period]) : row[last];
    row[held] = join.feeds ? a[held] + b[held] : std::max(a[held], b[held]);
    row[spaced] = std::max(a[spaced], b[spaced]);
  }
  row[c.sync()] = a[c.sync()] + b[c.sync()];
  row[c.switches()] = std::max(a[c.switches()], b[c.switches()]);
  for (int e = 0; e < c.num_edges; ++e) {
    const int edge = c.edges() + e;
    row[edge] = std::max(a[edge], b[edge]);
    if (join.syncs[e]) {
      row[c.sync()] += join.sync_latency_s + row[edge] / join.sync_bytes_per_s;
      row[edge] = 0;
    }
  }
}

Front::Front(Columns columns, Limits limits, int num_groups)
    : columns_(columns),
      limits_(std::move(limits)),
      num_groups_(num_groups),
      num_devices_(std::accumulate(limits_.devices.begin(), limits_.devices.end(), 0.0)),
      most_rows_(limits_.most_rows) {
  const Columns& c = columns_;
  const auto add = [this](int column, double tolerance) {
    key_columns_.push_back(column);
    tolerance_.push_back(tolerance);
  };
  add(c.last(), limits_.tolerance_s);
  for (int p = 0; p < c.num_pools; ++p) add(p, limits_.tolerance_share * limits_.devices[p]);
  for (int i = c.half(); i <= c.sync(); ++i) {
    if (limits_.steps_under_way > 1 || i < c.period() || i > c.spaced())  // those say nothing new
      add(i, limits_.tolerance_s);
  }
  for (int i = c.first(); i < c.last(); ++i) add(i, limits_.tolerance_s);
  for (int i = c.switches(); i < c.width(); ++i) add(i, 0.0);
  tolerance_.resize(tolerance_.size() + 2 * num_groups_, 0.0);
  key_.resize(tolerance_.size());
  bound_.resize(tolerance_.size());
}

bool Front::fits(const double* row, bool mixed) const {
  const Columns& c = columns_;
  if (mixed && !limits_.may_mix)
    return false;
  for (int p = 0; p < c.num_pools; ++p) {
    if (row[p] > limits_.devices[p] || row[c.peak() + p] > limits_.memory[p])
      return false;
  }
  return true;
}

bool Front::keeps_bound(const double* row) const {
  const Columns& c = columns_;
  if (!std::isfinite(limits_.bound_s))
    return true;
  // Parts are rectangles of devices and time that tile the step's: what a part wastes, the whole wastes.
  const double least = (sum_of_devices(c, row) * row[c.period()] + limits_.rest_area) / num_devices_;
  return std::max(least, step_s(row)) <= limits_.bound_s * (1 + 1e-9);
}

double Front::step_s(const double* row) const {
  const Columns& c = columns_;
  const int count = limits_.steps_under_way;
  const double alone = row[c.last()] + row[c.sync()];
  if (count == 1)
    return alone;
  // Weights move when their source has left its devices: after all the steps that it took in one go.
  const double busy = row[c.period()] + row[c.switches()] * row[c.sync()] / count;
  // No more steps than that are under way. Begun together they hold each other up; evenly spaced they do not, if each
  // is through what shares devices before the next one comes.
  const double together = (alone + row[c.held()]) / count, spaced = std::max(alone / count, row[c.spaced()]);
  return std::max({busy, row[c.sync()], std::min(together, spaced)});
}

// Memory that cannot exceed the limit counts as 0.
void Front::make_key(const double* row, const int64_t* signature) {
  const Columns& c = columns_;
  for (std::size_t k = 0; k < key_columns_.size(); ++k) key_[k] = row[key_columns_[k]];
  for (int p = 0; p < c.num_pools; ++p) {
    const std::size_t first = key_columns_.size() - c.width();  // key columns from `switches` on are in the row's order
    double& resident = key_[first + c.resident() + p];
    double& peak = key_[first + c.peak() + p];
    if (resident + limits_.rest_resident[p] + limits_.rest_peak[p] <= limits_.memory[p])
      resident = 0;
    if (peak + limits_.rest_resident[p] <= limits_.memory[p])
      peak = 0;
  }
  for (std::size_t g = 0; g < num_groups_; ++g) {
    const double number = static_cast<double>(signature[g]);
    key_[key_columns_.size() + 2 * g] = number;
    key_[key_columns_.size() + 2 * g + 1] = -number;
  }
}

bool Front::offer(const double* row, const int64_t* signature, bool mixed, Origin origin) {
  poll_signals();
  if (!fits(row, mixed) || !keeps_bound(row) || !insert(row, signature, mixed, origin))
    return false;
  if (most_rows_ != 0 && size() > most_rows_)
    thin();
  return true;
}

void Front::thin() {
  constexpr int kMostDoublings = 12;
  was_thinned_ = true;
  for (int i = 0; i < kMostDoublings && 2 * size() > most_rows_; ++i) {
    for (double& tolerance : tolerance_) tolerance *= 2;
    const std::size_t width = columns_.width();
    const std::vector<double> rows = std::exchange(rows_, {});
    const std::vector<int64_t> signatures = std::exchange(signatures_, {});
    const std::vector<bool> is_mixed = std::exchange(is_mixed_, {});
    const std::vector<Origin> origins = std::exchange(origins_, {});
    keys_.clear();
    std::vector<std::size_t> order(origins.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      const double left = rows[a * width + columns_.last()], right = rows[b * width + columns_.last()];
      return left != right ? left < right : a < b;
    });
    for (std::size_t k : order) insert(&rows[k * width], signatures.data() + k * num_groups_, is_mixed[k], origins[k]);
  }
  most_rows_ = std::max(most_rows_, 2 * size());
}

// Adds a row unless another is as good.
bool Front::insert(const double* row, const int64_t* signature, bool mixed, Origin origin) {
  make_key(row, signature);
  const std::size_t num_columns = key_.size(), width = columns_.width();
  double* bound = bound_.data();
  for (std::size_t k = 0; k < num_columns; ++k) bound[k] = key_[k] + tolerance_[k];
  for (std::size_t block = 0; block < size(); block += kLanes) {
    const double* keys = &keys_[block * num_columns];
    const unsigned good = eight_rows<true>(keys, bound, num_columns);
    if (good == 0)
      continue;
    std::size_t i = block;
    while (!(good >> (i - block) & 1)) ++i;
    swap(i, i / 2);  // what beat one row will beat the next: look there first
    return false;
  }
  for (std::size_t block = (size() + kLanes - 1) / kLanes; block-- > 0;) {
    const unsigned worse = eight_rows<false>(&keys_[block * kLanes * num_columns], key_.data(), num_columns);
    for (std::size_t lane = kLanes; worse != 0 && lane-- > 0;) {
      if (worse >> lane & 1 && block * kLanes + lane < size())
        remove(block * kLanes + lane);
    }
  }
  const std::size_t at = size();
  if (at % kLanes == 0)
    keys_.resize(keys_.size() + kLanes * num_columns, std::numeric_limits<double>::infinity());
  for (std::size_t k = 0; k < num_columns; ++k) keys_[key_at(at, k)] = key_[k];
  rows_.insert(rows_.end(), row, row + width);
  signatures_.insert(signatures_.end(), signature, signature + num_groups_);
  is_mixed_.push_back(mixed);
  origins_.push_back(origin);
  return true;
}

void Front::swap(std::size_t i, std::size_t j) {
  if (i == j)
    return;
  const std::size_t width = columns_.width();
  for (std::size_t k = 0; k < key_.size(); ++k) std::swap(keys_[key_at(i, k)], keys_[key_at(j, k)]);
  std::swap_ranges(rows_.begin() + i * width, rows_.begin() + (i + 1) * width, rows_.begin() + j * width);
  std::swap_ranges(signatures_.begin() + i * num_groups_, signatures_.begin() + (i + 1) * num_groups_,
                   signatures_.begin() + j * num_groups_);
  const bool is_mixed = is_mixed_[i];
  is_mixed_[i] = is_mixed_[j];
  is_mixed_[j] = is_mixed;
  std::swap(origins_[i], origins_[j]);
}

void Front::remove(std::size_t i) {
  const std::size_t last = size() - 1;
  swap(i, last);
  for (std::size_t k = 0; k < key_.size(); ++k) keys_[key_at(last, k)] = std::numeric_limits<double>::infinity();
  rows_.resize(last * columns_.width());
  signatures_.resize(last * num_groups_);
  is_mixed_.pop_back();
  origins_.pop_back();
  if (last % kLanes == 0)
    keys_.resize(last * key_.size());
}

template <typename Take>
void Front::for_each_join(const Front& before, const Front& after, const Join& join, const std::vector<bool>& forget,
                          Take take) const {
  const Columns& c = columns_;
  std::vector<double> row(c.width());
  std::vector<int64_t> signature(num_groups_);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const double* a = before.row(i);
    for (std::size_t j = 0; j < after.size(); ++j) {
      const double* b = after.row(j);
      // Interleaved parts change places at every lull, and the times added up know nothing of a switch each time.
      bool may_join = join.kind != kInterleaved || (a[c.switches()] == 0 && b[c.switches()] == 0);
      for (std::size_t g = 0; g < num_groups_; ++g) {
        const int64_t left = before.signature(i)[g], right = after.signature(j)[g];
        may_join = may_join && (left == right || left == kNoSignature || right == kNoSignature);
        signature[g] = forget[g] ? kNoSignature : std::max(left, right);
      }
      if (!may_join)
        continue;
      join_rows(c, join, limits_.steps_under_way, a, b, row.data());
      const bool shares =
          join.kind != kSideBySide && join.mixes && sum_of_devices(c, a) > 0 && sum_of_devices(c, b) > 0;
      const bool mixed = before.is_mixed(i) || after.is_mixed(j) || shares;
      const Origin origin{join.kind, join.before_part, static_cast<int32_t>(i), static_cast<int32_t>(j)};
      take(row.data(), signature.data(), mixed, origin);
    }
  }
}

void Front::offer_joins(const Front& before, const Front& after, const Join& join, const std::vector<bool>& forget) {
  for_each_join(before, after, join, forget,
                [this](const double* row, const int64_t* signature, bool mixed, Origin origin) {
                  offer(row, signature, mixed, origin);
                });
}

std::vector<Whole> Front::best_joins(const Front& before, const Front& after, const Join& join,
                                     std::size_t count) const {
  const Columns& c = columns_;
  std::vector<Whole> best[2];
  for_each_join(before, after, join, std::vector<bool>(num_groups_, true),
                [&](const double* row, const int64_t*, bool mixed, Origin origin) {
                  poll_signals();
                  if (!fits(row, mixed) || !keeps_bound(row))
                    return;
                  std::vector<Whole>& list = best[mixed];
                  const double seconds = step_s(row);
                  if (list.size() == count && seconds >= list.back().step_s)
                    return;
                  const Whole whole{seconds, row[c.sync()], mixed, origin};
                  list.insert(std::upper_bound(list.begin(), list.end(), whole,
                                               [](const Whole& x, const Whole& y) { return x.step_s < y.step_s; }),
                              whole);
                  if (list.size() > count)
                    list.pop_back();
                });
  best[0].insert(best[0].end(), best[1].begin(), best[1].end());
  return best[0];
}

}  // namespace rlinf::sched
