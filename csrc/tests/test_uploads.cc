// The order of an upload's calls, with a CUDA runtime that only writes them down: the copy goes onto the stream of the
// first kernel, out of memory of its own, and other streams wait for it.
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>

#include "rlinf/comm/cuda/uploaded_bytes.h"

namespace {

void expect(const std::string& log, const std::string& expected) {
  if (log != expected) {
    throw std::runtime_error("calls:\n" + log + "instead of:\n" + expected);
  }
}

// What the device reads when the copy runs, long after it was put on its stream.
struct Recorder {
  using Stream = int;
  using Event = int;

  std::string* log;
  const void** source;
  bool fails_at_event = false;

  void* allocate_locked(uint64_t num_bytes) { return say("lock"), std::malloc(num_bytes); }
  void* allocate(uint64_t num_bytes) { return say("allocate"), std::malloc(num_bytes); }
  int make_event() {
    if (fails_at_event) {
      throw std::runtime_error("no event");
    }
    return say("event"), 7;
  }
  void copy_to_device(void*, const void* from, uint64_t num_bytes, int stream) {
    *source = from;
    say("copy " + std::to_string(num_bytes) + " on " + std::to_string(stream));
  }
  void record(int event, int stream) { say("record " + std::to_string(event) + " on " + std::to_string(stream)); }
  void wait(int stream, int event) { say("wait " + std::to_string(event) + " on " + std::to_string(stream)); }
  void free(void* pointer) { say("free"), std::free(pointer); }
  void free_locked(void* pointer) { say("unlock"), std::free(pointer); }
  void destroy(int) { say("destroy"); }

 private:
  void say(const std::string& line) { *log += line + "\n"; }
};

using Bytes = rlinf::comm::cuda::UploadedBytes<Recorder>;

void an_upload_goes_onto_the_stream_that_reads_it_first() {
  std::string log;
  const void* source = nullptr;
  {
    std::string tiles = "tiles";
    Bytes bytes(tiles.data(), tiles.size(), Recorder{&log, &source});
    tiles = "other";  // gone by the time the copy runs
    expect(log, "lock\nallocate\nevent\n");
    bytes.on(3);
    expect(log, "lock\nallocate\nevent\ncopy 5 on 3\nrecord 7 on 3\n");
    expect(std::string(static_cast<const char*>(source), 5), "tiles");
    log.clear();
    bytes.on(4);
    bytes.on(3);
    expect(log, "wait 7 on 4\nwait 7 on 3\n");
    log.clear();
  }
  expect(log, "free\nunlock\ndestroy\n");
}

void a_failure_leaves_nothing_behind() {
  std::string log;
  const void* source = nullptr;
  try {
    Bytes bytes("x", 1, Recorder{&log, &source, true});
  } catch (const std::runtime_error&) {
    expect(log, "lock\nallocate\nfree\nunlock\n");
    return;
  }
  throw std::runtime_error("a failure went by");
}

}  // namespace

int main() {
  an_upload_goes_onto_the_stream_that_reads_it_first();
  a_failure_leaves_nothing_behind();
  std::cout << "uploads: ok\n";
}
