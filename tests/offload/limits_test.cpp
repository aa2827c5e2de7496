// The real limits of a system, each in a child process that lowers them: a full file system, sizes
// of files, open files, locked memory, no io_uring, folders that cannot be written, a kill.
#include <ATen/ops/equal.h>
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "offload/settings.h"
#include "poise/log.h"

namespace poise::offload {
namespace {

using config::OffloadIo;

// What `body` returns, or the message of what it throws, from a child; with every line of the log.
std::string in_child(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    std::string lines;
    log::set_sink([&](log::Level, const std::string& line) { lines += line + '\n'; });
    std::string text;
    try {
      text = body();
    } catch (const std::exception& error) {
      text = error.what();
    }
    text = lines + text;
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char piece[4096];
  for (ssize_t got = 0; (got = read(ends[0], piece, sizeof piece)) > 0;) {
    text.append(piece, static_cast<std::size_t>(got));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFEXITED(status)) text += join("ended by signal ", WTERMSIG(status));
  return text;
}

void limit(int resource, rlim_t value) {
  const rlimit both{value, value};
  POISE_CHECK(setrlimit(static_cast<__rlimit_resource>(resource), &both) == 0);
}

// Whoever may not be root is not: root is above several limits.
void become_nobody() {
  if (geteuid() != 0) return;
  POISE_CHECK(setgid(65534) == 0 && setuid(65534) == 0);
}

std::string round_trip(const std::shared_ptr<FileStore>& store, std::int64_t numel = 50000) {
  const auto span = store->reserve(numel, at::kFloat);
  const auto values = random_floats(numel, 1);
  span->put(0, values).wait();
  auto back = at::empty({numel}, at::kFloat);
  span->fetch(0, back).wait();
  return at::equal(back, values) ? join("right by ", store->io_name()) : "wrong";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Limits, WithoutAnyAllIsRight) {
  TempFolder folder;
  const auto text = in_child([&] { return round_trip(open_store(policy_in(folder.path()))); });
  EXPECT_TRUE(contains(text, "right by ")) << text;
}

// A tmpfs of one MiB; only root may mount one, in a mount namespace of its own.
std::string on_a_small_disk(const TempFolder& folder, const std::function<std::string()>& body) {
  return in_child([&]() -> std::string {
    if (unshare(CLONE_NEWNS) != 0 ||
        mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
      return "cannot mount";
    }
    return body();
  });
}

TEST(Limits, AFullFileSystemIsToldWhenTheRoomIsTaken) {
  TempFolder folder;
  const auto text = on_a_small_disk(folder, [&] {
    const auto store = open_store(policy_in(folder.path()));
    const auto first = store->reserve(100000, at::kFloat);
    const auto message = message_of([&] { store->reserve(400000, at::kFloat); });
    return message + " then " + round_trip(store, 1000);
  });
  if (contains(text, "cannot mount")) GTEST_SKIP() << "only root may mount a small file system";
  EXPECT_TRUE(contains(text,
                       "[offload] cannot take 1601536 bytes at offset 401408 of the unnamed "
                       "file in " +
                           folder.path() +
                           ": No space left on device; free some "
                           "room there"))
      << text;
  EXPECT_TRUE(contains(text, "then right")) << "and the store goes on: " << text;
}

TEST(Limits, TheSizeOfFilesIsAnErrorAndNotTheEnd) {
  for (const auto io : {OffloadIo::automatic, OffloadIo::threads}) {
    TempFolder folder;
    const auto at_once = in_child([&] {
      const auto store = open_store(policy_in(folder.path(), io));
      limit(RLIMIT_FSIZE, 100000);
      return round_trip(store);
    });
    EXPECT_TRUE(contains(at_once, "cannot take 200704 bytes at offset 0")) << at_once;
    EXPECT_TRUE(contains(at_once, "File too large; raise the limit of file sizes (ulimit -f)"))
        << at_once;
    const auto later = in_child([&] {
      const auto store = open_store(policy_in(folder.path(), io));
      const auto span = store->reserve(50000, at::kFloat);
      limit(RLIMIT_FSIZE, 100000);
      span->put(0, random_floats(50000, 1)).wait();
      return std::string("no error");
    });
    EXPECT_TRUE(contains(later, "cannot write 8192 bytes at offset ")) << later;
    EXPECT_TRUE(contains(later, "File too large")) << later;
  }
}

TEST(Limits, OpenFiles) {
  TempFolder folder;
  const auto text = in_child([&] {
    limit(RLIMIT_NOFILE, 3);
    return round_trip(open_store(policy_in(folder.path())));
  });
  EXPECT_TRUE(contains(text, "[offload] cannot open a file in " + folder.path() +
                                 ": Too many open files; raise the limit of open files"))
      << text;
}

TEST(Limits, LockedMemoryOnlyCostsTheRegistration) {
  TempFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0777), 0);
  const auto text = in_child([&] {
    become_nobody();
    limit(RLIMIT_MEMLOCK, 4096);
    return round_trip(open_store(policy_in(folder.path())));
  });
  EXPECT_TRUE(contains(text, "right by ")) << text;
  if (contains(text, "threads")) return;  // no io_uring on this system
  EXPECT_TRUE(contains(text, "its buffers cannot be locked")) << text;
  EXPECT_TRUE(contains(text, "right by io_uring, unregistered")) << text;
}

// As container run times do.
void refuse_io_uring() {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{4, code};
  POISE_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  POISE_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

TEST(Limits, WithoutIoUringThreadsServe) {
  TempFolder folder;
  const auto text = in_child([&] {
    refuse_io_uring();
    return round_trip(open_store(policy_in(folder.path())));
  });
  EXPECT_TRUE(contains(text, "no io_uring, threads instead: ")) << text;
  EXPECT_TRUE(contains(text, "right by threads")) << text;
  EXPECT_EQ(text.find("instead"), text.rfind("instead")) << "said once: " << text;
}

TEST(Limits, UnlessIoUringWasAskedFor) {
  TempFolder folder;
  const auto text = in_child([&] {
    refuse_io_uring();
    return round_trip(open_store(policy_in(folder.path(), OffloadIo::io_uring)));
  });
  EXPECT_TRUE(contains(text, "[offload] no io_uring: ")) << text;
  EXPECT_TRUE(contains(text, "set offload.io to auto or threads")) << text;
}

TEST(Limits, AFolderThatCannotBeWritten) {
  TempFolder folder;
  const auto closed = folder / "closed";
  ASSERT_EQ(mkdir(closed.c_str(), 0555), 0);
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  const auto here = in_child([&] {
    become_nobody();
    return round_trip(open_store(policy_in(closed)));
  });
  EXPECT_TRUE(contains(here, "[offload] cannot open a file in " + closed +
                                 ": Permission denied; set offload.directory to a folder that"))
      << here;
  const auto below = in_child([&] {
    become_nobody();
    return round_trip(open_store(policy_in(closed + "/deeper")));
  });
  EXPECT_TRUE(contains(below, "[offload] cannot make the folder " + closed + "/deeper: ")) << below;
  const auto file = folder.write("file", "text");
  EXPECT_TRUE(contains(message_of([&] { open_store(policy_in(file)); }), "is no folder"));
}

TEST(Limits, AKillInTheMiddleOfWritesLeavesNothing) {
  TempFolder folder;
  for (const auto name : {ScratchFile::Name::none, ScratchFile::Name::taken_away}) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      const auto store = open_store(policy_in(folder.path()), name);
      const auto span = store->reserve(50000, at::kFloat);
      const auto values = random_floats(50000, 1);
      for (int i = 0;; ++i) {
        span->put(0, values);
        if (i == 20 && write(ready[1], "x", 1) != 1) _exit(1);
        if (i % 20 == 0) span->put(0, values).wait();
      }
    }
    close(ready[1]);
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    EXPECT_NE(rmdir(folder.path().c_str()), -1) << "empty: " << std::strerror(errno);
    ASSERT_EQ(mkdir(folder.path().c_str(), 0755), 0);
  }
}

}  // namespace
}  // namespace poise::offload
