#include "stage_times.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace rlinf::sched {

StageTimes::StageTimes(StageWork work, std::vector<double> fractions)
    : work_(std::move(work)), fractions_(std::move(fractions)) {
  const auto [least, most] = std::minmax_element(work_.costs.begin(), work_.costs.end());
  is_equal_ = *most - *least < 1e-12;
}

// Of a hand-over of the items from `begin` to `end`, beside one of as many items of mean cost.
double StageTimes::scale(int64_t begin, int64_t end) const {
  const auto first = work_.costs.begin() + begin, last = work_.costs.begin() + end;
  if (work_.batching == StageWork::kLongest)
    return *std::max_element(first, last);
  return std::accumulate(first, last, 0.0) / static_cast<double>(end - begin);
}

void StageTimes::make_hand_overs(int32_t size) {
  if (size == size_)
    return;
  size_ = size;
  hand_overs_.clear();
  const int64_t num_items = static_cast<int64_t>(work_.costs.size());
  for (int64_t begin = 0; begin < num_items; begin += size) {
    const int64_t end = std::min(begin + size, num_items);
    hand_overs_.push_back(work_.seconds[end - begin - 1] * (is_equal_ ? 1.0 : scale(begin, end)));
  }
}

// Each goes to the instance that is free first. As long as they end in the order in which they began, that is the one
// whose turn it is; from there on a heap knows.
void StageTimes::play_hand_overs(int32_t num_instances, int32_t num_steps) {
  const std::size_t of_a_step = hand_overs_.size(), num_hand_overs = of_a_step * num_steps;
  ends_.resize(num_hand_overs);
  const std::size_t count = std::min<std::size_t>(num_instances, num_hand_overs);
  for (std::size_t k = 0; k < count; ++k) ends_[k] = hand_overs_[k % of_a_step];
  std::size_t i = count;
  ends_are_sorted_ = std::is_sorted(ends_.begin(), ends_.begin() + static_cast<int64_t>(count));
  for (; ends_are_sorted_ && i < num_hand_overs; ++i) {
    ends_[i] = ends_[i - count] + hand_overs_[i % of_a_step];
    ends_are_sorted_ = ends_[i] >= ends_[i - 1];
  }
  if (i == num_hand_overs)
    return;
  const auto later = std::greater<double>();
  free_.assign(ends_.begin() + static_cast<int64_t>(i - count), ends_.begin() + static_cast<int64_t>(i));
  std::make_heap(free_.begin(), free_.end(), later);
  for (; i < num_hand_overs; ++i) {
    const double end = free_.front() + hand_overs_[i % of_a_step];
    std::size_t at = 0;  // sinks from the top
    for (std::size_t child = 1; child < count; child = 2 * at + 1) {
      child += child + 1 < count && free_[child + 1] < free_[child];
      if (free_[child] >= end)
        break;
      free_[at] = free_[child];
      at = child;
    }
    free_[at] = ends_[i] = end;
  }
}

// Engine e is given the items e, e + engines, ...
void StageTimes::play_engines(int32_t num_engines) {
  if (num_engines == num_engines_)
    return;
  num_engines_ = num_engines;
  const int64_t num_items = static_cast<int64_t>(work_.costs.size());
  const int32_t share = static_cast<int32_t>((num_items + num_engines - 1) / num_engines);
  const int32_t room = work_.max_items ? std::min(work_.max_items, share) : share;
  if (work_.num_steps > 1) {
    play_crowded_engines(num_engines, room, work_.num_steps);
    all_s_ = ends_.back();
  }
  ends_are_sorted_ = true;
  if (room < share) {
    play_crowded_engines(num_engines, room, 1);
    return;
  }
  ends_.clear();
  std::vector<double> inside;
  for (int32_t e = 0; e < num_engines && e < num_items; ++e) {
    inside.clear();
    for (int64_t item = e; item < num_items; item += num_engines) inside.push_back(work_.costs[item]);
    std::sort(inside.begin(), inside.end());
    double now = 0.0, progress = 0.0;
    for (std::size_t i = 0; i < inside.size(); ++i) {
      now += (inside[i] - progress) * work_.seconds[inside.size() - i - 1];
      progress = inside[i];
      ends_.push_back(now);
    }
  }
  std::sort(ends_.begin(), ends_.end());
}

// Items wait for room: event by event. Each engine counts the progress that every item inside it has made since time 0;
// an item admitted at progress v leaves at v + its cost.
void StageTimes::play_crowded_engines(int32_t num_engines, int32_t room, int32_t num_steps) {
  ends_.clear();
  const std::size_t num_costs = work_.costs.size(), num_items = num_costs * num_steps;
  struct Engine {
    double progress = 0.0;
    std::vector<double> inside;
  };
  const auto later = std::greater<>();
  std::vector<Engine> engines(num_engines);
  std::size_t next = 0;
  for (int32_t i = 0; i < room; ++i) {
    for (Engine& engine : engines) {
      if (next < num_items)
        engine.inside.push_back(work_.costs[next++ % num_costs]);
    }
  }
  std::vector<std::pair<double, int32_t>> leaving;
  for (int32_t e = 0; e < num_engines; ++e) {
    std::vector<double>& inside = engines[e].inside;
    if (inside.empty())
      break;  // more engines than items
    std::make_heap(inside.begin(), inside.end(), later);
    leaving.emplace_back(inside.front() * work_.seconds[inside.size() - 1], e);
  }
  std::make_heap(leaving.begin(), leaving.end(), later);
  while (!leaving.empty()) {
    std::pop_heap(leaving.begin(), leaving.end(), later);
    const auto [end, e] = leaving.back();
    leaving.pop_back();
    Engine& engine = engines[e];
    std::vector<double>& inside = engine.inside;
    engine.progress = inside.front();
    ends_.push_back(end);
    std::pop_heap(inside.begin(), inside.end(), later);
    inside.pop_back();
    if (next < num_items) {
      inside.push_back(engine.progress + work_.costs[next++ % num_costs]);
      std::push_heap(inside.begin(), inside.end(), later);
    }
    if (!inside.empty()) {
      leaving.emplace_back(end + (inside.front() - engine.progress) * work_.seconds[inside.size() - 1], e);
      std::push_heap(leaving.begin(), leaving.end(), later);
    }
  }
}

double StageTimes::nth_end(int64_t n) {
  if (!ends_are_sorted_)
    std::nth_element(ends_.begin(), ends_.begin() + n, ends_.end());
  return ends_[n];
}

// All engines full, if that is any better than what they take for a step alone.
double StageTimes::engine_period(int32_t num_engines) const {
  const int64_t num_items = static_cast<int64_t>(work_.costs.size());
  const int64_t share = (num_items + num_engines - 1) / num_engines;
  const int64_t room = work_.max_items ? std::min<int64_t>(work_.max_items, share) : share;
  return work_.seconds[room - 1] * static_cast<double>(num_items) / static_cast<double>(room * num_engines);
}

// What lies ready adds no more than a step alone takes.
double StageTimes::further(double all_s, double one_s) const {
  return work_.num_steps > 1 ? std::clamp((all_s - one_s) / (work_.num_steps - 1), 0.0, one_s) : one_s;
}

void StageTimes::of(int32_t num_instances, int32_t size, double* out) {
  const int64_t num_items = static_cast<int64_t>(work_.costs.size());
  double* tail = out + fractions_.size();
  if (work_.batching == StageWork::kContinuous) {
    play_engines(num_instances);
    for (const double fraction : fractions_) {
      const int64_t count = std::llround(fraction * static_cast<double>(num_items));
      *out++ = nth_end(std::min<int64_t>(num_items, std::max<int64_t>(size, count)) - 1);
    }
    tail[0] = work_.seconds[0] * std::max(1.0, work_.costs.back());
    tail[1] = std::min(out[-1], engine_period(num_instances));
    tail[2] = further(all_s_, out[-1]);
    return;
  }
  make_hand_overs(size);
  double all_s = 0.0;
  if (work_.num_steps > 1) {
    play_hand_overs(num_instances, work_.num_steps);
    all_s = *std::max_element(ends_.begin(), ends_.end());
  }
  play_hand_overs(num_instances, 1);
  for (const double fraction : fractions_) {
    const auto count = static_cast<int64_t>(std::ceil(fraction * static_cast<double>(num_items) / size - 1e-9));
    *out++ = nth_end(std::max<int64_t>(count, 1) - 1);
  }
  tail[1] = std::accumulate(hand_overs_.begin(), hand_overs_.end(), 0.0) / num_instances;
  tail[2] = further(all_s, out[-1]);
  tail[0] = work_.seconds[size - 1] * (is_equal_ ? 1.0 : std::max(1.0, scale(num_items - size, num_items)));
}

}  // namespace rlinf::sched
