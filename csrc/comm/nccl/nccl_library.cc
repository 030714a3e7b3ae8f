#include "rlinf/comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include "rlinf/comm/check.h"

namespace rlinf::comm::nccl {

namespace {

constexpr const char* kName = "libnccl.so.2";

template <typename Function>
void find(void* handle, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(::dlsym(handle, name));
}

template <typename Function>
void require(void* handle, const char* name, Function** function) {
  find(handle, name, function);
  RLINF_CHECK_USER(*function != nullptr, "it has no ", name);
}

std::string path_of(const void* symbol) {
  Dl_info info{};
  return ::dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : kName;
}

}  // namespace

Library::Library(void* handle, const char* origin) : origin_(origin) {
  Functions& f = functions_;
  require(handle, "ncclGetVersion", &f.get_version);
  path_ = path_of(reinterpret_cast<const void*>(f.get_version));
  RLINF_CHECK_USER(f.get_version(&version_) == kSuccess, "ncclGetVersion failed");
  RLINF_CHECK_USER(version_ >= kOldestVersion, "its version is ", version_, ", and at least ", kOldestVersion,
                   " (2.27.3) is needed");
  require(handle, "ncclGetUniqueId", &f.get_unique_id);
  require(handle, "ncclGetErrorString", &f.get_error_string);
  require(handle, "ncclGetLastError", &f.get_last_error);
  require(handle, "ncclCommInitRankConfig", &f.comm_init_rank_config);
  require(handle, "ncclCommGetAsyncError", &f.comm_get_async_error);
  require(handle, "ncclCommFinalize", &f.comm_finalize);
  require(handle, "ncclCommDestroy", &f.comm_destroy);
  require(handle, "ncclCommAbort", &f.comm_abort);
  require(handle, "ncclGroupStart", &f.group_start);
  require(handle, "ncclGroupEnd", &f.group_end);
  require(handle, "ncclSend", &f.send);
  require(handle, "ncclRecv", &f.recv);
  require(handle, "ncclBroadcast", &f.broadcast);
  find(handle, "ncclCommSplit", &f.comm_split);
  find(handle, "ncclCommShrink", &f.comm_shrink);
  find(handle, "ncclCommGetUniqueId", &f.comm_get_unique_id);
  find(handle, "ncclCommGrow", &f.comm_grow);
  find(handle, "ncclCommRevoke", &f.comm_revoke);
  find(handle, "ncclCommSuspend", &f.comm_suspend);
  find(handle, "ncclCommResume", &f.comm_resume);
}

std::shared_ptr<Library> Library::load(const std::vector<std::string>& candidates) {
  std::string refused;
  // Once opened a library stays open: NCCL has threads of its own. RTLD_NOLOAD only counts one up that is there.
  const auto attempt = [&](const std::string& path, int flags, const char* origin) -> std::shared_ptr<Library> {
    void* handle = ::dlopen(path.c_str(), flags | RTLD_NOW | RTLD_LOCAL);
    const char* reason = handle != nullptr ? nullptr : ::dlerror();
    try {
      RLINF_CHECK_USER(handle != nullptr, (flags & RTLD_NOLOAD) != 0 ? "none" : reason);
      return std::shared_ptr<Library>(new Library(handle, origin));
    } catch (const UserError& error) {
      refused += join_text(refused.empty() ? "" : "; ", origin, " ", path, ": ", error.what());
      if (handle != nullptr && (flags & RTLD_NOLOAD) != 0) {
        throw UserError(join_text("the NCCL that is mapped into this process cannot be used (", refused,
                                  "); import a torch with a newer one"));
      }
      return nullptr;
    }
  };
  if (auto library = attempt(kName, RTLD_NOLOAD, "mapped")) {
    return library;
  }
  for (const std::string& path : candidates) {
    if (auto library = attempt(path, 0, "candidate")) {
      return library;
    }
  }
  if (auto library = attempt(kName, 0, "system")) {
    return library;
  }
  throw UserError(join_text("no usable NCCL (", refused, "); install nvidia-nccl-cu12 or nvidia-nccl-cu13"));
}

std::vector<std::string> Library::capabilities() const {
  const Functions& f = functions_;
  std::vector<std::string> names;
  const auto add = [&](const char* name, bool has) {
    if (has) {
      names.emplace_back(name);
    }
  };
  add("split", f.comm_split != nullptr);
  add("shrink", f.comm_shrink != nullptr);
  add("grow", f.comm_grow != nullptr && f.comm_get_unique_id != nullptr);
  add("revoke", f.comm_revoke != nullptr);
  add("suspend", f.comm_suspend != nullptr && f.comm_resume != nullptr);
  return names;
}

}  // namespace rlinf::comm::nccl
