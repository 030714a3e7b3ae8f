// Instances: taking hand-overs, computing, handing on; and the engines of continuous batching.
#include <algorithm>

#include "simulator.h"

namespace rlinf::sched {

namespace {

constexpr double kSameProgress = 1e-12;

}  // namespace

bool Simulator::is_ready(int32_t q) const {
  if (queue_step_[q] >= model_.num_steps) {
    return false;
  }
  const Queue& queue = queues_[static_cast<size_t>(queue_step_[q]) * num_queues_ + q];
  const int32_t s = queue_stage_[q];
  const int64_t size = queue.size();
  if (size == 0 || size == queue.num_untaken || queue_is_forced_[q]) {
    return size > 0;
  }
  if (model_.whole[s]) {
    return false;
  }
  return model_.batching[s] == kContinuous ||
         size >= instances_[instance_start_[s] + (model_.by_key[s] ? q - queue_start_[s] : 0)].hand_over;
}

// What came since the last call came in one moment.
void Simulator::order_arrivals(Queue& queue) {
  if (queue.ordered == queue.entries.size()) {
    return;
  }
  std::sort(
      queue.entries.begin() + static_cast<int64_t>(queue.ordered), queue.entries.end(),
      [](const Entry& a, const Entry& b) { return a.sender != b.sender ? a.sender < b.sender : a.item < b.item; });
  queue.ordered = queue.entries.size();
}

void Simulator::start_stage(int32_t s) {
  for (int32_t q = queue_start_[s]; q < queue_start_[s + 1]; ++q) {
    for (int32_t step = queue_step_[q]; step < num_released_; ++step) {
      order_arrivals(queue_at(step, q));
    }
  }
  const int32_t begin = instance_start_[s], end = instance_start_[s + 1];
  if (first_owing_step(s) < model_.num_steps) {
    for (int32_t i = next_idle(begin, end, true); i < end; i = next_idle(i + 1, end, true)) {
      if (!may_compute(s)) {
        break;
      }
      if (devices_free(instances_[i])) {
        start_step(instances_[i]);
      }
    }
  }
  if (model_.batching[s] == kContinuous) {
    admit(s);
    go_on(s);
    return;
  }
  for (int32_t i = next_idle(begin, end, false); i < end; i = next_idle(i + 1, end, false)) {
    Instance& instance = instances_[i];
    if (!is_ready(instance.queue)) {
      if (model_.by_key[s]) {
        continue;
      }
      break;
    }
    if (!may_compute(s)) {
      break;
    }
    if (devices_free(instance)) {
      start_hand_over(instance);
    }
  }
}

bool Simulator::may_compute(int32_t stage) {
  const int32_t turn = model_.turn[stage];
  return !model_.turn_is_leased[turn] || turns_[turn].state == Turn::kHeld;
}

bool Simulator::devices_free(const Instance& instance) const {
  if (!contends_[instance.stage]) {
    return true;
  }
  const int32_t i = index_of(instance.stage, instance.rank);
  for (int32_t d = model_.device_start[i]; d < model_.device_start[i + 1]; ++d) {
    if (device_is_busy_[model_.device[d]]) {
      return false;
    }
  }
  return true;
}

void Simulator::set_bit(std::vector<uint64_t>& bits, int32_t i, bool value) {
  const uint64_t bit = uint64_t{1} << (i % 64);
  bits[i / 64] = value ? bits[i / 64] | bit : bits[i / 64] & ~bit;
}

bool Simulator::owes_step(const Instance& instance) const {
  const int32_t i = index_of(instance.stage, instance.rank);
  return owing_[i / 64] >> (i % 64) & 1;
}

// The first instance from `begin` on that is not busy and owes its step_s, or does not, or `end`.
int32_t Simulator::next_idle(int32_t begin, int32_t end, bool owes_step) const {
  while (begin < end) {
    const uint64_t owing = owing_[begin / 64];
    const uint64_t bits = (idle_[begin / 64] & (owes_step ? owing : ~owing)) >> (begin % 64);
    if (bits != 0) {
      return std::min(end, begin + __builtin_ctzll(bits));
    }
    begin = (begin / 64 + 1) * 64;
  }
  return end;
}

// Begins or ends computing on its devices.
void Simulator::occupy(Instance& instance, bool value) {
  const int32_t i = index_of(instance.stage, instance.rank);
  instance.is_busy = value;
  set_bit(idle_, i, !value);
  Turn& turn = turns_[model_.turn[instance.stage]];
  turn.num_computing += value ? 1 : -1;
  use_cores(instance, value);
  ++outcome_.num_events;
  for (int32_t d = model_.device_start[i]; d < model_.device_start[i + 1]; ++d) {
    const int32_t device = model_.device[d];
    device_is_busy_[device] = value;
    if (!value) {
      device_span_[device] = instance.span;
      device_end_[device] = now_;
    }
  }
  if (value) {
    return;
  }
  instance.last_span = instance.span;
  instance.last_end = now_;
  last_span_ = instance.span;
  stage_span_[instance.stage] = instance.span;
  mark(instance.stage);
  if (contends_[instance.stage]) {
    for (int32_t s : turn.stages) {
      mark(s);
    }
  }
}

// The latest of what a start may have waited for: the items, the lease, the instance and its devices.
int32_t Simulator::cause_of(const Instance& instance, int32_t cause, double time) const {
  const auto consider = [&](int32_t span, double end) {
    if (span >= 0 && (cause < 0 || end > time)) {
      cause = span;
      time = end;
    }
  };
  const Turn& turn = turns_[model_.turn[instance.stage]];
  consider(turn.load_span, turn.loaded_at);
  consider(instance.last_span, instance.last_end);
  const int32_t i = index_of(instance.stage, instance.rank);
  for (int32_t d = model_.device_start[i]; d < model_.device_start[i + 1]; ++d) {
    consider(device_span_[model_.device[d]], device_end_[model_.device[d]]);
  }
  return cause;
}

void Simulator::take(Instance& instance, int64_t count) {
  const int32_t step = queue_step_[instance.queue];
  Queue& queue = queue_at(step, instance.queue);
  instance.step = step;
  instance.taken.assign(queue.entries.begin() + static_cast<int64_t>(queue.head),
                        queue.entries.begin() + static_cast<int64_t>(queue.head) + count);
  queue.head += static_cast<size_t>(count);
  queue.num_untaken -= count;
  queue_is_forced_[instance.queue] = 0;
}

// After the last item of a step was taken: its instances owe their step_s, the queue serves the next step.
void Simulator::close_queue(int32_t q) {
  const int32_t step = queue_step_[q], s = queue_stage_[q];
  if (model_.step_s[s] > 0) {
    for (int32_t i = instance_start_[s]; i < instance_start_[s + 1]; ++i) {
      Instance& instance = instances_[i];
      if (instance.queue == q && instance.step == step) {
        set_bit(owing_, i, true);
        ++num_owing_[static_cast<size_t>(step) * num_stages_ + s];
        ++num_owed_[static_cast<size_t>(step) * num_stages_ + s];
      }
    }
  }
  do {
    ++queue_step_[q];
  } while (queue_step_[q] < num_released_ && queue_at(queue_step_[q], q).num_untaken == 0);
  mark(s);
}

void Simulator::start_hand_over(Instance& instance) {
  const int32_t s = instance.stage;
  Queue& queue = queue_at(queue_step_[instance.queue], instance.queue);
  const int64_t count = std::min<int64_t>(instance.hand_over, queue.size());
  take(instance, count);
  const double* costs =
      &model_.costs[(static_cast<size_t>(instance.step) * num_stages_ + s) * static_cast<size_t>(model_.num_items)];
  double scale = 0.0;
  for (const Entry& entry : instance.taken) {
    scale = model_.batching[s] == kSum ? scale + costs[entry.item] : std::max(scale, costs[entry.item]);
  }
  if (model_.batching[s] == kSum) {
    scale /= static_cast<double>(count);
  }
  const double seconds = model_.table[model_.table_start[s] + count - 1] * scale;
  const int32_t cause = cause_of(instance, instance.taken.back().cause, instance.taken.back().time);
  instance.span = outcome_.spans.add(s, instance.rank, kCompute, instance.step, static_cast<int32_t>(count), cause,
                                     now_, now_ + seconds);
  occupy(instance, true);
  push_after(seconds, Event::kEnd, instance);
  if (queue.num_untaken == 0) {
    close_queue(instance.queue);
  }
}

void Simulator::start_step(Instance& instance) {
  const double seconds = model_.step_s[instance.stage];
  const int32_t cause = cause_of(instance, -1, 0.0);
  instance.span =
      outcome_.spans.add(instance.stage, instance.rank, kStep, instance.step, 0, cause, now_, now_ + seconds);
  instance.in_step = true;
  set_bit(owing_, index_of(instance.stage, instance.rank), false);
  --num_owing_[static_cast<size_t>(instance.step) * num_stages_ + instance.stage];
  occupy(instance, true);
  push_after(seconds, Event::kEnd, instance);
}

void Simulator::end_work(Instance& instance) {
  if (instance.host >= 0) {
    outcome_.spans.end_s[instance.span] = now_;  // it may have been slowed
  }
  occupy(instance, false);
  if (instance.in_step) {
    instance.in_step = false;
    --num_owed_[static_cast<size_t>(instance.step) * num_stages_ + instance.stage];
  } else {
    hand_on(instance, instance.taken.data(), static_cast<int64_t>(instance.taken.size()));
  }
}

// -- engines
// -----------------------------------------------------------------------------------------------------------

bool Simulator::can_admit(const Instance& engine) const {
  if (owes_step(engine) || static_cast<int32_t>(engine.inside.size()) >= model_.room[engine.stage]) {
    return false;
  }
  return engine.is_busy ? !engine.in_step : devices_free(engine);
}

// Gives items to engines that hold none, in their order: those that are idle, and those whose last item left in this
// moment.
void Simulator::admit_to_empty(int32_t s) {
  const int32_t q = queue_start_[s], begin = instance_start_[s], end = instance_start_[s + 1];
  std::vector<int32_t>& emptied = emptied_;
  emptied.clear();
  for (int32_t rank : touched_[s]) {
    if (instances_[begin + rank].is_busy && instances_[begin + rank].inside.empty()) {
      emptied.push_back(begin + rank);
    }
  }
  std::sort(emptied.begin(), emptied.end());
  auto next_emptied = emptied.begin();
  int32_t idle = next_idle(begin, end, false);
  while (is_ready(q) && (idle < end || next_emptied != emptied.end())) {
    int32_t i = idle;
    if (next_emptied != emptied.end() && *next_emptied < idle) {
      i = *next_emptied++;
    } else {
      idle = next_idle(idle + 1, end, false);
    }
    if (can_admit(instances_[i])) {
      enter(instances_[i]);
    }
  }
}

// Gives each item to the emptiest engine, the first of equals. As engines only fill up here, the search goes on where
// the last one ended, level by level.
void Simulator::admit_any(int32_t s) {
  const int32_t q = queue_start_[s], begin = instance_start_[s], end = instance_start_[s + 1];
  if (is_ready(q)) {
    admit_to_empty(s);
  }
  if (!is_ready(q)) {
    return;
  }
  int32_t level = model_.room[s], i = begin;
  for (int32_t e = begin; e < end; ++e) {
    const int32_t size = static_cast<int32_t>(instances_[e].inside.size());
    if (size < level && can_admit(instances_[e])) {
      level = size;
    }
  }
  while (is_ready(q) && level < model_.room[s]) {
    for (; i < end; ++i) {
      if (static_cast<int32_t>(instances_[i].inside.size()) == level && can_admit(instances_[i])) {
        break;
      }
    }
    if (i == end) {
      ++level;
      i = begin;
      continue;
    }
    enter(instances_[i]);
  }
}

void Simulator::admit(int32_t s) {
  if (!may_compute(s)) {
    return;
  }
  if (model_.by_key[s]) {
    for (int32_t i = instance_start_[s]; i < instance_start_[s + 1]; ++i) {
      while (is_ready(instances_[i].queue) && can_admit(instances_[i])) {
        enter(instances_[i]);
      }
    }
  } else {
    admit_any(s);
  }
}

// A span is of the step whose items the engine takes in: with the first of a later step one ends and another begins,
// although some of the earlier step may still be inside.
void Simulator::begin_span(Instance& engine, const Entry& entry) {
  if (engine.is_busy) {
    outcome_.spans.end_s[engine.span] = now_;
    engine.last_span = engine.span;
    engine.last_end = now_;
  }
  const int32_t cause = cause_of(engine, entry.cause, entry.time);
  engine.span = outcome_.spans.add(engine.stage, engine.rank, kCompute, engine.step, 0, cause, now_, now_);
  if (!engine.is_busy) {
    engine.progress = 0.0;
    engine.progress_at = clock_of(engine);
    occupy(engine, true);
  }
}

void Simulator::enter(Instance& engine) {
  const int32_t s = engine.stage, last_step = engine.step;
  take(engine, 1);
  const Entry entry = engine.taken.front();
  if (!engine.is_busy || engine.step != last_step) {
    begin_span(engine, entry);
  }
  advance(engine);
  const double cost =
      model_.costs[(static_cast<size_t>(engine.step) * num_stages_ + s) * static_cast<size_t>(model_.num_items) +
                   entry.item];
  engine.inside.emplace_back(engine.progress + cost, entry);
  std::push_heap(engine.inside.begin(), engine.inside.end(),
                 [](const auto& a, const auto& b) { return a.first > b.first; });
  touch(engine);
  int32_t& width = outcome_.spans.width[engine.span];
  width = std::max(width, static_cast<int32_t>(engine.inside.size()));
  ++outcome_.spans.num_items[engine.span];
  if (queue_at(engine.step, engine.queue).num_untaken == 0) {
    close_queue(engine.queue);
  }
}

void Simulator::advance(Instance& engine) {
  const double clock_s = clock_of(engine);
  if (!engine.inside.empty() && clock_s > engine.progress_at) {
    const double seconds =
        model_.table[model_.table_start[engine.stage] + static_cast<int64_t>(engine.inside.size()) - 1];
    engine.progress += (clock_s - engine.progress_at) / seconds;
  }
  engine.progress_at = clock_s;
}

void Simulator::reschedule(Instance& engine) {
  const double seconds =
      model_.table[model_.table_start[engine.stage] + static_cast<int64_t>(engine.inside.size()) - 1];
  const double left = std::max(0.0, engine.inside.front().first - engine.progress);
  push_after(left * seconds, Event::kEngine, engine, ++engine.version);
}

void Simulator::let_leave(Instance& engine) {
  const auto after = [](const auto& a, const auto& b) { return a.first > b.first; };
  const size_t num_left = engine.left.size();
  advance(engine);
  engine.progress = engine.inside.front().first;
  const double limit = engine.progress + kSameProgress * std::max(1.0, engine.progress);
  while (!engine.inside.empty() && engine.inside.front().first <= limit) {
    engine.left.push_back(engine.inside.front().second);
    std::pop_heap(engine.inside.begin(), engine.inside.end(), after);
    engine.inside.pop_back();
    ++outcome_.num_events;
  }
  std::sort(engine.left.begin() + static_cast<int64_t>(num_left), engine.left.end(),
            [](const Entry& a, const Entry& b) { return a.item < b.item; });
  if (model_.max_staleness > 0) {
    std::stable_sort(engine.left.begin(), engine.left.end(),
                     [](const Entry& a, const Entry& b) { return a.step < b.step; });
  }
  last_span_ = engine.span;
  hand_on_left(engine, false);
  touch(engine);
  ++engine.version;
  mark(engine.stage);
}

// Hands on what left, in whole hand-overs; of steps of which nothing is inside any more, if asked for, the rest too.
void Simulator::hand_on_left(Instance& engine, bool and_rest) {
  std::vector<Entry>& left = engine.left;
  size_t kept = 0;
  for (size_t begin = 0, end = 0; begin < left.size(); begin = end) {
    const int32_t step = left[begin].step;
    while (end < left.size() && left[end].step == step) ++end;
    const bool is_done = and_rest && std::none_of(engine.inside.begin(), engine.inside.end(),
                                                  [&](const auto& one) { return one.second.step == step; });
    const size_t size = is_done ? end - begin : static_cast<size_t>(engine.hand_over);
    for (; end - begin >= size && begin < end; begin += size) {
      hand_on(engine, left.data() + begin, static_cast<int64_t>(size));
    }
    kept = static_cast<size_t>(std::copy(left.begin() + static_cast<int64_t>(begin),
                                         left.begin() + static_cast<int64_t>(end),
                                         left.begin() + static_cast<int64_t>(kept)) -
                               left.begin());
  }
  left.resize(kept);
}

void Simulator::touch(Instance& engine) {
  if (!engine.is_touched) {
    engine.is_touched = true;
    touched_[engine.stage].push_back(engine.rank);
  }
}

// Engines that changed in this moment get the time of their next leave; those that hold nothing more of a step and got
// nothing new of it hand on what is left.
void Simulator::go_on(int32_t s) {
  std::vector<int32_t>& ranks = touched_now_;
  ranks.clear();
  ranks.swap(touched_[s]);
  std::sort(ranks.begin(), ranks.end());
  for (int32_t rank : ranks) {
    Instance& engine = instances_[index_of(s, rank)];
    engine.is_touched = false;
    if (!engine.inside.empty()) {
      reschedule(engine);
    } else {
      outcome_.spans.end_s[engine.span] = now_;
      occupy(engine, false);
    }
    hand_on_left(engine, true);
  }
}

}  // namespace rlinf::sched
