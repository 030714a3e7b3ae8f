// The libnccl.so.2 of this process, opened at run time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "rlinf/comm/nccl/nccl_api.h"

namespace rlinf::comm::nccl {

class Library {
 public:
  // The first of: the one that is mapped already (two in one process would not know of each other's communicators),
  // `candidates` in their order, the system's. UserError that names what was tried, and why it was not taken.
  static std::shared_ptr<Library> load(const std::vector<std::string>& candidates);

  const Functions& functions() const { return functions_; }
  const std::string& path() const { return path_; }
  const char* origin() const { return origin_; }  // "mapped", "candidate" or "system"
  int version() const { return version_; }
  // Of "split", "shrink", "grow", "revoke", "suspend": those that it has.
  std::vector<std::string> capabilities() const;

 private:
  Library(void* handle, const char* origin);

  Functions functions_{};
  std::string path_;
  const char* origin_;
  int version_ = 0;
};

}  // namespace rlinf::comm::nccl
