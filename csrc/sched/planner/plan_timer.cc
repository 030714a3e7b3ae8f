#include "plan_timer.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "../simulator/simulator.h"

namespace rlinf::sched {

namespace {

bool share_devices(const Place& a, const Place& b) {
  for (std::size_t i = 0, j = 0; i < a.devices.size() && j < b.devices.size();) {
    if (a.devices[i] == b.devices[j]) {
      return true;
    }
    ++(a.devices[i] < b.devices[j] ? i : j);
  }
  return false;
}

}  // namespace

PlanTimer::PlanTimer(Model any, const std::vector<std::vector<double>>& tables, Traffic traffic)
    : model_(std::move(any)), traffic_(std::move(traffic)), stages_of_turn_(model_.turn_is_leased.size()) {
  model_.table.clear();
  for (const std::vector<double>& table : tables) {
    table_start_.push_back(static_cast<int64_t>(model_.table.size()));
    model_.table.insert(model_.table.end(), table.begin(), table.end());
  }
  for (std::size_t s = 0; s < model_.names.size(); ++s) {
    stages_of_turn_[model_.turn[s]].push_back(static_cast<int32_t>(s));
  }
}

int32_t PlanTimer::add(Place place) {
  std::pair<int32_t, int32_t> nodes{std::numeric_limits<int32_t>::max(), -1};
  for (int32_t device : place.devices) {
    nodes.first = std::min(nodes.first, traffic_.node_of[device]);
    nodes.second = std::max(nodes.second, traffic_.node_of[device]);
  }
  nodes_.push_back(nodes);
  places_.push_back(std::move(place));
  return static_cast<int32_t>(places_.size()) - 1;
}

double PlanTimer::step_s(const std::vector<int32_t>& numbers, double most_s) {
  std::vector<const Place*> places;
  for (std::size_t s = 0; s < numbers.size(); ++s) {
    const Place& place = places_[numbers[s]];
    places.push_back(&place);
    model_.num_instances[s] = place.num_instances;
    model_.hand_over[s] = place.hand_over;
    model_.room[s] = place.room;
    model_.whole[s] = place.whole;
    model_.step_s[s] = place.step_s;
    model_.onload_s[s] = place.onload_s;
    model_.offload_s[s] = place.offload_s;
    model_.table_start[s] = table_start_[place.table];
  }
  set_turns(places);
  set_traffic(places);
  set_instances(places);
  try {
    // The first of steps that overlap may take longer than those that have settled.
    const double most_ends_s =
        model_.max_staleness > 0 ? std::numeric_limits<double>::infinity() : most_s * model_.num_steps;
    const std::vector<double> ends = Simulator(model_).run(most_ends_s).step_end_s;
    if (ends.empty()) {
      return std::numeric_limits<double>::infinity();
    }
    const std::size_t first_settled = model_.max_staleness > 0 ? ends.size() / 2 : 0;
    const double begins_s = first_settled > 0 ? ends[first_settled - 1] : 0.0;
    return (ends.back() - begins_s) / static_cast<double>(ends.size() - first_settled);
  } catch (const Standstill&) {
    return std::numeric_limits<double>::infinity();
  }
}

// Turns that share devices or offload need a lease.
void PlanTimer::set_turns(const std::vector<const Place*>& places) {
  model_.turn_device.clear();
  model_.turn_device_start.assign(1, 0);
  std::vector<uint8_t> num_turns(static_cast<std::size_t>(model_.num_devices), 0);
  for (const std::vector<int32_t>& stages : stages_of_turn_) {
    const auto begin = static_cast<int64_t>(model_.turn_device.size());
    for (int32_t s : stages) {
      const auto middle = static_cast<int64_t>(model_.turn_device.size());
      model_.turn_device.insert(model_.turn_device.end(), places[s]->devices.begin(), places[s]->devices.end());
      std::inplace_merge(model_.turn_device.begin() + begin, model_.turn_device.begin() + middle,
                         model_.turn_device.end());
    }
    model_.turn_device.erase(std::unique(model_.turn_device.begin() + begin, model_.turn_device.end()),
                             model_.turn_device.end());
    for (auto device = model_.turn_device.begin() + begin; device != model_.turn_device.end(); ++device) {
      num_turns[*device] = static_cast<uint8_t>(std::min(2, num_turns[*device] + 1));
    }
    model_.turn_device_start.push_back(static_cast<int32_t>(model_.turn_device.size()));
  }
  for (std::size_t t = 0; t < stages_of_turn_.size(); ++t) {
    const bool leaves = std::any_of(stages_of_turn_[t].begin(), stages_of_turn_[t].end(),
                                    [&](int32_t s) { return places[s]->onload_s >= 0; });
    const auto first = model_.turn_device.begin();
    model_.turn_is_leased[t] =
        leaves || std::any_of(first + model_.turn_device_start[t], first + model_.turn_device_start[t + 1],
                              [&](int32_t device) { return num_turns[device] > 1; });
  }
}

double PlanTimer::rate(const Place& here, const Place& there) const {
  const auto& [a, b] = nodes_[&here - places_.data()];
  const auto& [c, d] = nodes_[&there - places_.data()];
  return std::min(a, c) < std::max(b, d) ? traffic_.network_bytes_per_s : traffic_.node_bytes_per_s;
}

void PlanTimer::set_traffic(const std::vector<const Place*>& places) {
  for (std::size_t e = 0; e < model_.edge_source.size(); ++e) {
    const Place &here = *places[model_.edge_source[e]], &there = *places[model_.edge_target[e]];
    const bool apart = !(here.devices.empty() && there.devices.empty()) && !share_devices(here, there);
    model_.edge_latency_s[e] = apart ? traffic_.latency_s : 0.0;
    model_.edge_item_s[e] = apart ? traffic_.edge_bytes[e] / rate(here, there) : 0.0;
  }
  for (std::size_t i = 0; i < model_.sync_s.size(); ++i) {
    const Place &here = *places[traffic_.sync_ends[2 * i]], &there = *places[traffic_.sync_ends[2 * i + 1]];
    const double per_s = share_devices(here, there) ? traffic_.node_bytes_per_s : rate(here, there);
    const auto span = std::max<std::size_t>(1, there.devices.size() / static_cast<std::size_t>(there.num_instances));
    model_.sync_s[i] = traffic_.sync_latency_s[i] + traffic_.sync_bytes[i] / (per_s * static_cast<double>(span));
  }
}

// The next several of a stage's devices, or the one that an instance shares with other ranks.
void PlanTimer::set_instances(const std::vector<const Place*>& places) {
  model_.device.clear();
  model_.instance_node.clear();
  model_.device_start.assign(1, 0);
  for (const Place* place : places) {
    const auto num_devices = static_cast<int32_t>(place->devices.size());
    const bool shares = num_devices > 0 && num_devices < place->num_instances;
    for (int32_t rank = 0; rank < place->num_instances; ++rank) {
      const int32_t span = shares ? 1 : num_devices / place->num_instances;
      const int32_t first = shares ? rank / (place->num_instances / num_devices) : rank * span;
      model_.device.insert(model_.device.end(), place->devices.begin() + first, place->devices.begin() + first + span);
      model_.device_start.push_back(static_cast<int32_t>(model_.device.size()));
      model_.instance_node.push_back(num_devices > 0 ? traffic_.node_of[place->devices[first]] : 0);
    }
  }
}

}  // namespace rlinf::sched
