// Shared memory of a lane: made by the consumer, found by the producer, swept after a crash; and who is alive.
//
// Names are "/areal_hpc.<name>". The name is needed only until both ends are attached: the consumer unlinks it then, and the kernel frees
// the memory with the last mapping, however the processes end. A name left by a crash before that is replaced by the next consumer of that
// name and found by sweep_stale(). A maker holds flock(2) on the file until `magic` is set, so a half-made segment is told from debris.

#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "layout.hpp"

// Younger than some C libraries; an older kernel answers EINVAL.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

// Test builds define this to kill the process at a chosen store.
#ifndef AREAL_HPC_FAULT_POINT
#define AREAL_HPC_FAULT_POINT(name)
#endif

namespace areal_hpc {

inline uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

// Names a process for ever: pid in the high half, low half of its start time (clock ticks since boot, proc(5) stat field 22) in the other,
// because pids are used again. 0: no such process, or only its unreaped remains.
inline uint64_t process_tag(pid_t pid) {
  char path[32];
  std::snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[1024];
  const ssize_t length = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (length <= 0) return 0;
  text[length] = '\0';
  const char* field = std::strrchr(text, ')');  // the command's name may hold spaces and brackets
  if (field == nullptr || field[1] == '\0' || field[2] == 'Z' || field[2] == 'X') return 0;
  field += 2;  // field 3
  for (int i = 3; i < 22; ++i) {
    field = std::strchr(field, ' ');
    if (field == nullptr) return 0;
    ++field;
  }
  return static_cast<uint64_t>(pid) << 32 | static_cast<uint32_t>(std::strtoull(field, nullptr, 10));
}

// How many forks lie between this process and the one that was executed. A handle belongs to the process that made it: in a forked child
// both would move the same positions.
inline std::atomic<uint32_t>& fork_depth() {
  static std::atomic<uint32_t> depth{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { fork_depth().fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return depth;
}

inline bool is_alive(uint64_t tag) { return tag != 0 && process_tag(static_cast<pid_t>(tag >> 32)) == tag; }

inline uint64_t pid_namespace() {
  struct stat info;
  return ::stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

inline std::system_error os_error(int error, const std::string& what) { return {error, std::generic_category(), what}; }

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// One mapping of a lane. Views handed out keep it alive, so memory outlives a handle that was closed.
class Segment {
 public:
  Segment(int fd, uint64_t num_bytes, ino_t inode) : num_bytes_(num_bytes), inode_(inode) {
    base_ = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base_ == MAP_FAILED) throw os_error(errno, "mmap of " + std::to_string(num_bytes) + " bytes of shared memory");
  }
  ~Segment() { ::munmap(base_, num_bytes_); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  LaneHeader& header() const { return *static_cast<LaneHeader*>(base_); }
  std::byte* data() const { return static_cast<std::byte*>(base_) + kPageBytes; }
  uint64_t num_bytes() const { return num_bytes_; }
  ino_t inode() const { return inode_; }

  // Asks for huge pages and takes every page fault now, not in the middle of a record. (A failure costs speed only.)
  void prefault(bool maker) const {
    ::madvise(base_, num_bytes_, MADV_HUGEPAGE);
    if (maker)
      ::madvise(base_, num_bytes_, MADV_COLLAPSE);  // else the pages that posix_fallocate made stay small until khugepaged passes by
    if (::madvise(base_, num_bytes_, MADV_POPULATE_WRITE) == 0) return;
    for (uint64_t page = 0; page < num_bytes_; page += kPageBytes) (void)static_cast<volatile const char*>(base_)[page];
  }

 private:
  void* base_ = nullptr;
  uint64_t num_bytes_;
  ino_t inode_;
};

inline constexpr const char* kNamePrefix = "areal_hpc.";

inline std::string shm_name(const std::string& name) {
  const std::string full = kNamePrefix + name;
  if (name.empty() || name.find('/') != std::string::npos || name.find('\0') != std::string::npos || full.size() > 254) {
    throw std::invalid_argument("a lane's name is 1 to 244 characters without '/' and NUL, not '" + name + "'");
  }
  return "/" + full;
}

inline struct stat file_info(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) throw os_error(errno, "fstat of a shared memory segment");
  return info;
}

// Removes the name if it still means this segment.
inline void unlink_segment(const std::string& name, ino_t inode) {
  const FileDescriptor file(::shm_open(shm_name(name).c_str(), O_RDWR | O_CLOEXEC, 0));
  if (file.get() >= 0 && file_info(file.get()).st_ino == inode) ::shm_unlink(shm_name(name).c_str());
}

struct LaneOptions {
  uint32_t lane = 0;
  uint64_t job_id = 0;
  uint64_t restart_id = 0;
  bool checksum = true;
};

// The identity of a lane, complete once is_made() says so.
inline void make_header(LaneHeader* memory, uint64_t capacity_bytes, const LaneOptions& options) {
  auto* header = new (memory) LaneHeader{};
  header->layout_version = kLayoutVersion;
  header->lane = options.lane;
  header->consumer_tag = process_tag(::getpid());
  header->pid_namespace = pid_namespace();
  header->job_id = options.job_id;
  header->restart_id = options.restart_id;
  header->capacity_bytes = capacity_bytes;
  header->checksum = options.checksum ? 1 : 0;
  header->magic.store(kMagic, std::memory_order_release);  // P0
}
inline bool is_made(const LaneHeader& header) { return header.magic.load(std::memory_order_acquire) == kMagic; }  // pairs with P0

namespace memory_detail {

// The living consumer of the segment behind `fd`: its tag, or 0 if it is debris. Where pids mean something else, everybody counts as alive.
inline uint64_t living_consumer(int fd) {
  if (file_info(fd).st_size < static_cast<off_t>(kPageBytes)) return 0;
  void* base = ::mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw os_error(errno, "mmap of a lane's header");
  const auto* header = static_cast<const LaneHeader*>(base);
  const bool made = is_made(*header);
  const uint64_t tag = made ? header->consumer_tag : 0;
  const bool elsewhere = made && header->pid_namespace != pid_namespace();
  ::munmap(base, kPageBytes);
  return elsewhere || is_alive(tag) ? tag : 0;
}

// A locked file of that name which nobody uses: new, or left by a dead consumer and taken out of the way first.
inline FileDescriptor claim_name(const std::string& name) {
  const std::string path = shm_name(name);
  while (true) {
    FileDescriptor file(::shm_open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    if (file.get() < 0) throw os_error(errno, "shm_open of " + path);
    while (::flock(file.get(), LOCK_EX) != 0) {
      if (errno != EINTR) throw os_error(errno, "flock of " + path);
    }
    const struct stat info = file_info(file.get());
    if (info.st_nlink == 0) continue;  // taken out of the way by another consumer while we waited for the lock
    if (info.st_size == 0) return file;
    if (const uint64_t tag = living_consumer(file.get()); tag != 0) {
      throw LaneBusy("lane '" + name + "' already has a consumer: process " + std::to_string(tag >> 32));
    }
    unlink_segment(name, info.st_ino);
  }
}

}  // namespace memory_detail

// Makes the segment of a lane. The memory is taken here, by the consumer and so on its NUMA node; a full /dev/shm is an ENOSPC here, never
// a SIGBUS later.
inline std::shared_ptr<Segment> create_lane(const std::string& name, uint64_t capacity_bytes, const LaneOptions& options) {
  if (capacity_bytes == 0 || capacity_bytes > uint64_t{1} << 46)
    throw std::invalid_argument("a lane's capacity is 1 byte to 64 TiB, not " + std::to_string(capacity_bytes));
  if (options.lane > 0xffff) throw std::invalid_argument("a lane's number is 0 to 65535, not " + std::to_string(options.lane));
  const uint64_t capacity = (capacity_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const FileDescriptor file(memory_detail::claim_name(name));
  AREAL_HPC_FAULT_POINT("name claimed");
  // Asked first: the kernel would fill the memory of the node page by page before it says no.
  struct statvfs space;
  const bool limited = ::fstatvfs(file.get(), &space) == 0 && space.f_blocks != 0;
  int error = limited && kPageBytes + capacity > uint64_t{space.f_bavail} * space.f_frsize ? ENOSPC : EINTR;
  while (error == EINTR) error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(kPageBytes + capacity));
  if (error != 0) {
    unlink_segment(name, file_info(file.get()).st_ino);
    throw os_error(error, "lane '" + name + "' needs " + std::to_string(kPageBytes + capacity) + " bytes of /dev/shm");
  }
  AREAL_HPC_FAULT_POINT("memory taken");
  auto segment = std::make_shared<Segment>(file.get(), kPageBytes + capacity, file_info(file.get()).st_ino);
  segment->prefault(true);
  make_header(&segment->header(), capacity, options);
  AREAL_HPC_FAULT_POINT("lane made");
  ::flock(file.get(), LOCK_UN);  // the mapping would keep the lock
  return segment;
}

// The segment of that name once its consumer has made it, else null and in `reason` why not yet. A segment whose consumer is dead belongs
// to an earlier attempt and will be replaced, so it is waited out; one that lives but is not ours is an error.
inline std::shared_ptr<Segment> open_lane(const std::string& name, uint64_t job_id, uint64_t restart_id, std::string& reason) {
  const std::string path = shm_name(name);
  const FileDescriptor file(::shm_open(path.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (file.get() < 0) {
    if (errno != ENOENT) throw os_error(errno, "shm_open of " + path);
    reason = "no consumer has made it";
    return nullptr;
  }
  const struct stat info = file_info(file.get());
  if (info.st_size < static_cast<off_t>(kPageBytes)) {
    reason = "its consumer is making it";
    return nullptr;
  }
  auto segment = std::make_shared<Segment>(file.get(), static_cast<uint64_t>(info.st_size), info.st_ino);
  const LaneHeader& header = segment->header();
  if (!is_made(header)) {
    reason = "its consumer is making it";
    return nullptr;
  }
  if (header.pid_namespace != pid_namespace())
    throw LaneMismatch("lane '" + name + "': its consumer is in another PID namespace, where liveness cannot be seen");
  if (!is_alive(header.consumer_tag)) {
    reason = "the segment of that name is left from a consumer that died";
    return nullptr;
  }
  const auto check = [&](const char* what, uint64_t found, uint64_t wanted) {
    if (found != wanted)
      throw LaneMismatch("lane '" + name + "' has " + what + " " + std::to_string(found) + ", not " + std::to_string(wanted));
  };
  check("layout version", header.layout_version, kLayoutVersion);
  check("job id", header.job_id, job_id);
  check("restart id", header.restart_id, restart_id);
  check("size", segment->num_bytes(), kPageBytes + header.capacity_bytes);
  segment->prefault(false);
  return segment;
}

// Removes this user's segments whose consumer is dead; returns their names.
inline std::vector<std::string> sweep_stale() {
  std::vector<std::string> names, removed;
  if (DIR* folder = ::opendir("/dev/shm")) {
    while (const dirent* entry = ::readdir(folder)) {
      if (std::strncmp(entry->d_name, kNamePrefix, std::strlen(kNamePrefix)) == 0)
        names.emplace_back(entry->d_name + std::strlen(kNamePrefix));
    }
    ::closedir(folder);
  }
  for (const std::string& name : names) {
    const FileDescriptor file(::shm_open(shm_name(name).c_str(), O_RDWR | O_CLOEXEC, 0));
    if (file.get() < 0 || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;  // another user's, just unlinked, or being made
    const struct stat info = file_info(file.get());
    if (info.st_nlink == 0 || memory_detail::living_consumer(file.get()) != 0) continue;
    unlink_segment(name, info.st_ino);
    removed.push_back(name);
  }
  return removed;
}

}  // namespace areal_hpc
