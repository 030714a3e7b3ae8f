#include "rlinf/comm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "rlinf/comm/check.h"
#include "rlinf/comm/segment_server.h"

namespace rlinf::comm {

namespace {

constexpr uint64_t kMagic = 0x726c696e66534732;  // "rlinfSG2"; changes with the layout of anything in a segment

struct SegmentHeader {
  uint64_t magic;
  uint64_t nonce;
  uint64_t num_bytes;  // for the user
};

uint64_t page_bytes() {
  return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

uint64_t round_to_pages(uint64_t num_bytes) {
  const uint64_t page = page_bytes();
  return (num_bytes + page - 1) / page * page;
}

// Closes the descriptor unless it was handed on.
class ScopedFd {
 public:
  explicit ScopedFd(int fd) : fd_(fd) {}
  ~ScopedFd() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  ScopedFd(const ScopedFd&) = delete;
  ScopedFd& operator=(const ScopedFd&) = delete;
  int get() const { return fd_; }
  int hand_on() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

std::byte* map_shared(int fd, uint64_t mapping_bytes) {
  void* mapping = ::mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  RLINF_CHECK_SYSTEM(mapping != MAP_FAILED, "cannot map ", mapping_bytes, " bytes of shared memory");
  return static_cast<std::byte*>(mapping);
}

// A descriptor of the segment. UserError when it or its creator is gone.
int receive(const SegmentAddress& address) {
  int fd = -1;
  const SegmentAnswer answer = request_segment(address.creator, address.fd, address.nonce, &fd);
  const int32_t pid = address.creator.pid;
  switch (answer) {
    case SegmentAnswer::kFound:
      return fd;
    case SegmentAnswer::kGone:
      throw UserError(join_text("the process ", pid,
                                " that created the shared segment is gone (or runs on another "
                                "host, or in another network namespace)"));
    case SegmentAnswer::kClosed:
      throw UserError(join_text("process ", pid,
                                " has closed the shared segment; keep the object that created it for "
                                "as long as peers may open it"));
    case SegmentAnswer::kAnother:
      throw UserError(join_text("descriptor ", address.fd, " of process ", pid,
                                " is another file by now: its creator has closed the segment"));
    case SegmentAnswer::kForeign:
      throw UserError(join_text("process ", pid,
                                " runs as another user; segments are shared with one's own processes "
                                "only"));
    case SegmentAnswer::kNoAnswer:
      throw UserError(join_text("process ", pid,
                                " that created the shared segment does not answer: it is stopped, or "
                                "has no descriptors left"));
  }
  throw InternalError("an answer that does not exist");
}

}  // namespace

Segment::Segment(int fd, std::byte* mapping, uint64_t mapping_bytes)
    : fd_(fd), mapping_(mapping), mapping_bytes_(mapping_bytes), bytes_(mapping + page_bytes()), num_bytes_(0) {}

Segment::~Segment() {
  if (is_served_) {
    stop_serving_segment(fd_);
  }
  RLINF_CHECK_NOTHROW(::munmap(mapping_, mapping_bytes_) == 0, "munmap of a shared segment failed");
  RLINF_CHECK_NOTHROW(::close(fd_) == 0, "close of a shared segment failed");
}

std::shared_ptr<Segment> Segment::create(const std::string& name, uint64_t num_bytes) {
  RLINF_CHECK_USER(num_bytes > 0, "a shared segment of 0 bytes");
  const std::string label = "rlinf:" + name.substr(0, 200);  // shown by /proc/<pid>/maps; the kernel allows 249 bytes
  ScopedFd fd(::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  RLINF_CHECK_SYSTEM(fd.get() >= 0, "memfd_create for '", name, "'");
  const uint64_t mapping_bytes = page_bytes() + round_to_pages(num_bytes);
  RLINF_CHECK_SYSTEM(::ftruncate(fd.get(), static_cast<off_t>(mapping_bytes)) == 0, "cannot size the segment '", name,
                     "' to ", mapping_bytes, " bytes");
  RLINF_CHECK_SYSTEM(::fchmod(fd.get(), 0600) == 0, "fchmod of the segment '", name, "'");
  // A peer that shrinks the file would kill every reader with SIGBUS.
  RLINF_CHECK_SYSTEM(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
                     "cannot seal the size of the segment '", name, "'");
  std::byte* mapping = map_shared(fd.get(), mapping_bytes);
  std::shared_ptr<Segment> segment(new Segment(fd.hand_on(), mapping, mapping_bytes));
  segment->num_bytes_ = num_bytes;

  const uint64_t nonce = serve_segment(segment->fd_);  // whoever asks before the next lines would have to guess it
  segment->is_served_ = true;
  segment->address_ = SegmentAddress{current_process(), segment->fd_, nonce};
  *reinterpret_cast<SegmentHeader*>(mapping) = SegmentHeader{kMagic, nonce, num_bytes};
  return segment;
}

void Segment::prefault(uint64_t num_bytes) {
  const uint64_t wanted = std::min(page_bytes() + round_to_pages(num_bytes), mapping_bytes_);
#ifdef MADV_POPULATE_WRITE
  if (::madvise(mapping_, wanted, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  RLINF_CHECK_SYSTEM(errno == EINVAL, "no memory for ", wanted, " bytes of shared memory");  // else an older kernel
#endif
  for (uint64_t offset = 0; offset < wanted; offset += page_bytes()) {
    reinterpret_cast<std::atomic<uint8_t>*>(mapping_ + offset)->fetch_add(0);
  }
}

std::shared_ptr<Segment> Segment::open(const SegmentAddress& address) {
  start_segment_server();
  ScopedFd fd(receive(address));
  struct stat status{};
  RLINF_CHECK_SYSTEM(::fstat(fd.get(), &status) == 0, "fstat of a shared segment");
  const uint64_t mapping_bytes = static_cast<uint64_t>(status.st_size);
  RLINF_CHECK_USER(S_ISREG(status.st_mode) && mapping_bytes > page_bytes(), "process ", address.creator.pid,
                   " has sent a file that is no shared segment");
  std::byte* mapping = map_shared(fd.get(), mapping_bytes);
  std::shared_ptr<Segment> segment(new Segment(fd.hand_on(), mapping, mapping_bytes));
  const SegmentHeader header = *reinterpret_cast<const SegmentHeader*>(mapping);
  RLINF_CHECK_USER(header.magic == kMagic && header.nonce == address.nonce, "process ", address.creator.pid,
                   " runs another version of rlinf-comm");
  segment->address_ = address;
  segment->num_bytes_ = header.num_bytes;
  return segment;
}

}  // namespace rlinf::comm
