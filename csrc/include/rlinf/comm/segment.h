// A piece of memory shared between processes of one machine: a memfd of mode 0600, sealed against changes of its size,
// mapped into each of them. Its creator's segment server hands the descriptor to peers of the same user, so it has no
// name in any file system and nothing is left behind when its processes die, however they die.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "rlinf/comm/process_id.h"

namespace rlinf::comm {

// What a peer needs to open a segment. Valid while the creating object lives.
struct SegmentAddress {
  ProcessId creator;
  int32_t fd = -1;
  uint64_t nonce = 0;  // random; tells the segment from another that got the same fd number later, and its upper half
                       // is the nonce of its creator's server
};

// Owns the file descriptor and the mapping.
class Segment {
 public:
  // `num_bytes` of zeroed memory for the user. Pages are only taken from the system when first written.
  static std::shared_ptr<Segment> create(const std::string& name, uint64_t num_bytes);
  // UserError when the creator is gone or has closed the segment.
  static std::shared_ptr<Segment> open(const SegmentAddress& address);

  // Takes the pages of the first `num_bytes` from the system now: a first write to a fresh page costs about ten times a
  // later one.
  void prefault(uint64_t num_bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentAddress& address() const { return address_; }
  // Page-aligned.
  std::byte* bytes() const { return bytes_; }
  uint64_t num_bytes() const { return num_bytes_; }

 private:
  Segment(int fd, std::byte* mapping, uint64_t mapping_bytes);

  int fd_;
  std::byte* mapping_;
  uint64_t mapping_bytes_;
  SegmentAddress address_;
  std::byte* bytes_;
  uint64_t num_bytes_;
  bool is_served_ = false;  // here, by its creator
};

}  // namespace rlinf::comm
