#include "rlinf/comm/nccl/nccl_communicator.h"

#include "rlinf/comm/check.h"

namespace rlinf::comm::nccl {

namespace {

bool is_failure(int result) {
  return result != kSuccess && result != kInProgress;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Library> library, std::shared_ptr<Communicator> parent)
    : library_(std::move(library)), parent_(std::move(parent)) {}

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<Library> library, const UniqueId& id, int num_ranks,
                                                   int rank, Config config) {
  std::shared_ptr<Communicator> made(new Communicator(std::move(library), nullptr));
  made->self_ = made;
  made->begin_result_ = made->nccl().comm_init_rank_config(made->slot(), num_ranks, id, rank, &config);
  return made;
}

std::shared_ptr<Communicator> Communicator::join(std::shared_ptr<Library> library, const UniqueId& id, int num_ranks,
                                                 int rank, Config config) {
  std::shared_ptr<Communicator> made(new Communicator(std::move(library), nullptr));
  made->self_ = made;
  RLINF_CHECK_USER(made->nccl().comm_grow != nullptr, "this NCCL cannot grow a communicator");
  made->begin_result_ = made->nccl().comm_grow(nullptr, num_ranks, &id, rank, made->slot(), &config);
  return made;
}

int Communicator::state() {
  std::shared_ptr<Communicator> parent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_gone_) {
      return kNoComm;
    }
    if (is_failure(begin_result_)) {
      return begin_result_;
    }
    Comm comm = slot_->load(std::memory_order_acquire);
    if (comm != nullptr) {
      int result = kSuccess;
      const int called = nccl().comm_get_async_error(comm, &result);
      if (called == kSuccess && result == kSuccess) {
        parent_.reset();
      }
      return called == kSuccess ? result : called;
    }
    parent = parent_;
  }
  if (parent == nullptr || outlives_parent_) {
    return kInProgress;  // NCCL's thread has not stored it yet
  }
  const int of_parent = parent->state();
  // The parent is done only after it has stored the child: look once more.
  return of_parent == kSuccess && slot_->load(std::memory_order_acquire) != nullptr ? kInProgress
         : of_parent == kSuccess                                                    ? kNoComm
                                                                                    : of_parent;
}

std::string Communicator::last_error() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* text = is_gone_ ? nullptr : nccl().get_last_error(slot_->load(std::memory_order_acquire));
  return text == nullptr ? "" : text;
}

template <typename Call>
int Communicator::with_comm(Call call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Comm comm = slot_->load(std::memory_order_acquire);
  RLINF_CHECK_USER(!is_gone_ && comm != nullptr,
                   "this NCCL communicator is not there: it was aborted or closed, or has "
                   "never been made");
  return call(comm);
}

int Communicator::exchange(const std::vector<Transfer>& transfers, Stream stream) {
  return with_comm([&](Comm comm) {
    int result = nccl().group_start();
    if (is_failure(result)) {
      return result;
    }
    for (const Transfer& each : transfers) {
      const int called = each.is_send ? nccl().send(each.pointer, each.num_bytes, kUint8, each.peer, comm, stream)
                                      : nccl().recv(each.pointer, each.num_bytes, kUint8, each.peer, comm, stream);
      if (is_failure(called)) {
        result = called;
        break;
      }
    }
    const int ended = nccl().group_end();
    return is_failure(result) ? result : ended;
  });
}

int Communicator::broadcast(const void* source, void* target, size_t num_bytes, int root, Stream stream) {
  return with_comm([&](Comm comm) { return nccl().broadcast(source, target, num_bytes, kUint8, root, comm, stream); });
}

template <typename Call>
std::shared_ptr<Communicator> Communicator::begin_child(const char* what, bool has, Call call) {
  RLINF_CHECK_USER(has, "this NCCL (version ", library_->version(), ", ", library_->path(), ") cannot ", what,
                   " a communicator");
  std::shared_ptr<Communicator> child(new Communicator(library_, self_.lock()));
  child->self_ = child;
  child->begin_result_ = with_comm([&](Comm comm) { return call(comm, child->slot()); });
  return child;
}

std::shared_ptr<Communicator> Communicator::split(int color, int key, Config config) {
  return begin_child("split", nccl().comm_split != nullptr,
                     [&](Comm comm, Comm* child) { return nccl().comm_split(comm, color, key, child, &config); });
}

std::shared_ptr<Communicator> Communicator::shrink(std::vector<int> excluded, bool aborts, Config config) {
  auto made = begin_child("shrink", nccl().comm_shrink != nullptr, [&](Comm comm, Comm* child) {
    return nccl().comm_shrink(comm, excluded.data(), static_cast<int>(excluded.size()), child, &config,
                              aborts ? kShrinkAbort : 0);
  });
  made->outlives_parent_ = aborts;
  return made;
}

std::shared_ptr<Communicator> Communicator::grow(int num_ranks, const std::optional<UniqueId>& id, Config config) {
  return begin_child("grow", nccl().comm_grow != nullptr, [&](Comm comm, Comm* child) {
    return nccl().comm_grow(comm, num_ranks, id ? &*id : nullptr, -1, child, &config);  // -1: keeps its rank
  });
}

UniqueId Communicator::grow_id() {
  RLINF_CHECK_USER(nccl().comm_get_unique_id != nullptr, "this NCCL cannot grow a communicator");
  UniqueId id{};
  const int result = with_comm([&](Comm comm) { return nccl().comm_get_unique_id(comm, &id); });
  RLINF_CHECK_USER(result == kSuccess, "ncclCommGetUniqueId: ", nccl().get_error_string(result));
  return id;
}

int Communicator::revoke() {
  RLINF_CHECK_USER(nccl().comm_revoke != nullptr, "this NCCL cannot revoke a communicator");
  return with_comm([&](Comm comm) { return nccl().comm_revoke(comm, 0); });
}

int Communicator::suspend() {
  RLINF_CHECK_USER(nccl().comm_suspend != nullptr, "this NCCL cannot suspend a communicator");
  return with_comm([&](Comm comm) { return nccl().comm_suspend(comm, kSuspendMemory); });
}

int Communicator::resume() {
  RLINF_CHECK_USER(nccl().comm_resume != nullptr, "this NCCL cannot resume a communicator");
  return with_comm([&](Comm comm) { return nccl().comm_resume(comm); });
}

int Communicator::finalize() {
  return with_comm([&](Comm comm) { return nccl().comm_finalize(comm); });
}

int Communicator::destroy() {
  return with_comm([&](Comm comm) {
    is_gone_ = true;
    return nccl().comm_destroy(comm);
  });
}

int Communicator::abort() {
  Comm comm;
  {
    // Marked first and called outside of the lock, so that polls return while NCCL stops its threads.
    const std::lock_guard<std::mutex> lock(mutex_);
    comm = slot_->load(std::memory_order_acquire);
    if (is_gone_ || comm == nullptr) {
      is_gone_ = true;
      return kSuccess;
    }
    is_gone_ = true;
  }
  return nccl().comm_abort(comm);
}

}  // namespace rlinf::comm::nccl
