// Whether a large copy writes past the caches, measured on the copies themselves.
//
// Such stores spare the read of the line that they replace, which is worth up to 2x; on a processor whose last-level
// cache holds the destination they are slower than plain ones. No size tells which it is, so the first runs of the same
// copy write in either way by turns, and the faster way stays. Both write the same bytes.
#pragma once

#include <atomic>
#include <cstdint>

namespace rlinf::comm {

enum class Stores : int {
  kMeasured = 0,
  kCached = 1,
  kStreaming = 2,
};

// What RLINF_COMM_STORES says: "measured" (also where it is not set), "cached" or "streaming". UserError for other words.
Stores stores_of_environment();

// For copies that cost the same, or the same for each byte. Safe to use from several threads at once.
class StoreChoice {
 public:
  // How one run writes; tells the choice how long it took.
  class Run {
   public:
    Run(StoreChoice& choice, Stores stores, uint64_t num_bytes);
    ~Run();
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    bool is_streaming() const { return is_streaming_; }

   private:
    StoreChoice& choice_;
    uint64_t num_bytes_;
    bool is_streaming_;
    int64_t start_ns_ = 0;  // 0: not timed
  };

  // kMeasured while there are too few runs.
  Stores answer() const { return answer_.load(std::memory_order_relaxed); }

 private:
  void tell(bool is_streaming, int64_t spent_ns, uint64_t num_bytes);

  std::atomic<Stores> answer_{Stores::kMeasured};
  std::atomic<uint32_t> num_begun_{0};
  std::atomic<uint32_t> num_done_[2] = {};
  std::atomic<int64_t> best_[2] = {};  // picoseconds a byte, plus one; 0: none yet
};

}  // namespace rlinf::comm
