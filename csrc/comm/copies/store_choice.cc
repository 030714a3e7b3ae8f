#include "rlinf/comm/store_choice.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "rlinf/comm/check.h"
#include "rlinf/comm/sync.h"

namespace rlinf::comm {

namespace {

// Runs of either way before the choice. The best of each counts: a preempted run, or one that meets fresh pages, is
// slow in either way.
constexpr uint32_t kNumTrials = 4;
// What the stores past the caches have to gain: with plain ones, whoever reads next may still find the bytes there.
constexpr double kLeastGain = 1.05;

}  // namespace

Stores stores_of_environment() {
  static const Stores stores = [] {
    const char* const text = std::getenv("RLINF_COMM_STORES");
    const std::string_view word = text == nullptr ? "measured" : text;
    RLINF_CHECK_USER(word == "measured" || word == "cached" || word == "streaming", "RLINF_COMM_STORES=", word,
                     "; allowed: measured, cached, streaming");
    return word == "measured" ? Stores::kMeasured : word == "cached" ? Stores::kCached : Stores::kStreaming;
  }();
  return stores;
}

StoreChoice::Run::Run(StoreChoice& choice, Stores stores, uint64_t num_bytes)
    : choice_(choice), num_bytes_(std::max<uint64_t>(num_bytes, 1)) {
  if (stores == Stores::kMeasured) {
    stores = choice.answer();
  }
  is_streaming_ = stores == Stores::kStreaming;
  if (stores == Stores::kMeasured) {
    const uint32_t turn = choice.num_begun_.fetch_add(1, std::memory_order_relaxed);
    is_streaming_ = ((turn ^ turn >> 1) & 1) == 0;  // 1001 1001: neither way always comes first
    start_ns_ = monotonic_ns();
  }
}

StoreChoice::Run::~Run() {
  if (start_ns_ != 0) {
    choice_.tell(is_streaming_, monotonic_ns() - start_ns_, num_bytes_);
  }
}

void StoreChoice::tell(bool is_streaming, int64_t spent_ns, uint64_t num_bytes) {
  const auto cost = static_cast<int64_t>(static_cast<double>(spent_ns) * 1000.0 / static_cast<double>(num_bytes)) + 1;
  std::atomic<int64_t>& best = best_[is_streaming];
  int64_t known = best.load(std::memory_order_relaxed);
  while ((known == 0 || cost < known) && !best.compare_exchange_weak(known, cost)) {
  }
  num_done_[is_streaming].fetch_add(1);
  if (num_done_[0].load() >= kNumTrials && num_done_[1].load() >= kNumTrials) {
    const bool gains = static_cast<double>(best_[0].load()) >= kLeastGain * static_cast<double>(best_[1].load());
    answer_.store(gains ? Stores::kStreaming : Stores::kCached, std::memory_order_relaxed);
  }
}

}  // namespace rlinf::comm
