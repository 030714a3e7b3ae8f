// Check macros and the exceptions they throw. Three kinds of failure, three types: the caller's mistake (UserError),
// our own mistake (InternalError), the operating system's refusal (SystemError). Destructors use the *_NOTHROW twin,
// which reports on stderr instead.
#pragma once

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

namespace rlinf::comm {

// The caller asked for something that is not allowed.
class UserError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A state that must not be reachable.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// A system call failed; error_number() is its errno.
class SystemError : public std::runtime_error {
 public:
  SystemError(const std::string& what, int error_number)
      : std::runtime_error(what + ": " + std::strerror(error_number)), error_number_(error_number) {}
  int error_number() const { return error_number_; }

 private:
  int error_number_;
};

template <typename... Parts>
std::string join_text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace rlinf::comm

#define RLINF_CHECK_USER(condition, ...)                                     \
  do {                                                                       \
    if (!(condition))                                                        \
      throw ::rlinf::comm::UserError(::rlinf::comm::join_text(__VA_ARGS__)); \
  } while (false)

#define RLINF_CHECK_INTERNAL(condition, ...)                                               \
  do {                                                                                     \
    if (!(condition))                                                                      \
      throw ::rlinf::comm::InternalError(::rlinf::comm::join_text(__FILE__, ":", __LINE__, \
                                                                  ": " #condition " does " \
                                                                  "not hold: ",            \
                                                                  __VA_ARGS__));           \
  } while (false)

#define RLINF_CHECK_SYSTEM(condition, ...)                                                        \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      const int rlinf_saved_errno = errno;                                                        \
      throw ::rlinf::comm::SystemError(::rlinf::comm::join_text(__VA_ARGS__), rlinf_saved_errno); \
    }                                                                                             \
  } while (false)

#define RLINF_CHECK_NOTHROW(condition, text)                                       \
  do {                                                                             \
    if (!(condition))                                                              \
      std::fprintf(stderr, "rlinf-comm: %s:%d: %s\n", __FILE__, __LINE__, (text)); \
  } while (false)

#ifdef RLINF_WITH_CUDA
#define RLINF_CHECK_CUDA(call)                                                                       \
  do {                                                                                               \
    const cudaError_t rlinf_cuda_error = (call);                                                     \
    if (rlinf_cuda_error != cudaSuccess)                                                             \
      throw ::rlinf::comm::SystemError(                                                              \
          ::rlinf::comm::join_text(#call, ": CUDA error ", static_cast<int>(rlinf_cuda_error), " (", \
                                   cudaGetErrorString(rlinf_cuda_error), ")"),                       \
          EIO);                                                                                      \
  } while (false)
#endif
