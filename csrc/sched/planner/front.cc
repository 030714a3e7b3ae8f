#include "front.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace rlinf::sched {

namespace {

constexpr int64_t kNoSignature = -1;

double sum_of_devices(const Columns& c, const double* row) {
  return std::accumulate(row, row + c.num_pools, 0.0);
}

}  // namespace

void join_rows(const Columns& c, const Join& join, const double* a, const double* b, double* row) {
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
  const int first = c.first(), last = c.last();
  if (in_turn) {
    for (int i = first; i <= last; ++i) row[i] = a[last] + b[i];
    row[c.tail()] = a[c.tail()] + b[last];
  } else if (same_devices) {
    for (int i = first; i <= c.tail(); ++i) row[i] = a[i] + b[i];
  } else if (join.feeds) {
    // The part after serves items in order. What arrives when a share of the items is out on both sides waits for the
    // rest at the even pace between its first hand-over and its last; a maximum-plus convolution, rising in every
    // number.
    for (int i = first; i <= last; ++i) {
      double end = i == last ? a[i] + b[c.tail()] : a[i] + b[first];
      for (int q = first; q < i; ++q) {
        const double left = 1.0 - static_cast<double>(q - first) / (i - first);
        end = std::max(end, a[q] + b[first] + (b[i] - b[first]) * left);
      }
      row[i] = end + join.moved_s;
    }
    row[c.tail()] = a[c.tail()] + join.moved_s + b[c.tail()];
  } else {
    for (int i = first; i <= c.tail(); ++i) row[i] = std::max(a[i], b[i]);
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
      scratch_(columns.width()) {}

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
  const double least = (sum_of_devices(c, row) * row[c.last()] + limits_.rest_area) / num_devices_;
  return std::max(least, row[c.last()] + row[c.sync()]) <= limits_.bound_s * (1 + 1e-9);
}

bool Front::compares(const double* a, const double* b, bool with_tolerance) const {
  const Columns& c = columns_;
  const double tolerance = with_tolerance ? limits_.tolerance_s : 0.0;
  for (int i = c.last(); i >= c.first(); --i) {
    if (a[i] > b[i] + tolerance)
      return false;
  }
  for (int i = 0; i < c.num_pools; ++i) {
    if (a[i] > b[i])
      return false;
  }
  for (int i = c.tail(); i <= c.sync(); ++i) {
    if (a[i] > b[i] + tolerance)
      return false;
  }
  for (int i = c.switches(); i < c.width(); ++i) {
    if (a[i] > b[i])
      return false;
  }
  return true;
}

bool Front::offer(const double* row, const int64_t* signature, bool mixed, Origin origin) {
  if (!fits(row, mixed) || !keeps_bound(row))
    return false;
  const Columns& c = columns_;
  const std::size_t width = c.width();
  double* seen = scratch_.data();
  std::copy(row, row + width, seen);
  for (int p = 0; p < c.num_pools; ++p) {
    double& resident = seen[c.resident() + p];
    double& peak = seen[c.peak() + p];
    if (resident + limits_.rest_resident[p] + limits_.rest_peak[p] <= limits_.memory[p])
      resident = 0;
    if (peak + limits_.rest_resident[p] <= limits_.memory[p])
      peak = 0;
  }
  const auto same_signature = [&](std::size_t i) {
    return std::equal(signature, signature + num_groups_, this->signature(i));
  };
  for (std::size_t i = 0; i < size(); ++i) {
    if (!compares(&seen_[i * width], seen, true) || !same_signature(i))
      continue;
    if (i > 0) {  // what beat one row will beat the next: look there first
      const std::size_t to = i / 2;
      std::swap_ranges(&rows_[i * width], &rows_[i * width] + width, &rows_[to * width]);
      std::swap_ranges(&seen_[i * width], &seen_[i * width] + width, &seen_[to * width]);
      if (num_groups_) {
        std::swap_ranges(&signatures_[i * num_groups_], &signatures_[i * num_groups_] + num_groups_,
                         &signatures_[to * num_groups_]);
      }
      const bool kept = is_mixed_[i];
      is_mixed_[i] = is_mixed_[to];
      is_mixed_[to] = kept;
      std::swap(origins_[i], origins_[to]);
    }
    return false;
  }
  for (std::size_t i = size(); i-- > 0;) {
    if (compares(seen, &seen_[i * width], false) && same_signature(i))
      remove(i);
  }
  rows_.insert(rows_.end(), row, row + width);
  seen_.insert(seen_.end(), seen, seen + width);
  signatures_.insert(signatures_.end(), signature, signature + num_groups_);
  is_mixed_.push_back(mixed);
  origins_.push_back(origin);
  return true;
}

void Front::remove(std::size_t i) {
  const std::size_t width = columns_.width(), last = size() - 1;
  std::copy_n(&rows_[last * width], width, &rows_[i * width]);
  std::copy_n(&seen_[last * width], width, &seen_[i * width]);
  std::copy_n(signatures_.begin() + last * num_groups_, num_groups_, signatures_.begin() + i * num_groups_);
  is_mixed_[i] = is_mixed_[last];
  origins_[i] = origins_[last];
  rows_.resize(last * width);
  seen_.resize(last * width);
  signatures_.resize(last * num_groups_);
  is_mixed_.pop_back();
  origins_.pop_back();
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
      join_rows(c, join, a, b, row.data());
      const bool shares =
          join.kind != kSideBySide && join.mixes && sum_of_devices(c, a) > 0 && sum_of_devices(c, b) > 0;
      const bool mixed = before.is_mixed(i) || after.is_mixed(j) || shares;
      const Origin origin{join.kind, join.before_part, static_cast<int32_t>(i), static_cast<int32_t>(j)};
      take(a, b, row.data(), signature.data(), mixed, origin);
    }
  }
}

void Front::offer_joins(const Front& before, const Front& after, const Join& join, const std::vector<bool>& forget) {
  for_each_join(before, after, join, forget,
                [this](const double*, const double*, const double* row, const int64_t* signature, bool mixed,
                       Origin origin) { offer(row, signature, mixed, origin); });
}

std::vector<Whole> Front::best_joins(const Front& before, const Front& after, const Join& join,
                                     std::size_t count) const {
  const Columns& c = columns_;
  std::vector<Whole> best[2];
  for_each_join(before, after, join, std::vector<bool>(num_groups_, true),
                [&](const double* a, const double* b, const double* row, const int64_t*, bool mixed, Origin origin) {
                  if (!fits(row, mixed))
                    return;
                  double step_s = row[c.last()] + row[c.sync()];
                  if (join.steps_under_way == 1) {
                    if (!keeps_bound(row))
                      return;
                  } else {  // the bound is a period, and steps overlap
                    const double sides = std::max(a[c.last()], b[c.last()] + row[c.sync()]);
                    step_s = std::max(sides, step_s / join.steps_under_way);
                    if (step_s > limits_.bound_s * (1 + 1e-9))
                      return;
                  }
                  std::vector<Whole>& list = best[mixed];
                  if (list.size() == count && step_s >= list.back().step_s)
                    return;
                  const Whole whole{step_s, row[c.sync()], mixed, origin};
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
