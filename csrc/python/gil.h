// Work without the GIL that a process may end in the middle of.
#pragma once

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace rlinf::comm {

// Lets other Python threads run for its lifetime. As pybind11's gil_scoped_release, but for what happens to a daemon
// thread that comes back while the interpreter ends: before Python 3.14 taking the GIL then ends the thread by
// unwinding its stack, which aborts the whole process at the first destructor that must not throw. Here such a thread
// stops, as in 3.14; and should it be too late for that, the destructor lets the unwinding pass.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() noexcept(false) {
    while (is_too_late()) {
      ::pause();
    }
    PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  // The interpreter is ended by the main thread, which may still come by here.
  static bool is_too_late() {
#if PY_VERSION_HEX >= 0x030d0000
    const bool is_ending = Py_IsFinalizing() != 0;
#else
    const bool is_ending = _Py_IsFinalizing() != 0;
#endif
    return is_ending && ::syscall(SYS_gettid) != ::getpid();
  }

  PyThreadState* state_;
};

}  // namespace rlinf::comm
