// Hands the descriptors of this process's segments to peers: one thread and one abstract unix socket for each process,
// started by the first segment. Peers of the same user get a descriptor by SCM_RIGHTS; nothing has a name in any file
// system, and the socket vanishes with its process. Its name holds a random number, so that nobody can take it first; the
// number is the upper half of each segment's nonce, and so a part of every address. Works between pid namespaces that share a network namespace.
#pragma once

#include <cstdint>

#include "rlinf/comm/process_id.h"

namespace rlinf::comm {

enum class SegmentAnswer : int32_t {
  kFound = 0,
  kClosed = 1,    // no such segment any more
  kAnother = 2,   // its descriptor's number belongs to another segment by now
  kGone = 3,      // the process is gone
  kForeign = 4,   // the process runs as another user
  kNoAnswer = 5,  // it did not answer in time: stopped, or starved
};

// Makes sure that this process answers. Also what tells processes of other pid namespaces that it is alive.
void start_segment_server();

// Hands out `fd` from now on, under the nonce that this returns. `fd` stays the caller's; remove it before it is closed.
uint64_t serve_segment(int32_t fd);
void stop_serving_segment(int32_t fd);

// Asks `creator` for a segment. On kFound *received is a new descriptor of the caller's.
SegmentAnswer request_segment(const ProcessId& creator, int32_t fd, uint64_t nonce, int* received);

// Whether a process answers to its name; for those whose /proc entry this process cannot see.
bool has_segment_server(const ProcessId& process);

}  // namespace rlinf::comm
