// The table of a channel's users: as many living processes as it has places for, and the places of the dead for new
// ones; and what a look at a process says while processes come and go.
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <limits>
#include <vector>

#include "rlinf/comm/channel.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/process_id.h"

using namespace rlinf::comm;

namespace {

constexpr uint64_t kMaxUsers = 256;

Outcome take_now(Channel& channel) {
  TakeRequest request;
  request.max_weight = std::numeric_limits<double>::infinity();
  WaitState wait;
  wait.deadline_ns = 0;
  std::vector<TakenItem> items;
  return channel.take(request, wait, &items);
}

// A child that has taken nothing, has told so through a pipe, and waits to be killed.
pid_t start_user(Channel& channel) {
  int ends[2];
  RLINF_CHECK_SYSTEM(::pipe(ends) == 0, "pipe");
  const pid_t pid = ::fork();
  if (pid == 0) {
    const bool timed_out = take_now(channel) == Outcome::kTimedOut;
    RLINF_CHECK_NOTHROW(::write(ends[1], timed_out ? "y" : "n", 1) == 1, "write");
    ::pause();
  }
  char answer = '?';
  RLINF_CHECK_SYSTEM(::read(ends[0], &answer, 1) == 1, "read");
  ::close(ends[0]);
  ::close(ends[1]);
  RLINF_CHECK_INTERNAL(answer == 'y', "the take of a new user");
  return pid;
}

void end(pid_t pid) {
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
}

void check_full_table() {
  auto channel = Channel::create("users", 8, 4096, 1);
  std::vector<pid_t> users;
  for (uint64_t i = 0; i < kMaxUsers; ++i) {
    users.push_back(start_user(*channel));
  }
  bool refused = false;
  try {
    take_now(*channel);
  } catch (const UserError&) {
    refused = true;
  }
  RLINF_CHECK_INTERNAL(refused, "one user too many");
  end(users.back());
  users.pop_back();
  RLINF_CHECK_INTERNAL(take_now(*channel) == Outcome::kTimedOut, "the place of a dead user is taken again");
  for (const pid_t pid : users) {
    end(pid);
  }
  RLINF_CHECK_INTERNAL(channel->lost_users().size() == kMaxUsers - 1, "not all deaths were noticed");
  RLINF_CHECK_INTERNAL(channel->drop_lost_users().size() == kMaxUsers - 1 && channel->lost_users().empty(), "drop");
}

void check_close() {
  auto channel = Channel::create("close", 8, 4096, 2);
  const pid_t pid = ::fork();
  if (pid == 0) {
    WaitState wait;
    BlockRef block;
    RLINF_CHECK_NOTHROW(channel->reserve(64, wait, &block) == Outcome::kDone, "reserve");
    channel->fill(block, {"head", 4}, {});
    channel->commit(block, ItemLabels{});
    channel->close_producer();
    ::_exit(0);
  }
  ::waitpid(pid, nullptr, 0);
  RLINF_CHECK_INTERNAL(channel->lost_users().empty(), "a producer that closed is not missed");
}

// A put that finds no room asks whether the dead hold it before it says that somebody died.
void check_room_of_the_dead() {
  auto channel = Channel::create("room", 1, 4096, 1);
  const pid_t pid = ::fork();
  if (pid == 0) {
    WaitState wait;
    BlockRef block;
    RLINF_CHECK_NOTHROW(channel->reserve(64, wait, &block) == Outcome::kDone, "reserve");
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(pid, nullptr, 0);
  WaitState wait;
  BlockRef block;
  RLINF_CHECK_INTERNAL(channel->reserve(64, wait, &block) == Outcome::kDone, "the room of the dead");
  Outcome second = Outcome::kPending;
  while (second == Outcome::kPending) {
    second = channel->reserve(64, wait, &block);
  }
  RLINF_CHECK_INTERNAL(second == Outcome::kPeerLost, "a put that waits for the living, beside the dead");
}

uint64_t num_descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  uint64_t count = 0;
  while (::readdir(folder) != nullptr) {
    ++count;
  }
  ::closedir(folder);
  return count;
}

void check_looks() {
  const uint64_t before = num_descriptors();
  for (int round = 0; round < 100; ++round) {
    int ends[2];
    RLINF_CHECK_SYSTEM(::pipe(ends) == 0, "pipe");
    const pid_t pid = ::fork();
    if (pid == 0) {
      const ProcessId own = current_process();
      RLINF_CHECK_NOTHROW(::write(ends[1], &own, sizeof(own)) == sizeof(own), "write");
      ::pause();
    }
    ProcessId child;
    RLINF_CHECK_SYSTEM(::read(ends[0], &child, sizeof(child)) == sizeof(child), "read");
    ::close(ends[0]);
    ::close(ends[1]);
    ProcessId younger = child;
    younger.start_ticks += 1;
    for (int look = 0; look < 100; ++look) {
      RLINF_CHECK_INTERNAL(is_alive(child) && !is_alive(younger), "alive");
    }
    ::kill(pid, SIGKILL);
    siginfo_t info;
    ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
    RLINF_CHECK_INTERNAL(!is_alive(child), "a zombie counts as dead");
    ::waitpid(pid, nullptr, 0);
    RLINF_CHECK_INTERNAL(!is_alive(child), "dead");
  }
  RLINF_CHECK_INTERNAL(num_descriptors() <= before, num_descriptors() - before, " descriptors are left");
}

}  // namespace

int main() {
  check_looks();
  check_close();
  check_room_of_the_dead();
  check_full_table();
  std::cout << "users: ok\n";
  return EXIT_SUCCESS;
}
