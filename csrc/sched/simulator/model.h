// What the event core is given and what it returns: flat arrays, no names but those of the stages.
//
// Sizes: S stages in order of declaration, I instances (all stages', by stage and rank), N items, T turns in the order
// of the flow. Ragged lists are a `_start` array one longer than its subject and the values behind it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rlinf::sched {

enum Batching : int32_t { kSum = 0, kLongest = 1, kContinuous = 2 };

enum SpanKind : int32_t { kCompute = 0, kOnload = 1, kOffload = 2, kSync = 3, kTransfer = 4, kStep = 5 };

struct Model {
  int32_t num_items = 0;
  int32_t num_steps = 1;
  int32_t max_staleness = 0;
  int32_t num_devices = 0;

  std::vector<std::string> names;      // [S]
  std::vector<int32_t> batching;       // [S] Batching
  std::vector<int32_t> num_instances;  // [S]
  std::vector<int32_t> hand_over;      // [S] items per hand-over; continuous: handed on at a time
  std::vector<int32_t> room;           // [S] continuous: most items in an engine
  std::vector<int32_t> rounds;         // [S] equal in a turn
  std::vector<int32_t> turn;           // [S]
  std::vector<uint8_t> by_key;         // [S] item i belongs to instance i mod instances
  std::vector<uint8_t> whole;          // [S] starts when all items of the step are there
  std::vector<double> step_s;          // [S]
  std::vector<double> onload_s;        // [S] negative: stays on its devices
  std::vector<double> offload_s;       // [S]
  std::vector<int64_t> table_start;    // [S] seconds of n items: table[table_start + n - 1]
  std::vector<double> table;
  std::vector<double> costs;  // [steps, S, N]

  std::vector<int32_t> edge_source;    // [E] stages
  std::vector<int32_t> edge_target;    // [E]
  std::vector<uint8_t> edge_is_back;   // [E] within a cycle: feeds the target's next round
  std::vector<double> edge_latency_s;  // [E] of one hand-over
  std::vector<double> edge_item_s;     // [E] and of each of its items

  std::vector<int32_t> device_start;  // [I + 1]
  std::vector<int32_t> device;
  double node_cores = 0.0;             // that the processes of a node share; 0: they do not slow each other
  std::vector<double> cores;           // [S] that an instance keeps busy while it computes, for each of its devices
  std::vector<int32_t> instance_node;  // [I] whose cores those are
  std::vector<uint8_t> turn_is_leased;     // [T]
  std::vector<int32_t> turn_device_start;  // [T + 1] devices that it shares or leaves
  std::vector<int32_t> turn_device;

  std::vector<double> sync_s;              // [weight edges]
  std::vector<int32_t> sync_source_start;  // [weight edges + 1] the stages whose end it waits for
  std::vector<int32_t> sync_source;
};

// One array for each field; a span's number is its place. `cause` is the span whose end the start waited for last, or
// -1.
struct Spans {
  std::vector<int32_t> stage, rank, kind, step, num_items, width, cause;
  std::vector<double> start_s, end_s;

  int32_t add(int32_t stage_, int32_t rank_, SpanKind kind_, int32_t step_, int32_t num_items_, int32_t cause_,
              double start, double end) {
    stage.push_back(stage_);
    rank.push_back(rank_);
    kind.push_back(kind_);
    step.push_back(step_);
    num_items.push_back(num_items_);
    width.push_back(num_items_);
    cause.push_back(cause_);
    start_s.push_back(start);
    end_s.push_back(end);
    return static_cast<int32_t>(stage.size()) - 1;
  }
};

struct Outcome {
  Spans spans;
  std::vector<double> step_end_s;   // [steps]
  std::vector<int32_t> step_cause;  // [steps] the span that ended the step
  int64_t num_events = 0;           // starts and ends of hand-overs, items leaving an engine, lease changes
};

}  // namespace rlinf::sched
