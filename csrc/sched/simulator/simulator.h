// Executes a plan event by event.
//
// Time moves from moment to moment; events closer than one part in 10^12 are one moment. At a moment, first everything
// that ends has ended and its items have arrived; then `settle` lets begin what can, stage by stage in order of
// declaration, rank by rank, until nothing more can. Items that arrive in one moment queue by their number. So no
// result depends on the order of events within a moment.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "model.h"

namespace rlinf::sched {

// Nothing can go on although the step is not over; what() says who waits for what.
class Standstill : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Simulator {
 public:
  explicit Simulator(const Model& model);

  // Executes all steps; what has not ended by `most_s` is left, and no step has an end then.
  Outcome run(double most_s = std::numeric_limits<double>::infinity());

 private:
  struct Event {
    double time;
    int64_t order;
    enum Kind : int32_t { kEnd, kEngine, kArrival, kLoaded, kLeft, kSynced, kHost } kind;
    int32_t index;
    int32_t version;
  };
  // An item of a step in a queue: the round it is in, what brought it and when.
  struct Entry {
    int32_t step;
    int32_t item;
    int32_t round;
    int32_t cause;
    int32_t sender;
    double time;
  };
  // Of one step. Entries before `head` are taken, those before `ordered` are in their final order.
  struct Queue {
    std::vector<Entry> entries;
    size_t head = 0;
    size_t ordered = 0;
    int64_t num_untaken = 0;  // not taken yet, arrived or not

    int64_t size() const { return static_cast<int64_t>(entries.size() - head); }
  };
  struct Instance {
    int32_t stage = 0;
    int32_t rank = 0;
    int32_t queue = 0;
    int32_t hand_over = 0;
    int32_t host = -1;  // whose cores it shares with others; -1: it has cores of its own
    double cores = 0.0;
    int32_t step = -1;  // of the last items taken
    bool is_busy = false;
    bool in_step = false;
    int32_t span = -1;
    int32_t last_span = -1;
    double last_end = 0.0;
    std::vector<Entry> taken;
    // Continuous batching: a heap by the progress at which each item leaves, perhaps of several steps; what left and
    // was not handed on, by step.
    std::vector<std::pair<double, Entry>> inside;
    std::vector<Entry> left;
    double progress = 0.0;
    double progress_at = 0.0;
    int32_t version = 0;
    bool is_touched = false;
  };
  struct Turn {
    enum State { kAway, kLoading, kHeld, kLeaving } state = kAway;
    std::vector<int32_t> stages;
    std::vector<int32_t> rivals;  // leased turns that have a device in common with it
    bool is_cycle = false;
    int32_t num_computing = 0;
    int32_t num_in_transit = 0;  // hand-overs between stages of the turn
    double onload_s = 0.0;
    double offload_s = 0.0;
    double loaded_at = 0.0;
    int32_t load_span = -1;
    int32_t last_span = -1;
    std::vector<int64_t> num_expected;  // [steps] items still to come from other turns
  };
  // The cores of a node that processes want more of than there are. All of them slow down alike, so they have a clock
  // in common: it runs by the second while there are cores enough, and slower when there are not.
  struct Host {
    double wanted = 0.0;  // cores
    double rate = 1.0;    // of the clock, a second
    double clock_s = 0.0;
    double read_at = 0.0;       // the time at which the clock showed `clock_s`
    std::vector<Event> events;  // a heap, by the clock
    int32_t version = 0;
    bool is_stale = false;  // the next of `events` is not announced, or for another time
  };
  struct Transfer {
    int32_t edge = 0;
    int32_t step = 0;
    int32_t span = 0;
    std::vector<Entry> entries;
  };

  // Moments.
  void push(double time, Event::Kind kind, int32_t index, int32_t version = 0);
  bool is_outdated(const Event& event) const;
  void announce_hosts();
  void pass_host(Host& host);
  void handle(const Event& event);
  void settle();
  [[noreturn]] void stand_still() const;

  // Items.
  void release_step(int32_t step);
  void arrive(int32_t edge, int32_t step, int32_t item, int32_t round, int32_t span);
  void enqueue(int32_t stage, Entry entry);
  void hand_on(Instance& instance, const Entry* entries, int64_t count);
  void deliver(int32_t edge, int32_t step, const Entry* entries, int64_t count, int32_t span, int32_t rank);

  // Stages and instances.
  int32_t num_queue_items(int32_t stage, int32_t rank) const;
  Queue& queue_at(int32_t step, int32_t queue) { return queues_[static_cast<size_t>(step) * num_queues_ + queue]; }
  bool is_ready(int32_t queue) const;
  bool has_work(const Turn& turn) const;
  int32_t first_step_with_work(const Turn& turn) const;
  int32_t first_owing_step(int32_t stage) const;
  static void order_arrivals(Queue& queue);
  void start_stage(int32_t stage);
  bool may_compute(int32_t stage);
  bool devices_free(const Instance& instance) const;
  static void set_bit(std::vector<uint64_t>& bits, int32_t i, bool value);
  bool owes_step(const Instance& instance) const;
  void occupy(Instance& instance, bool value);
  int32_t next_idle(int32_t begin, int32_t end, bool owes_step) const;
  int32_t cause_of(const Instance& instance, int32_t item_cause, double item_time) const;
  void start_hand_over(Instance& instance);
  void start_step(Instance& instance);
  void end_work(Instance& instance);
  void take(Instance& instance, int64_t count);
  void close_queue(int32_t queue);
  bool has_ended(int32_t stage, int32_t step) const;
  int32_t index_of(int32_t stage, int32_t rank) const { return instance_start_[stage] + rank; }

  // Cores.
  void share_cores();
  double clock_of(const Instance& instance) const;
  void advance_clock(Host& host) const;
  void use_cores(const Instance& instance, bool value);
  void push_after(double seconds, Event::Kind kind, const Instance& instance, int32_t version = 0);

  // Engines.
  void admit(int32_t stage);
  void admit_any(int32_t stage);
  void admit_to_empty(int32_t stage);
  bool can_admit(const Instance& engine) const;
  void enter(Instance& engine);
  void begin_span(Instance& engine, const Entry& entry);
  void advance(Instance& engine);
  void reschedule(Instance& engine);
  void let_leave(Instance& engine);
  void hand_on_left(Instance& engine, bool and_rest);
  void touch(Instance& engine);
  void go_on(int32_t stage);

  // Turns, syncs, steps.
  bool pass_leases();
  bool leave_turns();
  bool grant_turns();
  bool pass_cycles();
  bool pass_steps();
  bool start_sync();
  void mark(int32_t stage) { is_marked_[stage] = 1; }
  void mark_turn(int32_t turn);

  const Model& model_;
  Outcome outcome_;
  int32_t num_stages_;
  int32_t num_queues_ = 0;
  double now_ = 0.0;
  int64_t num_pushed_ = 0;
  std::vector<Event> events_;  // a heap
  std::vector<Instance> instances_;
  std::vector<int32_t> instance_start_;  // [S + 1]
  std::vector<int32_t> queue_start_;     // [S + 1]
  std::vector<int32_t> queue_stage_;
  std::vector<int32_t> queue_step_;  // the step that each queue serves
  std::vector<uint8_t> queue_is_forced_;
  std::vector<Queue> queues_;  // [steps, queues]
  std::vector<Turn> turns_;
  std::vector<Host> hosts_;  // [nodes]
  std::vector<std::vector<int32_t>> out_edges_;
  std::vector<int32_t> num_first_;  // [S] inputs that an item needs in its first round, and later
  std::vector<int32_t> num_later_;
  std::vector<std::vector<uint8_t>> missing_;  // [steps * S] of [rounds, N]: inputs that have not arrived
  std::vector<int64_t> num_finished_;          // [steps, S] items handed on
  std::vector<int32_t> num_owed_;              // [steps, S] step_s still to be paid
  std::vector<int32_t> num_owing_;             // [steps, S] instances
  std::vector<uint64_t> idle_;                 // a bit for each instance that is not busy
  std::vector<uint64_t> owing_;                // and for those that have had their last item, not yet their step_s
  std::vector<uint8_t> is_marked_;
  std::vector<uint8_t> contends_;  // [S] whether its instances meet others of their turn on a device
  std::vector<uint8_t> device_is_busy_;
  std::vector<int32_t> device_span_;
  std::vector<double> device_end_;
  std::vector<Transfer> transfers_;
  std::vector<int32_t> free_transfers_;
  std::vector<uint8_t> is_synced_;  // [steps, syncs]
  int32_t running_sync_ = -1;
  int32_t num_ended_ = 0;
  int32_t num_released_ = 0;
  int32_t last_span_ = -1;
  std::vector<int32_t> stage_span_;
  std::vector<std::vector<int32_t>> touched_;  // [S] ranks of engines that changed in this moment
  // Room that a moment uses and the next one uses again.
  std::vector<int32_t> touched_now_;
  std::vector<int32_t> emptied_;
};

}  // namespace rlinf::sched
