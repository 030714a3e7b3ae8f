#include "rlinf/comm/segment_server.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

// For either side of a request; a healthy peer answers within a millisecond.
constexpr int kAnswerTimeoutS = 2;

struct Request {
  int32_t fd;
  uint64_t nonce;
};

// What the threads of this process share. Replaced in a forked child, which has no server thread.
struct Server {
  std::mutex mutex;
  std::map<int32_t, uint64_t> segments;  // descriptor to nonce
  int listener = -1;
};

Server* server = new Server;  // never freed: the thread outlives static destructors

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// An abstract name: it starts with a zero byte, and lives as long as the socket. A name without the random part could
// be taken by any user of the machine before its process takes it.
socklen_t name_of(const ProcessId& process, sockaddr_un* address) {
  *address = sockaddr_un{};
  address->sun_family = AF_UNIX;
  const int length = std::snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "rlinf-comm/%d-%llu-%08x",
                                   process.pid, static_cast<unsigned long long>(process.start_ticks),
                                   process.server_nonce);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
}

bool is_same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

void limit_waits(int socket) {
  const timeval timeout{kAnswerTimeoutS, 0};
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
}

// One message of `answer`, with a descriptor when `fd` is one.
void send_answer(int socket, SegmentAnswer answer, int fd) {
  iovec part{&answer, sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  static_cast<void>(::sendmsg(socket, &message, MSG_NOSIGNAL));  // a peer that died needs no answer
}

bool receive_answer(int socket, SegmentAnswer* answer, int* fd) {
  iovec part{answer, sizeof(*answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof(*answer))) {
    return false;
  }
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(fd, CMSG_DATA(header), sizeof(int));
  }
  return (*answer == SegmentAnswer::kFound) == (*fd >= 0);
}

void answer_one(Server* own, int socket) {
  if (!is_same_user(socket)) {
    return;
  }
  limit_waits(socket);
  Request request{};
  if (::recv(socket, &request, sizeof(request), 0) != static_cast<ssize_t>(sizeof(request))) {
    return;  // only looked whether we are alive, or died
  }
  SegmentAnswer answer = SegmentAnswer::kClosed;
  // Under the lock, so that the owner cannot close the descriptor meanwhile. The buffer of a fresh socket takes the
  // message, so that the send does not wait.
  const std::lock_guard<std::mutex> lock(own->mutex);
  const auto found = own->segments.find(request.fd);
  if (found != own->segments.end()) {
    answer = found->second == request.nonce ? SegmentAnswer::kFound : SegmentAnswer::kAnother;
  }
  send_answer(socket, answer, answer == SegmentAnswer::kFound ? request.fd : -1);
}

void* serve(void* argument) {
  auto* own = static_cast<Server*>(argument);
  while (true) {
    const Socket peer(::accept4(own->listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.get() >= 0) {
      answer_one(own, peer.get());
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      ::usleep(10'000);  // until descriptors or memory are free again
    }
  }
  return nullptr;
}

void watch_forks() {
  static const int registered = ::pthread_atfork([] { server->mutex.lock(); }, [] { server->mutex.unlock(); },
                                                 [] {
                                                   if (server->listener >= 0) {
                                                     ::close(server->listener);  // it is the parent's name
                                                   }
                                                   server = new Server;
                                                 });
  RLINF_CHECK_INTERNAL(registered == 0, "pthread_atfork");
}

int connect_to(const ProcessId& process) {
  sockaddr_un address;
  const socklen_t length = name_of(process, &address);
  const int socket = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  RLINF_CHECK_SYSTEM(socket >= 0, "socket");
  limit_waits(socket);
  if (::connect(socket, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    const int error = errno;
    ::close(socket);
    errno = error;
    return -1;
  }
  return socket;
}

}  // namespace

void start_segment_server() {
  watch_forks();
  const std::lock_guard<std::mutex> lock(server->mutex);
  if (server->listener >= 0) {
    return;
  }
  const int listener = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  RLINF_CHECK_SYSTEM(listener >= 0, "socket");
  sockaddr_un address;
  const socklen_t length = name_of(current_process(), &address);
  const bool listens =
      ::bind(listener, reinterpret_cast<const sockaddr*>(&address), length) == 0 && ::listen(listener, SOMAXCONN) == 0;
  if (!listens) {
    const int error = errno;
    ::close(listener);
    errno = error;
  }
  RLINF_CHECK_SYSTEM(listens, "cannot listen on the abstract unix socket '", address.sun_path + 1, "'");
  server->listener = listener;
  // Signals are for the interpreter's threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  const int error = ::pthread_create(&thread, nullptr, serve, server);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) {
    ::close(listener);
    server->listener = -1;
    throw SystemError("cannot start the thread that hands out segments", error);
  }
  ::pthread_detach(thread);
}

uint64_t serve_segment(int32_t fd) {
  start_segment_server();
  uint32_t own = 0;
  RLINF_CHECK_SYSTEM(::getrandom(&own, sizeof(own), 0) == sizeof(own), "getrandom");
  const uint64_t nonce = uint64_t{current_process().server_nonce} << 32 | own;
  const std::lock_guard<std::mutex> lock(server->mutex);
  server->segments[fd] = nonce;
  return nonce;
}

void stop_serving_segment(int32_t fd) {
  const std::lock_guard<std::mutex> lock(server->mutex);
  server->segments.erase(fd);
}

SegmentAnswer request_segment(const ProcessId& creator, int32_t fd, uint64_t nonce, int* received) {
  ProcessId named = creator;
  named.server_nonce = static_cast<uint32_t>(nonce >> 32);
  const Socket socket(connect_to(named));
  if (socket.get() < 0) {
    return errno == ECONNREFUSED ? SegmentAnswer::kGone : SegmentAnswer::kNoAnswer;
  }
  if (!is_same_user(socket.get())) {
    return SegmentAnswer::kForeign;
  }
  const Request request{fd, nonce};
  SegmentAnswer answer;
  *received = -1;
  errno = 0;
  if (::send(socket.get(), &request, sizeof(request), MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof(request)) ||
      !receive_answer(socket.get(), &answer, received)) {
    return errno == EAGAIN || errno == EWOULDBLOCK ? SegmentAnswer::kNoAnswer : SegmentAnswer::kGone;
  }
  return answer;
}

bool has_segment_server(const ProcessId& process) {
  const Socket socket(connect_to(process));
  if (socket.get() < 0) {
    return errno != ECONNREFUSED;
  }
  return is_same_user(socket.get());  // else another user has taken the name of a process that has ended
}

}  // namespace rlinf::comm
