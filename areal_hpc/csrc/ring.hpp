// The ring: one lane = one producer, one consumer, variable-size records, no lock and no copy in between.
//
// Producer                                      Consumer
//   slot = try_reserve(bytes)  (null: full)       record = try_peek()  (none: empty)
//   ... write into slot ...                       ... read record->payload ...
//   commit(fields)  or  abort()                   release(record->lease)
//
// A record becomes visible by one store of `tail`, after payload, checksum and header are written: a producer killed at any instruction
// leaves either a whole record or none. Several records may be leased at once and released in any order; space goes back in the order of
// the lane, so a long lease holds back what is behind it. A trap: the slot and the views are windows into the circle; after commit, abort
// or release the bytes there belong to others.
//
// Labels P0 (layout.hpp), P1, P2, P3 name the two sides of each pair of memory orders. Where the pair must also order a store before a
// later load of *another* location (sleep and wake), both sides are seq_cst.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "crc32c.hpp"
#include "layout.hpp"
#include "memory.hpp"

// Test builds define this to kill the process at a chosen store.
#ifndef AREAL_HPC_FAULT_POINT
#define AREAL_HPC_FAULT_POINT(name)
#endif

namespace areal_hpc {

inline constexpr uint64_t kSpin_ns = 50'000;
inline constexpr uint64_t kFutexCap_ns = 50'000'000;  // bounds the harm of a peer that died between its store and its wake-up call
inline constexpr uint64_t kLivenessPeriod_ns = 100'000'000;

namespace ring_detail {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The futex is the low half of the position itself. All positions are multiples of 64 and a wait looks at it at least every 50 ms, so a
// change that wraps to the same value is no worse than a late wake-up.
inline uint32_t* futex_word(std::atomic<uint64_t>& position) { return reinterpret_cast<uint32_t*>(&position); }

inline void wake(std::atomic<uint64_t>& position) {
  ::syscall(SYS_futex, futex_word(position), FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

// Waits for `ready()`, which reads `position` with acquire: 50 us spinning, then asleep. False: not within `timeout_s`.
template <class Ready>
bool wait(std::atomic<uint64_t>& position, std::atomic<uint32_t>& sleeper, double timeout_s, Ready ready) {
  const uint64_t start = monotonic_ns();
  const uint64_t deadline = start + static_cast<uint64_t>(std::clamp(timeout_s, 0.0, 1e9) * 1e9);
  const uint64_t spin_until = std::min(deadline, start + kSpin_ns);
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (monotonic_ns() < spin_until);
  bool is_ready = false;
  for (uint64_t now = monotonic_ns(); !is_ready && now < deadline; now = monotonic_ns()) {
    sleeper.store(1, std::memory_order_seq_cst);  // P3: announced before the position is looked at once more ...
    const uint64_t seen =
        position.load(std::memory_order_seq_cst);  // P3: ... so either this sees the peer's store or the peer sees the announcement
    is_ready = ready();
    if (is_ready) break;
    const uint64_t nap = std::min(deadline - now, kFutexCap_ns);
    const timespec timeout = {static_cast<time_t>(nap / 1'000'000'000u), static_cast<long>(nap % 1'000'000'000u)};
    ::syscall(SYS_futex, futex_word(position), FUTEX_WAIT, static_cast<uint32_t>(seen), &timeout, nullptr, 0);
    is_ready = ready();
  }
  sleeper.store(0, std::memory_order_relaxed);  // only saves system calls
  return is_ready || ready();
}

}  // namespace ring_detail

struct RecordFields {
  int64_t ticket = 0;
  int32_t version_min = 0, version_max = 0;
  uint32_t num_tokens = 0, num_samples = 0;
};

// The writing end. One thread at a time.
class Producer {
 public:
  // Attaches to the lane; LaneBusy if a living producer has it. The next producer after a dead one goes on behind its last committed
  // record.
  explicit Producer(std::shared_ptr<Segment> segment)
      : segment_(std::move(segment)), header_(segment_->header()), owner_(::getpid()), capacity_(header_.capacity_bytes) {
    uint64_t holder = header_.producer_tag.load(std::memory_order_acquire);
    if (header_.producer_closed.load(std::memory_order_acquire)) throw LaneClosed(name() + ": its producer has closed it");
    if (is_alive(holder) || !header_.producer_tag.compare_exchange_strong(holder, process_tag(owner_), std::memory_order_acq_rel)) {
      throw LaneBusy(name() + " already has a producer: process " + std::to_string(holder >> 32));
    }
    incarnation_ = header_.incarnation.load(std::memory_order_relaxed) + 1;
    header_.incarnation.store(incarnation_, std::memory_order_release);  // after the tag: who sees it asks about the right process
    tail_ = header_.tail.load(std::memory_order_acquire);                // a dead predecessor's last commit
    head_ = header_.head.load(std::memory_order_acquire);                // pairs with P2
    beat();
  }
  ~Producer() { close(); }
  Producer(const Producer&) = delete;
  Producer& operator=(const Producer&) = delete;

  uint64_t max_record_bytes() const { return std::min<uint64_t>(capacity_ / 4, std::numeric_limits<uint32_t>::max()); }
  uint64_t capacity_bytes() const { return capacity_; }
  std::string name() const { return "lane " + std::to_string(header_.lane); }
  uint32_t lane() const { return header_.lane; }
  uint32_t incarnation() const { return incarnation_; }
  uint64_t num_committed() const { return seq_; }
  uint64_t used_bytes() const { return tail_ - header_.head.load(std::memory_order_acquire); }
  uint64_t full_waits() const { return header_.full_waits.load(std::memory_order_relaxed); }
  double full_wait_s() const { return static_cast<double>(header_.full_wait_ns.load(std::memory_order_relaxed)) * 1e-9; }

  // Where to write `num_bytes`, or null while the lane is full.
  std::byte* try_reserve(uint64_t num_bytes) {
    if (closed_) throw LaneClosed(name() + " is closed");
    if (reserved_) throw std::logic_error(name() + ": the slot reserved before is neither committed nor aborted");
    if (num_bytes > max_record_bytes()) {
      throw RecordTooLarge(name() + ": a record of " + std::to_string(num_bytes) + " bytes is larger than a quarter of its capacity of " +
                           std::to_string(capacity_) + " bytes");
    }
    beat();
    const uint64_t total = kAlignment + aligned(num_bytes), offset = tail_ % capacity_;
    padding_ = offset + total > capacity_ ? capacity_ - offset : 0;
    needed_ = padding_ + total;
    if (!fits()) {
      note_full();
      return nullptr;
    }
    if (header_.consumer_closed.load(std::memory_order_acquire)) throw LaneClosed(name() + ": its consumer has closed it");
    note_room();
    reserved_ = true;
    payload_bytes_ = num_bytes;
    return at(tail_ + padding_) + kAlignment;
  }

  // Waits until the record refused last fits (or the consumer closes the lane, which the next try_reserve reports).
  bool wait_for_room(double timeout_s) {
    const bool room = ring_detail::wait(header_.head, header_.producer_waits, timeout_s,
                                        [this] { return fits() || header_.consumer_closed.load(std::memory_order_acquire); });
    beat();
    return room;
  }

  // True if a blocking reserve on this thread would wait for this very thread to consume.
  bool consumed_by_this_thread() const {
    return header_.consumer_thread.load(std::memory_order_relaxed) == static_cast<uint32_t>(::gettid());
  }

  // Publishes the reserved slot; returns its sequence number.
  uint64_t commit(const RecordFields& fields, Kind kind = Kind::kData) {
    if (!reserved_) throw std::logic_error(name() + ": nothing is reserved");
    if (padding_ > 0)
      write_header(tail_, RecordHeader{.payload_bytes = static_cast<uint32_t>(padding_ - kAlignment), .kind = Kind::kPadding});
    AREAL_HPC_FAULT_POINT("padding written");
    RecordHeader header{.payload_bytes = static_cast<uint32_t>(payload_bytes_),
                        .kind = kind,
                        .seq = seq_,
                        .ticket = fields.ticket,
                        .version_min = fields.version_min,
                        .version_max = fields.version_max,
                        .num_tokens = fields.num_tokens,
                        .num_samples = fields.num_samples,
                        .commit_time_s = static_cast<double>(monotonic_ns()) * 1e-9};
    if (header_.checksum) header.payload_crc32c = crc32c(at(tail_ + padding_) + kAlignment, payload_bytes_);
    write_header(tail_ + padding_, header);
    AREAL_HPC_FAULT_POINT("record written");
    tail_ += needed_;
    header_.tail.store(
        tail_,
        std::memory_order_seq_cst);  // P1 (release): payload and headers before the tail; P3: the tail before the look at the sleeper
    AREAL_HPC_FAULT_POINT("tail published");
    if (header_.consumer_waits.load(std::memory_order_seq_cst)) ring_detail::wake(header_.tail);  // P3
    if (tail_ - head_ > header_.high_water_bytes.load(std::memory_order_relaxed)) note_high_water();
    reserved_ = false;
    return seq_++;
  }

  void abort() { reserved_ = false; }

  // Says "I am here" to whoever waits for this lane; reserve and commit do it too.
  void beat() { header_.heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed); }

  // No record follows. A forked child that inherits this handle must not say so.
  void close() {
    if (closed_) return;
    closed_ = true;
    if (::getpid() != owner_) return;
    header_.producer_closed.store(
        1, std::memory_order_release);  // after the last tail: who reads it (acquire) and then finds the lane empty has everything
    ring_detail::wake(header_.tail);
  }

 private:
  std::byte* at(uint64_t position) const { return segment_->data() + position % capacity_; }

  bool fits() {
    if (tail_ + needed_ - head_ <= capacity_) return true;
    head_ = header_.head.load(std::memory_order_acquire);  // pairs with P2: the consumer has read what is overwritten now
    return tail_ + needed_ - head_ <= capacity_;
  }

  void write_header(uint64_t position, RecordHeader header) {
    header.lane = static_cast<uint16_t>(header_.lane);
    header.incarnation = incarnation_;
    header.header_crc32c = crc32c(&header, offsetof(RecordHeader, header_crc32c));
    std::memcpy(at(position), &header, sizeof header);
  }

  void note_full() {
    const uint64_t now = monotonic_ns();
    if (full_since_ns_ == 0) {
      full_since_ns_ = now;
      header_.full_waits.fetch_add(1, std::memory_order_relaxed);
    }
    if (header_.consumer_closed.load(std::memory_order_acquire)) throw LaneClosed(name() + ": its consumer has closed it");
    if (now < next_liveness_check_ns_) return;
    next_liveness_check_ns_ = now + kLivenessPeriod_ns;
    if (!is_alive(header_.consumer_tag))
      throw LaneClosed(name() + ": its consumer, process " + std::to_string(header_.consumer_tag >> 32) + ", is dead");
  }

  void note_room() {
    if (full_since_ns_ == 0) return;
    header_.full_wait_ns.fetch_add(monotonic_ns() - full_since_ns_, std::memory_order_relaxed);
    full_since_ns_ = 0;
  }

  void note_high_water() {
    const uint64_t used = used_bytes();
    if (used > header_.high_water_bytes.load(std::memory_order_relaxed)) header_.high_water_bytes.store(used, std::memory_order_relaxed);
  }

  std::shared_ptr<Segment> segment_;
  LaneHeader& header_;
  pid_t owner_;
  uint64_t capacity_;
  uint32_t incarnation_ = 0;
  uint64_t tail_ = 0, head_ = 0;  // ours; last seen of the consumer's
  uint64_t seq_ = 0;
  uint64_t padding_ = 0, needed_ = 0, payload_bytes_ = 0;  // of the reservation
  uint64_t full_since_ns_ = 0, next_liveness_check_ns_ = 0;
  bool reserved_ = false, closed_ = false;
};

struct RecordView {
  RecordHeader header;
  const std::byte* payload;
  uint64_t lease;
};

struct ConsumerCounters {
  uint64_t records = 0, bytes = 0, markers = 0, checksum_errors = 0;  // delivered, or found damaged
};

enum class ProducerState { kUnattached, kAlive, kDead, kClosed };

// The reading end. A mutex that nobody contends in normal use lets a record be released wherever it is dropped.
class Consumer {
 public:
  Consumer(const std::string& name, uint64_t capacity_bytes, const LaneOptions& options, bool poison)
      : Consumer(name, create_lane(name, capacity_bytes, options), poison) {}
  Consumer(std::string name, std::shared_ptr<Segment> segment, bool poison)
      : name_(std::move(name)),
        segment_(std::move(segment)),
        header_(segment_->header()),
        owner_(::getpid()),
        capacity_(header_.capacity_bytes),
        poison_(poison) {}
  ~Consumer() { close(); }
  Consumer(const Consumer&) = delete;
  Consumer& operator=(const Consumer&) = delete;

  const std::shared_ptr<Segment>& segment() const { return segment_; }
  uint64_t capacity_bytes() const { return capacity_; }
  uint32_t lane() const { return header_.lane; }

  // The oldest record not seen yet, leased until release(); none if the lane is empty. Records of a dead or closed producer are still
  // delivered.
  std::optional<RecordView> try_peek() {
    const std::lock_guard lock(mutex_);
    if (closed_) throw LaneClosed("lane " + std::to_string(lane()) + " is closed");
    if (corrupt_) throw_corrupt();
    header_.consumer_thread.store(static_cast<uint32_t>(::gettid()), std::memory_order_relaxed);
    while (true) {
      if (read_ == tail_) tail_ = header_.tail.load(std::memory_order_acquire);  // pairs with P1: headers and payload up to here are whole
      if (read_ == tail_) return std::nullopt;
      const RecordHeader header = read_header();
      const std::byte* payload = at(read_) + kAlignment;
      read_ += kAlignment + aligned(header.payload_bytes);
      leases_.push_back({read_, false});
      const uint64_t lease = first_lease_ + leases_.size() - 1;
      if (header.kind == Kind::kPadding) {
        give_back(lease);
        continue;
      }
      if (header_.checksum && crc32c(payload, header.payload_bytes) != header.payload_crc32c) {
        ++counters_.checksum_errors;
        give_back(lease);
        throw ChecksumError("lane " + std::to_string(lane()) + ": record " + std::to_string(header.seq) + " (ticket " +
                            std::to_string(header.ticket) + ", " + std::to_string(header.payload_bytes) +
                            " bytes) does not match its checksum");
      }
      ++(header.kind == Kind::kMarker ? counters_.markers : counters_.records);
      counters_.bytes += header.payload_bytes;
      return RecordView{header, payload, lease};
    }
  }

  // Waits until there is something to peek at, or the producer closed the lane.
  bool wait_for_record(double timeout_s) {
    return ring_detail::wait(header_.tail, header_.consumer_waits, timeout_s, [this] {
      return header_.tail.load(std::memory_order_acquire) != read_ || header_.producer_closed.load(std::memory_order_acquire);
    });
  }

  // Ends a lease; false if it had ended before.
  bool release(uint64_t lease) {
    const std::lock_guard lock(mutex_);
    if (lease < first_lease_ || leases_[lease - first_lease_].released) return false;
    if (!closed_) give_back(lease);
    return true;
  }

  ProducerState producer_state() const {
    if (header_.producer_closed.load(std::memory_order_acquire)) return ProducerState::kClosed;
    const uint64_t tag = header_.producer_tag.load(std::memory_order_acquire);
    if (tag == 0) return ProducerState::kUnattached;
    return is_alive(tag) ? ProducerState::kAlive : ProducerState::kDead;
  }

  ConsumerCounters counters() const {
    const std::lock_guard lock(mutex_);
    return counters_;
  }
  uint64_t num_leased() const {
    const std::lock_guard lock(mutex_);
    return static_cast<uint64_t>(std::count_if(leases_.begin(), leases_.end(), [](const Lease& lease) { return !lease.released; }));
  }
  uint64_t used_bytes() const { return header_.tail.load(std::memory_order_acquire) - header_.head.load(std::memory_order_relaxed); }

  // Takes the name out of /dev/shm; both ends go on.
  void unlink() {
    if (unlinked_ || ::getpid() != owner_) return;
    unlinked_ = true;
    unlink_segment(name_, segment_->inode());
  }

  // The producer's next reserve raises LaneClosed. Views of leased records stay readable.
  void close() {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    if (::getpid() != owner_) return;
    unlink();
    header_.consumer_closed.store(1, std::memory_order_release);
    ring_detail::wake(header_.head);
  }

 private:
  struct Lease {
    uint64_t end;  // position behind the record
    bool released;
  };

  std::byte* at(uint64_t position) const { return segment_->data() + position % capacity_; }

  RecordHeader read_header() {
    RecordHeader header;
    std::memcpy(&header, at(read_), sizeof header);
    const bool sound = header.header_crc32c == crc32c(&header, offsetof(RecordHeader, header_crc32c)) &&
                       kAlignment + aligned(header.payload_bytes) <= std::min(tail_ - read_, capacity_ - read_ % capacity_) &&
                       header.lane == lane();
    if (sound && header.kind == Kind::kPadding) return header;
    const uint64_t expected = header.incarnation == incarnation_ ? next_seq_ : 0;
    if (!sound || header.incarnation < incarnation_ || header.seq != expected) {
      corrupt_ = true;
      ++counters_.checksum_errors;
      throw_corrupt();
    }
    incarnation_ = header.incarnation;
    next_seq_ = header.seq + 1;
    return header;
  }

  [[noreturn]] void throw_corrupt() const {
    throw LaneCorrupt("lane " + std::to_string(lane()) + ": the header at byte " + std::to_string(read_) +
                      " of the lane is damaged, so no record behind it can be found");
  }

  void give_back(uint64_t lease) {
    Lease& entry = leases_[lease - first_lease_];
    entry.released = true;
    if (poison_) poison_payload(lease);
    const uint64_t before = head_;
    while (!leases_.empty() && leases_.front().released) {
      head_ = leases_.front().end;
      leases_.pop_front();
      ++first_lease_;
    }
    if (head_ == before) return;
    header_.head.store(
        head_,
        std::memory_order_seq_cst);  // P2 (release): all reads of the records before the head; P3: the head before the look at the sleeper
    if (header_.producer_waits.load(std::memory_order_seq_cst)) ring_detail::wake(header_.head);  // P3
  }

  void poison_payload(uint64_t lease) {
    const uint64_t start = lease == first_lease_ ? head_ : leases_[lease - first_lease_ - 1].end;
    const uint64_t stop = leases_[lease - first_lease_].end;
    std::memset(at(start) + kAlignment, 0xDD, stop - start - kAlignment);
  }

  std::string name_;
  std::shared_ptr<Segment> segment_;
  LaneHeader& header_;
  pid_t owner_;
  uint64_t capacity_;
  bool poison_, closed_ = false, unlinked_ = false, corrupt_ = false;
  mutable std::mutex mutex_;
  uint64_t read_ = 0, head_ = 0, tail_ = 0;  // read position, start of the oldest lease, last seen of the producer's
  uint32_t incarnation_ = 0;
  uint64_t next_seq_ = 0;
  std::deque<Lease> leases_;
  uint64_t first_lease_ = 0;  // number of leases_.front()
  ConsumerCounters counters_;
};

}  // namespace areal_hpc
