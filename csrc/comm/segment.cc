#include "rlinf/comm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

constexpr uint64_t kMagic = 0x726c696e66534731;  // "rlinfSG1"; changes with the layout of anything in a segment

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

}  // namespace

Segment::Segment(int fd, std::byte* mapping, uint64_t mapping_bytes)
    : fd_(fd), mapping_(mapping), mapping_bytes_(mapping_bytes), bytes_(mapping + page_bytes()), num_bytes_(0) {}

Segment::~Segment() {
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
  // A peer that shrinks the file would kill every reader with SIGBUS.
  RLINF_CHECK_SYSTEM(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0,
                     "cannot seal the size of the segment '", name, "'");
  std::byte* mapping = map_shared(fd.get(), mapping_bytes);
  std::shared_ptr<Segment> segment(new Segment(fd.hand_on(), mapping, mapping_bytes));
  segment->num_bytes_ = num_bytes;

  uint64_t nonce = 0;
  RLINF_CHECK_SYSTEM(::getrandom(&nonce, sizeof(nonce), 0) == sizeof(nonce), "getrandom");
  segment->address_ = SegmentAddress{current_process(), segment->fd_, nonce};
  *reinterpret_cast<SegmentHeader*>(mapping) = SegmentHeader{kMagic, nonce, num_bytes};
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentAddress& address) {
  RLINF_CHECK_USER(is_alive(address.creator), "the process ", address.creator.pid,
                   " that created the shared segment is gone (or runs in another pid namespace or on another host)");
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", address.creator.pid, address.fd);
  ScopedFd fd(::open(path, O_RDWR | O_CLOEXEC));
  RLINF_CHECK_USER(fd.get() >= 0 || errno != ENOENT, "process ", address.creator.pid,
                   " has closed the shared segment; keep the object that created it for as long as peers may open it");
  RLINF_CHECK_SYSTEM(fd.get() >= 0, "cannot open ", path, " (the segment's creator must run as the same user)");

  struct stat status{};
  RLINF_CHECK_SYSTEM(::fstat(fd.get(), &status) == 0, "fstat of ", path);
  const uint64_t mapping_bytes = static_cast<uint64_t>(status.st_size);
  RLINF_CHECK_USER(S_ISREG(status.st_mode) && mapping_bytes > page_bytes(), path,
                   " is not a shared segment any more: its creator has closed it");
  std::byte* mapping = map_shared(fd.get(), mapping_bytes);
  std::shared_ptr<Segment> segment(new Segment(fd.hand_on(), mapping, mapping_bytes));
  const SegmentHeader header = *reinterpret_cast<const SegmentHeader*>(mapping);
  RLINF_CHECK_USER(
      header.magic == kMagic && header.nonce == address.nonce, path,
      " is another file by now: its creator has closed the segment, or is of another version of rlinf-comm");
  segment->address_ = address;
  segment->num_bytes_ = header.num_bytes;
  return segment;
}

}  // namespace rlinf::comm
