// Leases, cycles that starve, weight syncs and the ends of steps.
#include <algorithm>

#include "simulator.h"

namespace rlinf::sched {

void Simulator::mark_turn(int32_t turn) {
  for (int32_t s : turns_[turn].stages) {
    mark(s);
  }
}

bool Simulator::has_work(const Turn& turn) const {
  return first_step_with_work(turn) < model_.num_steps;
}

// The first step of which instances still owe the step_s, or the number of steps.
int32_t Simulator::first_owing_step(int32_t stage) const {
  for (int32_t step = num_ended_; step < num_released_; ++step) {
    if (num_owing_[static_cast<size_t>(step) * num_stages_ + stage] > 0) {
      return step;
    }
  }
  return model_.num_steps;
}

int32_t Simulator::first_step_with_work(const Turn& turn) const {
  int32_t first = model_.num_steps;
  for (int32_t s : turn.stages) {
    for (int32_t q = queue_start_[s]; q < queue_start_[s + 1]; ++q) {
      if (queue_step_[q] < first && is_ready(q)) {
        first = queue_step_[q];
      }
    }
    first = std::min(first, first_owing_step(s));
  }
  return first;
}

bool Simulator::pass_leases() {
  const bool left = leave_turns();
  return grant_turns() || left;
}

bool Simulator::leave_turns() {
  bool left = false;
  for (int32_t t = 0; t < static_cast<int32_t>(turns_.size()); ++t) {
    Turn& turn = turns_[t];
    if (turn.state != Turn::kHeld || turn.num_computing > 0 || turn.num_in_transit > 0 || has_work(turn)) {
      continue;
    }
    left = true;
    ++outcome_.num_events;
    turn.state = Turn::kLeaving;
    for (int32_t s : turn.stages) {
      for (int32_t i = instance_start_[s]; model_.offload_s[s] >= 0 && i < instance_start_[s + 1]; ++i) {
        const double end = now_ + model_.offload_s[s];
        // Not the instance's own last span: it may have had none, and all leave when the last of the turn is done.
        const int32_t span = outcome_.spans.add(s, instances_[i].rank, kOffload, std::max(0, instances_[i].step), 0,
                                                last_span_, now_, end);
        if (model_.offload_s[s] == turn.offload_s) {
          turn.last_span = span;
        }
        for (int32_t d = model_.device_start[i]; d < model_.device_start[i + 1]; ++d) {
          device_span_[model_.device[d]] = span;
          device_end_[model_.device[d]] = end;
        }
      }
    }
    if (turn.offload_s > 0) {
      push(now_ + turn.offload_s, Event::kLeft, t);
    } else {
      turn.last_span = last_span_;
      handle({now_, 0, Event::kLeft, t, 0});
    }
  }
  return left;
}

// Waiting turns of earlier steps go first, then those earlier in the flow; one that waits keeps its devices for itself.
bool Simulator::grant_turns() {
  const auto is_away = [&](int32_t t) { return turns_[t].state == Turn::kAway; };
  const auto may_come = [&](int32_t t) {
    const std::vector<int32_t>& rivals = turns_[t].rivals;
    return is_away(t) && std::all_of(rivals.begin(), rivals.end(), is_away);
  };
  const auto num_turns = static_cast<int32_t>(turns_.size());
  const auto is_asked = [&](int32_t t) { return model_.turn_is_leased[t] && is_away(t); };
  bool is_any_free = false;
  for (int32_t t = 0; t < num_turns && !is_any_free; ++t) {
    is_any_free = is_asked(t) && may_come(t);
  }
  if (!is_any_free) {
    return false;  // as in most moments; what each has to do is not looked at then
  }
  std::vector<std::pair<int32_t, int32_t>> waiting;
  for (int32_t t = 0; t < num_turns; ++t) {
    const int32_t step = is_asked(t) ? first_step_with_work(turns_[t]) : model_.num_steps;
    if (step < model_.num_steps) {
      waiting.emplace_back(step, t);
    }
  }
  std::sort(waiting.begin(), waiting.end());
  std::vector<uint8_t> is_kept(turns_.size(), 0);
  bool granted = false;
  for (const auto& [step, t] : waiting) {
    Turn& turn = turns_[t];
    const bool is_free = may_come(t) && std::none_of(turn.rivals.begin(), turn.rivals.end(),
                                                     [&](int32_t rival) { return is_kept[rival] != 0; });
    is_kept[t] = 1;
    if (!is_free) {
      continue;
    }
    granted = true;
    ++outcome_.num_events;
    turn.state = Turn::kLoading;
    turn.load_span = last_span_;  // where nothing has to be brought back, what was waited for
    for (int32_t s : turn.stages) {
      for (int32_t i = instance_start_[s]; model_.onload_s[s] >= 0 && i < instance_start_[s + 1]; ++i) {
        int32_t cause = last_span_;  // of this moment: the items' arrival, or the turn that left
        const int32_t span =
            outcome_.spans.add(s, instances_[i].rank, kOnload, step, 0, cause, now_, now_ + model_.onload_s[s]);
        if (model_.onload_s[s] == turn.onload_s) {
          turn.load_span = span;
        }
      }
    }
    if (turn.onload_s > 0) {
      push(now_ + turn.onload_s, Event::kLoaded, t);
    } else {
      handle({now_, 0, Event::kLoaded, t, 0});
    }
  }
  return granted;
}

// A cycle in which nothing moves, to which nothing more will come and no stage of which has a whole hand-over: its
// first stage that has items at all takes those.
bool Simulator::pass_cycles() {
  bool forced = false;
  for (Turn& turn : turns_) {
    if (!turn.is_cycle || turn.num_computing > 0 || turn.num_in_transit > 0 || turn.state == Turn::kLoading ||
        turn.state == Turn::kLeaving || has_work(turn)) {
      continue;
    }
    for (int32_t q = queue_start_[turn.stages.front()]; q < queue_start_[turn.stages.back() + 1]; ++q) {
      const int32_t s = queue_stage_[q], step = queue_step_[q];
      if (model_.turn[s] != model_.turn[turn.stages.front()] || step >= model_.num_steps) {
        continue;
      }
      if (queue_at(step, q).size() > 0 && turn.num_expected[step] == 0) {
        queue_is_forced_[q] = 1;
        mark(s);
        forced = true;
        break;
      }
    }
  }
  return forced;
}

bool Simulator::has_ended(int32_t stage, int32_t step) const {
  const size_t at = static_cast<size_t>(step) * num_stages_ + stage;
  return num_finished_[at] == static_cast<int64_t>(model_.num_items) * model_.rounds[stage] && num_owed_[at] == 0;
}

bool Simulator::start_sync() {
  const int32_t num_syncs = static_cast<int32_t>(model_.sync_s.size());
  for (int32_t step = num_ended_; step < num_released_; ++step) {
    for (int32_t i = 0; i < num_syncs; ++i) {
      if (is_synced_[static_cast<size_t>(step) * num_syncs + i]) {
        continue;
      }
      bool may_start = true;
      int32_t last = model_.sync_source[model_.sync_source_start[i]];
      for (int32_t k = model_.sync_source_start[i]; k < model_.sync_source_start[i + 1]; ++k) {
        const int32_t s = model_.sync_source[k];
        const Turn& turn = turns_[model_.turn[s]];
        may_start = may_start && has_ended(s, step) && (turn.offload_s <= 0 || turn.state == Turn::kAway);
        if (may_start && outcome_.spans.end_s[stage_span_[s]] > outcome_.spans.end_s[stage_span_[last]]) {
          last = s;
        }
      }
      if (may_start) {
        const Turn& turn = turns_[model_.turn[last]];
        const int32_t cause = turn.offload_s > 0 ? turn.last_span : stage_span_[last];
        const int32_t span = outcome_.spans.add(last, -1, kSync, step, 0, cause, now_, now_ + model_.sync_s[i]);
        running_sync_ = step * num_syncs + i;
        push(now_ + model_.sync_s[i], Event::kSynced, running_sync_, span);
        return true;
      }
    }
  }
  return false;
}

bool Simulator::pass_steps() {
  const int32_t num_syncs = static_cast<int32_t>(model_.sync_s.size());
  if (running_sync_ < 0 && num_syncs > 0) {
    start_sync();
  }
  bool released = false;
  while (num_ended_ < num_released_) {
    for (int32_t s = 0; s < num_stages_; ++s) {
      if (!has_ended(s, num_ended_)) {
        return released;
      }
    }
    for (int32_t i = 0; i < num_syncs; ++i) {
      if (!is_synced_[static_cast<size_t>(num_ended_) * num_syncs + i]) {
        return released;
      }
    }
    for (const Turn& turn : turns_) {
      if (model_.max_staleness == 0 && turn.state != Turn::kAway) {
        return released;
      }
    }
    outcome_.step_end_s[num_ended_] = now_;
    outcome_.step_cause[num_ended_++] = last_span_;
    if (num_released_ < model_.num_steps) {
      release_step(num_released_++);
      released = true;
    }
  }
  return released;
}

}  // namespace rlinf::sched
