// How long a step takes under many plans of one problem: the event core, fed without the interpreter.
//
// What plans of a problem have in common is read once; of each stage, places are made known once and go by a number.
#pragma once

#include <cstdint>
#include <vector>

#include "../simulator/model.h"

namespace rlinf::sched {

// Where and how a stage runs.
struct Place {
  std::vector<int32_t> devices;  // ascending; empty: on the host
  int32_t num_instances;
  int32_t hand_over;
  int32_t room;
  uint8_t whole;
  double step_s;
  double onload_s;  // negative: stays
  double offload_s;
  int32_t table;  // of seconds
};

// What moves between places, and how fast.
struct Traffic {
  std::vector<int32_t> node_of;     // of each device
  std::vector<double> edge_bytes;   // of one item on each edge of the model
  std::vector<double> sync_bytes;   // of each weight edge
  std::vector<double> sync_latency_s;
  std::vector<int32_t> sync_ends;   // [weight edges, 2] a stage of the group that sends, and of the one that receives
  double latency_s;
  double node_bytes_per_s;
  double network_bytes_per_s;
};

class PlanTimer {
 public:
  // `any`: the model of some plan of the problem, of which everything is replaced that differs between plans.
  PlanTimer(Model any, const std::vector<std::vector<double>>& tables, Traffic traffic);

  // Returns the place's number.
  int32_t add(Place place);

  // Seconds from the end of a step to the end of the next, the mean over the settled ones, with a place for each stage;
  // infinity where the plan stands still, or where its steps have not ended after `most_s` seconds each.
  double step_s(const std::vector<int32_t>& places, double most_s);

 private:
  void set_turns(const std::vector<const Place*>& places);
  void set_traffic(const std::vector<const Place*>& places);
  void set_instances(const std::vector<const Place*>& places);
  double rate(const Place& here, const Place& there) const;

  Model model_;
  Traffic traffic_;
  std::vector<int64_t> table_start_;
  std::vector<Place> places_;
  std::vector<std::pair<int32_t, int32_t>> nodes_;  // of each place: the first and the last
  std::vector<std::vector<int32_t>> stages_of_turn_;
};

}  // namespace rlinf::sched
