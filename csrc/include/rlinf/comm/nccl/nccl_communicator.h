// One rank of an NCCL communicator that never blocks. Calls begin something and return NCCL's result; state() tells
// when it is done. Who waits, how long, and what is done about a failure is the caller's (src/rlinf_comm/nccl.py).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "rlinf/comm/nccl/nccl_library.h"

namespace rlinf::comm::nccl {

struct Transfer {
  bool is_send;
  int peer;
  void* pointer;
  size_t num_bytes;
};

class Communicator {
 public:
  static constexpr int kNoComm = -1;  // state(): aborted, destroyed, or this rank got none (split without a color)

  // For the thread's current CUDA device. All ranks call it.
  static std::shared_ptr<Communicator> create(std::shared_ptr<Library> library, const UniqueId& id, int num_ranks,
                                              int rank, Config config);
  // A new rank of a communicator whose ranks call grow().
  static std::shared_ptr<Communicator> join(std::shared_ptr<Library> library, const UniqueId& id, int num_ranks,
                                            int rank, Config config);
  // Nothing is destroyed: a comm that was neither destroyed nor aborted is left to the end of the process.
  ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int state();
  std::string last_error();

  // One group. The first failing call's result; the group is ended in any case.
  int exchange(const std::vector<Transfer>& transfers, Stream stream);
  int broadcast(const void* source, void* target, size_t num_bytes, int root, Stream stream);

  // The child may be waited for even where the call's result was an error; its state() then says so.
  std::shared_ptr<Communicator> split(int color, int key, Config config);
  std::shared_ptr<Communicator> shrink(std::vector<int> excluded, bool aborts, Config config);
  std::shared_ptr<Communicator> grow(int num_ranks, const std::optional<UniqueId>& id, Config config);
  UniqueId grow_id();

  int revoke();
  int suspend();
  int resume();
  int finalize();
  int destroy();
  int abort();  // may block for as long as NCCL's threads need

 private:
  // Where NCCL stores the comm, from a thread of its own. Leaked by those that never finish.
  using Slot = std::atomic<Comm>;
  static_assert(sizeof(Slot) == sizeof(Comm) && Slot::is_always_lock_free, "NCCL writes it as a plain pointer");

  Communicator(std::shared_ptr<Library> library, std::shared_ptr<Communicator> parent);
  static std::shared_ptr<Communicator> child_of(Communicator* parent);
  Comm* slot() { return reinterpret_cast<Comm*>(slot_); }
  const Functions& nccl() const { return library_->functions(); }

  // Each holds mutex_ during one call only, so that another thread can abort between two polls.
  template <typename Call>
  int with_comm(Call call);
  template <typename Call>
  std::shared_ptr<Communicator> begin_child(const char* what, bool has, Call call);

  std::shared_ptr<Library> library_;
  std::shared_ptr<Communicator> parent_;  // until the child is there
  std::mutex mutex_;
  Slot* slot_ = new Slot{nullptr};
  bool is_gone_ = false;
  bool outlives_parent_ = false;  // the parent's error does not matter
  int begin_result_ = kSuccess;
  std::weak_ptr<Communicator> self_;
};

}  // namespace rlinf::comm::nccl
