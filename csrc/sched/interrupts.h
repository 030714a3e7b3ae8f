// Ctrl-C in loops that run without the interpreter.
#pragma once

#include <cstdint>

namespace rlinf::sched {

// Lets Python handle the signals that have come; throws what its handlers raise. Needs no GIL.
void handle_signals();

// To be called from inner loops, a few million times a second at most.
inline void poll_signals() {
  thread_local uint32_t num_calls = 0;
  if ((++num_calls & 0xFFF) == 0) {
    handle_signals();
  }
}

}  // namespace rlinf::sched
