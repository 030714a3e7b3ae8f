// How long one stage takes on its own, for many numbers of instances and sizes of hand-overs at once.
#pragma once

#include <cstdint>
#include <vector>

namespace rlinf::sched {

// A stage's items lie ready at time 0, in order.
struct StageWork {
  enum Batching : int32_t { kSum, kLongest, kContinuous } batching;
  std::vector<double> seconds;  // of a hand-over of 1, 2, ... items of mean cost; continuous: with so many inside
  std::vector<double> costs;    // of each item, in the order in which they come; mean 1
  int32_t max_items;            // continuous: most at once in an engine; 0: no limit
  int32_t num_steps;            // that may be begun together
};

class StageTimes {
 public:
  // `fractions`, ascending: of the items, whose times of coming out are asked for; 0: the first hand-over.
  StageTimes(StageWork work, std::vector<double> fractions);

  // The time at which so many of the items are out, for each fraction, and the tail: from the arrival of the last
  // hand-over at an idle stage to its end. As costs differ from item to item, that is the cost of the items that come
  // last, and at least the mean. And the period: how long a step's items take where the next step's lie ready too, so
  // that no instance is idle and no engine half empty. And what each further step adds where `num_steps` are begun
  // together. Cheapest where equal sizes come one after the other (continuous: equal instances).
  void of(int32_t num_instances, int32_t size, double* out);

 private:
  double scale(int64_t begin, int64_t end) const;
  void make_hand_overs(int32_t size);
  void play_hand_overs(int32_t num_instances, int32_t num_steps);
  void play_engines(int32_t num_instances);
  void play_crowded_engines(int32_t num_instances, int32_t room, int32_t num_steps);
  double further(double all_s, double one_s) const;
  double nth_end(int64_t n);
  double engine_period(int32_t num_engines) const;

  StageWork work_;
  std::vector<double> fractions_;
  bool is_equal_;
  int32_t size_ = 0;                // of `hand_overs_`
  int32_t num_engines_ = 0;         // of `ends_`, where continuous
  double all_s_ = 0.0;              // until all steps are out of so many engines
  std::vector<double> hand_overs_;  // seconds of each, in order
  std::vector<double> ends_;        // of hand-overs; of items, where continuous
  bool ends_are_sorted_ = false;
  std::vector<double> free_;
};

}  // namespace rlinf::sched
