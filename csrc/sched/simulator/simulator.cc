#include "simulator.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "../interrupts.h"

namespace rlinf::sched {

namespace {

constexpr double kMoment = 1e-12;  // rounding of sums of a few thousand times stays below it

// Orders heaps of events: the earliest on top, of equal times the first that was pushed.
constexpr auto kLater = [](const auto& a, const auto& b) {
  return a.time > b.time || (a.time == b.time && a.order > b.order);
};

// Takes the earliest event off a heap.
template <class Event>
Event popped(std::vector<Event>& heap) {
  std::pop_heap(heap.begin(), heap.end(), kLater);
  const Event event = heap.back();
  heap.pop_back();
  return event;
}

}  // namespace

Simulator::Simulator(const Model& model) : model_(model), num_stages_(static_cast<int32_t>(model.names.size())) {
  const int32_t num_turns = static_cast<int32_t>(model.turn_is_leased.size());
  turns_.resize(num_turns);
  instance_start_.push_back(0);
  queue_start_.push_back(0);
  for (int32_t s = 0; s < num_stages_; ++s) {
    Turn& turn = turns_[model.turn[s]];
    turn.stages.push_back(s);
    turn.onload_s = std::max(turn.onload_s, model.onload_s[s]);
    turn.offload_s = std::max(turn.offload_s, model.offload_s[s]);
    for (int32_t rank = 0; rank < model.num_instances[s]; ++rank) {
      Instance instance;
      instance.stage = s;
      instance.rank = rank;
      instance.queue = queue_start_[s] + (model.by_key[s] ? rank : 0);
      instance.hand_over = model.hand_over[s];
      if (model.by_key[s]) {
        instance.hand_over = std::min(instance.hand_over, std::max(1, num_queue_items(s, rank)));
      }
      instances_.push_back(std::move(instance));
    }
    instance_start_.push_back(static_cast<int32_t>(instances_.size()));
    const int32_t num_queues = model.by_key[s] ? model.num_instances[s] : 1;
    queue_stage_.insert(queue_stage_.end(), num_queues, s);
    queue_start_.push_back(queue_start_.back() + num_queues);
  }
  num_queues_ = queue_start_.back();
  queues_.resize(static_cast<size_t>(num_queues_) * model.num_steps);
  queue_step_.assign(num_queues_, 0);
  queue_is_forced_.assign(num_queues_, 0);
  out_edges_.resize(num_stages_);
  num_first_.assign(num_stages_, 0);
  num_later_.assign(num_stages_, 0);
  for (Turn& turn : turns_) {
    turn.num_expected.assign(model.num_steps, 0);
  }
  for (size_t e = 0; e < model.edge_source.size(); ++e) {
    const int32_t source = model.edge_source[e], target = model.edge_target[e];
    out_edges_[source].push_back(static_cast<int32_t>(e));
    const bool is_inner = model.turn[source] == model.turn[target];
    num_first_[target] += !model.edge_is_back[e];
    num_later_[target] += is_inner;
    turns_[model.turn[target]].is_cycle |= is_inner;
    for (int64_t& expected : turns_[model.turn[target]].num_expected) {
      expected += is_inner ? 0 : model.num_items;
    }
  }
  missing_.resize(static_cast<size_t>(num_stages_) * model.num_steps);
  num_finished_.assign(missing_.size(), 0);
  num_owed_.assign(missing_.size(), 0);
  is_marked_.assign(num_stages_, 0);
  stage_span_.assign(num_stages_, -1);
  touched_.resize(num_stages_);
  device_is_busy_.assign(model.num_devices, 0);
  num_owing_.assign(missing_.size(), 0);
  idle_.assign(instances_.size() / 64 + 1, ~uint64_t{0});
  owing_.assign(idle_.size(), 0);
  device_span_.assign(model.num_devices, -1);
  device_end_.assign(model.num_devices, 0.0);
  std::vector<std::vector<int32_t>> turns_on(model.num_devices);
  for (int32_t t = 0; t < num_turns; ++t) {
    for (int32_t d = model.turn_device_start[t]; model.turn_is_leased[t] && d < model.turn_device_start[t + 1]; ++d) {
      for (int32_t other : turns_on[model.turn_device[d]]) {
        std::vector<int32_t>& rivals = turns_[t].rivals;
        if (std::find(rivals.begin(), rivals.end(), other) == rivals.end()) {
          rivals.push_back(other);
          turns_[other].rivals.push_back(t);
        }
      }
      turns_on[model.turn_device[d]].push_back(t);
    }
  }
  contends_.assign(num_stages_, 0);
  for (const Turn& turn : turns_) {
    std::vector<int32_t> users(model.num_devices, 0);
    for (int pass = 0; pass < 2; ++pass) {
      for (int32_t s : turn.stages) {
        for (int32_t d = model.device_start[instance_start_[s]]; d < model.device_start[instance_start_[s + 1]]; ++d) {
          users[model.device[d]] += pass == 0;
          contends_[s] |= users[model.device[d]] > 1;
        }
      }
    }
  }
  share_cores();
  is_synced_.assign(model.sync_s.size() * model.num_steps, 0);
  outcome_.step_end_s.assign(model.num_steps, 0.0);
  outcome_.step_cause.assign(model.num_steps, -1);
}

int32_t Simulator::num_queue_items(int32_t stage, int32_t rank) const {
  if (!model_.by_key[stage]) {
    return model_.num_items;
  }
  const int32_t count = model_.num_instances[stage];
  return (model_.num_items - rank + count - 1) / count;
}

Outcome Simulator::run(double most_s) {
  while (num_released_ < model_.num_steps && num_released_ <= model_.max_staleness) {
    release_step(num_released_++);
  }
  settle();
  while (!events_.empty()) {
    if (events_.front().time > most_s) {
      outcome_.step_end_s.clear();
      return std::move(outcome_);
    }
    const double limit = events_.front().time + kMoment * std::max(1.0, events_.front().time);
    while (!events_.empty() && events_.front().time <= limit) {
      const Event event = popped(events_);
      if (is_outdated(event)) {
        continue;
      }
      now_ = std::max(now_, event.time);
      poll_signals();
      handle(event);
    }
    settle();
  }
  if (num_ended_ < model_.num_steps) {
    stand_still();
  }
  return std::move(outcome_);
}

// Whether it was announced for another time since.
bool Simulator::is_outdated(const Event& event) const {
  switch (event.kind) {
    case Event::kEngine:
      return event.version != instances_[event.index].version;
    case Event::kHost:
      return event.version != hosts_[event.index].version;
    default:
      return false;
  }
}

void Simulator::push(double time, Event::Kind kind, int32_t index, int32_t version) {
  events_.push_back({time, num_pushed_++, kind, index, version});
  std::push_heap(events_.begin(), events_.end(), kLater);
}

void Simulator::handle(const Event& event) {
  switch (event.kind) {
    case Event::kEnd:
      end_work(instances_[event.index]);
      break;
    case Event::kEngine:
      let_leave(instances_[event.index]);
      break;
    case Event::kArrival: {
      Transfer& transfer = transfers_[event.index];
      for (const Entry& entry : transfer.entries) {
        arrive(transfer.edge, transfer.step, entry.item, entry.round, transfer.span);
      }
      const int32_t turn = model_.turn[model_.edge_target[transfer.edge]];
      turns_[turn].num_in_transit -= model_.turn[model_.edge_source[transfer.edge]] == turn;
      last_span_ = transfer.span;
      free_transfers_.push_back(event.index);
      break;
    }
    case Event::kLoaded:
      turns_[event.index].state = Turn::kHeld;
      turns_[event.index].loaded_at = now_;
      mark_turn(event.index);
      break;
    case Event::kLeft: {
      Turn& turn = turns_[event.index];
      turn.state = Turn::kAway;
      last_span_ = turn.last_span;
      mark_turn(event.index);
      break;
    }
    case Event::kSynced:
      is_synced_[event.index] = 1;
      running_sync_ = -1;
      last_span_ = event.version;
      break;
    case Event::kHost:
      pass_host(hosts_[event.index]);
      break;
  }
}

void Simulator::settle() {
  bool goes_on = true;
  while (goes_on) {
    for (int32_t s = 0; s < num_stages_; ++s) {
      if (is_marked_[s]) {
        is_marked_[s] = 0;
        start_stage(s);
      }
    }
    goes_on = pass_leases();
    goes_on |= pass_cycles();
    goes_on |= pass_steps();
    for (uint8_t is_marked : is_marked_) {
      goes_on |= is_marked != 0;
    }
  }
  announce_hosts();
}

// -- cores
// -------------------------------------------------------------------------------------------------------------

// Nodes whose processes may want more cores than there are get a clock.
void Simulator::share_cores() {
  if (model_.node_cores <= 0) {
    return;
  }
  std::vector<double> wanted;
  for (size_t i = 0; i < instances_.size(); ++i) {
    const auto node = static_cast<size_t>(model_.instance_node[i]);
    wanted.resize(std::max(wanted.size(), node + 1));
    const int32_t span = std::max(1, model_.device_start[i + 1] - model_.device_start[i]);
    instances_[i].cores = model_.cores[instances_[i].stage] * span;
    wanted[node] += instances_[i].cores;
  }
  hosts_.resize(wanted.size());
  for (size_t i = 0; i < instances_.size(); ++i) {
    const int32_t node = model_.instance_node[i];
    if (wanted[node] > model_.node_cores && instances_[i].cores > 0) {
      instances_[i].host = node;
    }
  }
}

// Seconds on the clock that the instance works by.
double Simulator::clock_of(const Instance& instance) const {
  if (instance.host < 0) {
    return now_;
  }
  const Host& host = hosts_[instance.host];
  return host.clock_s + (now_ - host.read_at) * host.rate;
}

void Simulator::advance_clock(Host& host) const {
  host.clock_s += (now_ - host.read_at) * host.rate;
  host.read_at = now_;
}

void Simulator::use_cores(const Instance& instance, bool value) {
  if (instance.host < 0) {
    return;
  }
  Host& host = hosts_[instance.host];
  advance_clock(host);
  host.wanted += value ? instance.cores : -instance.cores;
  host.rate = host.wanted > model_.node_cores ? model_.node_cores / host.wanted : 1.0;
  host.is_stale = true;
}

// An event of the instance after so many seconds of work.
void Simulator::push_after(double seconds, Event::Kind kind, const Instance& instance, int32_t version) {
  const int32_t index = index_of(instance.stage, instance.rank);
  if (instance.host < 0) {
    push(now_ + seconds, kind, index, version);
    return;
  }
  Host& host = hosts_[instance.host];
  host.events.push_back({clock_of(instance) + seconds, num_pushed_++, kind, index, version});
  std::push_heap(host.events.begin(), host.events.end(), kLater);
  host.is_stale = true;
}

void Simulator::announce_hosts() {
  for (size_t h = 0; h < hosts_.size(); ++h) {
    Host& host = hosts_[h];
    if (host.is_stale && !host.events.empty()) {
      advance_clock(host);
      const double left = std::max(0.0, host.events.front().time - host.clock_s);
      push(now_ + left / host.rate, Event::kHost, static_cast<int32_t>(h), ++host.version);
    }
    host.is_stale = false;
  }
}

// What is due by the clock.
void Simulator::pass_host(Host& host) {
  advance_clock(host);
  const double limit = std::max(host.clock_s, host.events.front().time) + kMoment * std::max(1.0, host.clock_s);
  std::vector<Event> due;
  while (!host.events.empty() && host.events.front().time <= limit) {
    due.push_back(popped(host.events));
  }
  host.is_stale = true;
  for (const Event& event : due) {
    if (!is_outdated(event)) {
      handle(event);
    }
  }
}

// -- items
// -------------------------------------------------------------------------------------------------------------

void Simulator::release_step(int32_t step) {
  for (int32_t s = 0; s < num_stages_; ++s) {
    const int64_t num_items = model_.num_items, rounds = model_.rounds[s];
    auto& missing = missing_[static_cast<size_t>(step) * num_stages_ + s];
    missing.assign(static_cast<size_t>(rounds * num_items), static_cast<uint8_t>(num_later_[s]));
    std::fill(missing.begin(), missing.begin() + num_items, static_cast<uint8_t>(num_first_[s]));
    for (int32_t q = queue_start_[s]; q < queue_start_[s + 1]; ++q) {
      Queue& queue = queue_at(step, q);
      queue.num_untaken = rounds * num_queue_items(s, q - queue_start_[s]);
      queue.entries.reserve(static_cast<size_t>(queue.num_untaken));
      if (queue.num_untaken == 0 && queue_step_[q] == step) {
        ++queue_step_[q];
      }
    }
  }
  for (int32_t s = 0; s < num_stages_; ++s) {
    if (num_first_[s] == 0) {
      for (int32_t item = 0; item < model_.num_items; ++item) {
        enqueue(s, {step, item, 1, last_span_, 0, now_});
      }
    }
  }
}

void Simulator::enqueue(int32_t stage, Entry entry) {
  const int32_t rank = model_.by_key[stage] ? entry.item % model_.num_instances[stage] : 0;
  queue_at(entry.step, queue_start_[stage] + rank).entries.push_back(entry);
  mark(stage);
}

void Simulator::arrive(int32_t edge, int32_t step, int32_t item, int32_t round, int32_t span) {
  const int32_t target = model_.edge_target[edge];
  Turn& turn = turns_[model_.turn[target]];
  if (model_.turn[model_.edge_source[edge]] != model_.turn[target]) {
    round = 1;
    --turn.num_expected[step];
    if (turn.is_cycle) {
      mark(target);
    }
  } else {
    round += model_.edge_is_back[edge];
  }
  auto& missing = missing_[static_cast<size_t>(step) * num_stages_ + target];
  if (--missing[static_cast<size_t>(round - 1) * model_.num_items + item] == 0) {
    const int32_t num_inputs = round == 1 ? num_first_[target] : num_later_[target];
    enqueue(target, {step, item, round, span, num_inputs == 1 ? outcome_.spans.rank[span] : 0, now_});
  }
}

// The entries are of one step.
void Simulator::hand_on(Instance& instance, const Entry* entries, int64_t count) {
  const int32_t step = entries->step;
  num_finished_[static_cast<size_t>(step) * num_stages_ + instance.stage] += count;
  for (int32_t edge : out_edges_[instance.stage]) {
    deliver(edge, step, entries, count, instance.span, instance.rank);
  }
}

void Simulator::deliver(int32_t edge, int32_t step, const Entry* entries, int64_t count, int32_t span, int32_t rank) {
  const int32_t source = model_.edge_source[edge], target = model_.edge_target[edge];
  const bool is_inner = model_.turn[source] == model_.turn[target];
  const int32_t last_round = model_.rounds[source];
  const auto goes = [&](const Entry& entry) {
    return is_inner ? !(model_.edge_is_back[edge] && entry.round == last_round) : entry.round == last_round;
  };
  const int64_t num_going = std::count_if(entries, entries + count, goes);
  if (num_going == 0) {
    return;
  }
  const double seconds = model_.edge_latency_s[edge] + static_cast<double>(num_going) * model_.edge_item_s[edge];
  if (seconds <= 0) {
    for (int64_t i = 0; i < count; ++i) {
      if (goes(entries[i])) {
        arrive(edge, step, entries[i].item, entries[i].round, span);
      }
    }
    return;
  }
  if (free_transfers_.empty()) {
    free_transfers_.push_back(static_cast<int32_t>(transfers_.size()));
    transfers_.emplace_back();
  }
  const int32_t index = free_transfers_.back();
  free_transfers_.pop_back();
  Transfer& transfer = transfers_[index];
  transfer.edge = edge;
  transfer.step = step;
  transfer.entries.clear();
  std::copy_if(entries, entries + count, std::back_inserter(transfer.entries), goes);
  transfer.span =
      outcome_.spans.add(source, rank, kTransfer, step, static_cast<int32_t>(num_going), span, now_, now_ + seconds);
  turns_[model_.turn[source]].num_in_transit += is_inner;
  push(now_ + seconds, Event::kArrival, index);
}

// -- what waits
// --------------------------------------------------------------------------------------------------------

void Simulator::stand_still() const {
  std::ostringstream text;
  text << "the simulation stands still at " << now_ << " s:";
  for (int32_t q = 0; q < num_queues_; ++q) {
    const int32_t s = queue_stage_[q], step = queue_step_[q];
    if (step == model_.num_steps) {
      continue;
    }
    const Queue& queue = queues_[static_cast<size_t>(step) * num_queues_ + q];
    text << "\n  - " << model_.names[s];
    if (model_.by_key[s]) {
      text << "/" << q - queue_start_[s];
    }
    const Turn& turn = turns_[model_.turn[s]];
    if (is_ready(q) && model_.turn_is_leased[model_.turn[s]] && turn.state != Turn::kHeld) {
      text << " waits for the lease of turn " << model_.turn[s];
      continue;
    }
    text << " waits for items of step " << step << ": " << queue.size() << " of "
         << (model_.whole[s] ? queue.num_untaken : std::min<int64_t>(model_.hand_over[s], queue.num_untaken))
         << " are there, from";
    for (size_t e = 0; e < model_.edge_target.size(); ++e) {
      if (model_.edge_target[e] == s) {
        text << " " << model_.names[model_.edge_source[e]];
      }
    }
    if (step >= num_released_) {
      text << " the driver";
    }
  }
  throw Standstill(text.str());
}

}  // namespace rlinf::sched
