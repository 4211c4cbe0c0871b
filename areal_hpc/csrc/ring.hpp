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
// Labels P0 (layout.hpp) to P4 name the two sides of each pair of memory orders; P3, sleep and wake, must order a store before a later load
// of another location, which takes a fence on both sides. tests/cpp/mutate.py weakens each of them in turn: every one is needed.

#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "crc32c.hpp"
#include "layout.hpp"
#include "memory.hpp"

namespace areal_hpc {

// Test builds change these to sleep at once, and to sleep through a lost wake-up long enough to be noticed.
#ifndef AREAL_HPC_SPIN_NS
#define AREAL_HPC_SPIN_NS 50'000
#endif
#ifndef AREAL_HPC_FUTEX_CAP_NS
#define AREAL_HPC_FUTEX_CAP_NS 50'000'000
#endif
inline constexpr uint64_t kSpin_ns = AREAL_HPC_SPIN_NS;
inline constexpr uint64_t kFutexCap_ns =
    AREAL_HPC_FUTEX_CAP_NS;  // bounds the harm of a peer that died between its store and its wake-up call
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

// After a new position was stored: wakes the other side if it sleeps on it.
inline void wake_if_waiting(std::atomic<uint64_t>& position, const std::atomic<uint32_t>& sleeper) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // P3: ... or this sees its announcement
  if (sleeper.load(std::memory_order_relaxed)) wake(position);
}

// Waits for `ready()`, which reads `position`: 50 us spinning, then asleep. False: not within `timeout_s`.
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
    sleeper.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // P3: announced, then looked once more: either this sees the peer's store ...
    const uint64_t seen = position.load(std::memory_order_relaxed);
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

// Threads of this process that consume: a blocking reserve there may wait for room that only that thread can make, in this lane or round a
// circle of lanes.
class ConsumingThreads {
 public:
  static const void* self() {
    static thread_local char marker;
    return &marker;
  }
  void set(const void* consumer, const void* thread) {
    const std::lock_guard lock(mutex_);
    threads_[consumer] = thread;
  }
  void erase(const void* consumer) {
    const std::lock_guard lock(mutex_);
    threads_.erase(consumer);
  }
  bool contains(const void* thread) const {
    const std::lock_guard lock(mutex_);
    return std::any_of(threads_.begin(), threads_.end(), [&](const auto& entry) { return entry.second == thread; });
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void*, const void*> threads_;
};
inline ConsumingThreads consuming_threads;

// Seconds that the producer found the lane full, the wait under way included.
inline double full_wait_s(const LaneHeader& header) {
  const uint64_t since = header.full_since_ns.load(std::memory_order_relaxed), now = monotonic_ns();
  const uint64_t under_way = since != 0 && now > since ? now - since : 0;
  return static_cast<double>(header.full_wait_ns.load(std::memory_order_relaxed) + under_way) * 1e-9;
}

}  // namespace ring_detail

// The ticket whose record a dead producer had published, and which it had no time to take off its list; -1: none.
inline int64_t settled_ticket(const LaneHeader& header) {
  const uint64_t settling_tail = header.settling_tail.load(std::memory_order_relaxed);
  const bool settled = settling_tail != 0 && settling_tail == header.tail.load(std::memory_order_relaxed);
  return settled ? header.settling_ticket.load(std::memory_order_relaxed) : -1;
}

struct RecordFields {
  int64_t ticket = 0;
  int32_t version_min = 0, version_max = 0;
  uint32_t num_tokens = 0, num_samples = 0;
};

// The writing end. One thread at a time.
class Producer {
 public:
  // Attaches to the lane; LaneBusy if a living producer has it. The next producer after a dead one goes on behind its last committed
  // record, and inherits its tickets in flight: to cancel, or to finish.
  explicit Producer(std::shared_ptr<Segment> segment)
      : segment_(std::move(segment)), header_(segment_->header()), owner_(::getpid()), capacity_(header_.capacity_bytes) {
    uint64_t holder = header_.producer_tag.load(std::memory_order_relaxed);
    if (header_.producer_closed.load(std::memory_order_relaxed)) throw LaneClosed(name() + ": its producer has closed it");
    if (is_alive(holder) || !header_.producer_tag.compare_exchange_strong(holder, process_tag(owner_), std::memory_order_relaxed)) {
      throw LaneBusy(name() + " already has a producer: process " + std::to_string(holder >> 32));
    }
    incarnation_ = header_.incarnation.load(std::memory_order_relaxed) + 1;
    header_.incarnation.store(incarnation_, std::memory_order_relaxed);
    tail_ = header_.tail.load(std::memory_order_relaxed);  // a dead predecessor's last commit: what the dead have written is visible to all
    for (uint32_t slot = 0; slot < kMaxInFlight; ++slot) {
      if (const int64_t entry = header_.in_flight[slot].load(std::memory_order_relaxed); entry != 0) in_flight_[entry - 1] = slot;
    }
    forget(settled_ticket(header_));
    for (const auto& [ticket, slot] : in_flight_) inherited_.insert(ticket);
    header_.full_since_ns.store(0, std::memory_order_relaxed);
    header_.settling_tail.store(0, std::memory_order_relaxed);
    beat();
  }
  ~Producer() { close(); }
  Producer(const Producer&) = delete;
  Producer& operator=(const Producer&) = delete;

  const std::shared_ptr<Segment>& segment() const { return segment_; }
  uint64_t max_record_bytes() const { return std::min<uint64_t>(capacity_ / 4, std::numeric_limits<uint32_t>::max()); }
  uint64_t capacity_bytes() const { return capacity_; }
  std::string name() const { return "lane " + std::to_string(header_.lane); }
  uint32_t lane() const { return header_.lane; }
  bool checksum() const { return header_.checksum != 0; }
  uint32_t incarnation() const { return incarnation_; }
  uint64_t num_committed() const { return seq_; }
  uint64_t used_bytes() const { return tail_ - header_.head.load(std::memory_order_relaxed); }
  uint64_t full_waits() const { return header_.full_waits.load(std::memory_order_relaxed); }
  double full_wait_s() const { return ring_detail::full_wait_s(header_); }

  // Where to write `num_bytes`, or null while the lane is full.
  std::byte* try_reserve(uint64_t num_bytes) {
    check_owner();
    if (closed_) throw LaneClosed(name() + " is closed");
    if (reserved_) throw std::invalid_argument(name() + ": the slot reserved before is neither committed nor aborted");
    if (num_bytes > max_record_bytes()) {
      throw RecordTooLarge(name() + ": a record of " + std::to_string(num_bytes) + " bytes is larger than a quarter of its capacity of " +
                           std::to_string(capacity_) + " bytes");
    }
    const uint64_t total = kAlignment + aligned(num_bytes), offset = tail_ % capacity_;
    padding_ = offset + total > capacity_ ? capacity_ - offset : 0;
    needed_ = padding_ + total;
    if (!fits()) {
      note_full();
      return nullptr;
    }
    if (header_.consumer_closed.load(std::memory_order_relaxed)) throw LaneClosed(name() + ": its consumer has closed it");
    note_room();
    reserved_ = true;
    is_frame_ = false;
    payload_bytes_ = num_bytes;
    return at(tail_ + padding_) + kAlignment;
  }

  // Waits until the record refused last fits (or the consumer closes the lane, which the next try_reserve reports).
  bool wait_for_room(double timeout_s) {
    const bool room = ring_detail::wait(header_.head, header_.producer_waits, timeout_s,
                                        [this] { return fits() || header_.consumer_closed.load(std::memory_order_relaxed); });
    beat();
    return room;
  }

  // The same for a whole record, header included, as the consumer of another lane of this number read it; to be published by
  // commit_frame().
  std::byte* try_reserve_frame(uint64_t num_bytes) {
    if (num_bytes < kAlignment)
      throw std::invalid_argument("a frame is a header of 64 bytes and a payload, not " + std::to_string(num_bytes) + " bytes");
    std::byte* payload = try_reserve(num_bytes - kAlignment);
    if (payload == nullptr) return nullptr;
    is_frame_ = true;
    return payload - kAlignment;
  }

  // Publishes the reserved slot; returns its sequence number. `payload_crc32c`: of the payload, where the caller has summed it already.
  uint64_t commit(const RecordFields& fields, Kind kind = Kind::kData, std::optional<uint32_t> payload_crc32c = std::nullopt) {
    if (!reserved_) throw std::invalid_argument(name() + ": nothing is reserved");
    if (is_frame_) throw std::invalid_argument(name() + ": a slot of try_reserve_frame takes commit_frame");
    const uint64_t now = monotonic_ns();
    RecordHeader header{.payload_bytes = static_cast<uint32_t>(payload_bytes_),
                        .kind = kind,
                        .seq = seq_,
                        .ticket = fields.ticket,
                        .version_min = fields.version_min,
                        .version_max = fields.version_max,
                        .num_tokens = fields.num_tokens,
                        .num_samples = fields.num_samples,
                        .commit_time_s = static_cast<double>(now) * 1e-9};
    if (header_.checksum)
      header.payload_crc32c = payload_crc32c ? *payload_crc32c : crc32c(at(tail_ + padding_) + kAlignment, payload_bytes_);
    AREAL_HPC_FAULT_POINT("payload summed");
    write_header(tail_ + padding_, header);
    const bool settles = kind == Kind::kData && !in_flight_.empty() && in_flight_.contains(fields.ticket);
    if (settles) {
      header_.settling_ticket.store(fields.ticket, std::memory_order_relaxed);
      header_.settling_tail.store(tail_ + needed_, std::memory_order_relaxed);
    }
    publish(now);
    if (settles) {
      forget(fields.ticket);
      AREAL_HPC_FAULT_POINT("ticket forgotten");
      header_.settling_tail.store(0, std::memory_order_relaxed);
    }
    return seq_++;
  }

  // Publishes the slot of try_reserve_frame(): header, sequence number, writer and checksums stay those of the lane it came from.
  void commit_frame() {
    if (!reserved_) throw std::invalid_argument(name() + ": nothing is reserved");
    if (!is_frame_) throw std::invalid_argument(name() + ": commit_frame takes a slot of try_reserve_frame");
    RecordHeader header;
    std::memcpy(&header, at(tail_ + padding_), sizeof header);
    if (header.header_crc32c != crc32c(&header, offsetof(RecordHeader, header_crc32c)) || header.payload_bytes != payload_bytes_ ||
        header.lane != lane() || header.kind == Kind::kPadding) {
      throw LaneCorrupt(name() + ": a frame of " + std::to_string(kAlignment + payload_bytes_) +
                        " bytes came damaged: its header is not that of such a record");
    }
    publish(monotonic_ns());
  }

  // The ticket is in flight here until it is committed or cancelled; if this process dies, the consumer learns of it.
  void begin(int64_t ticket) {
    if (ticket < 0) throw std::invalid_argument("a ticket is 0, 1, 2, ..., not " + std::to_string(ticket));
    check_owner();
    if (inherited_.erase(ticket) != 0) return;  // of a predecessor that died: begun again here
    if (in_flight_.contains(ticket)) throw std::invalid_argument(name() + ": ticket " + std::to_string(ticket) + " is in flight already");
    uint32_t slot = 0;
    while (slot < kMaxInFlight && header_.in_flight[slot].load(std::memory_order_relaxed) != 0) ++slot;
    in_flight_[ticket] = slot;
    if (slot < kMaxInFlight)
      header_.in_flight[slot].store(ticket + 1, std::memory_order_relaxed);
    else
      header_.num_untracked.fetch_add(1, std::memory_order_relaxed);
  }
  void cancel(int64_t ticket) {
    if (!forget(ticket)) throw std::invalid_argument(name() + ": ticket " + std::to_string(ticket) + " is not in flight");
  }
  std::vector<int64_t> in_flight() const {
    std::vector<int64_t> tickets;
    for (const auto& [ticket, slot] : in_flight_) tickets.push_back(ticket);
    std::sort(tickets.begin(), tickets.end());
    return tickets;
  }

  void abort() { reserved_ = false; }

  // Throws LaneClosed if the consumer has closed the lane or died: for a producer that has nothing to write for long.
  void check_consumer() {
    if (header_.consumer_closed.load(std::memory_order_relaxed)) throw LaneClosed(name() + ": its consumer has closed it");
    if (!is_alive(header_.consumer_tag))
      throw LaneClosed(name() + ": its consumer, process " + std::to_string(header_.consumer_tag >> 32) + ", is dead");
  }

  // Says "I am here" to whoever waits for this lane; reserve and commit do it too.
  void beat() { header_.heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed); }

  // No record follows. A forked child that inherits this handle must not say so.
  void close() {
    if (closed_) return;
    closed_ = true;
    if (::getpid() != owner_) return;
    header_.producer_closed.store(1, std::memory_order_release);  // P4: after the last tail
    ring_detail::wake(header_.tail);
  }

 private:
  std::byte* at(uint64_t position) const { return segment_->data() + position % capacity_; }

  void check_owner() const {
    if (fork_depth_ != fork_depth().load(std::memory_order_relaxed))
      throw LaneBusy(name() + ": this producer belongs to process " + std::to_string(owner_) + ", of which this one was forked");
  }

  bool fits() {
    if (tail_ + needed_ - head_ <= capacity_) return true;
    head_ = header_.head.load(std::memory_order_acquire);  // pairs with P2: the consumer has read what is overwritten now
    return tail_ + needed_ - head_ <= capacity_;
  }

  // The record is written: pads in front of it where it did not fit, and lets the consumer see both.
  void publish(uint64_t now) {
    AREAL_HPC_FAULT_POINT("record written");
    if (padding_ > 0)
      write_header(tail_, RecordHeader{.payload_bytes = static_cast<uint32_t>(padding_ - kAlignment), .kind = Kind::kPadding});
    AREAL_HPC_FAULT_POINT("padding written");
    tail_ += needed_;
    reserved_ = false;
    header_.heartbeat_ns.store(now, std::memory_order_relaxed);
    if (tail_ - head_ > header_.high_water_bytes.load(std::memory_order_relaxed)) note_high_water();
    header_.tail.store(tail_, std::memory_order_release);  // P1: payload and headers before the tail
    AREAL_HPC_FAULT_POINT("tail published");
    ring_detail::wake_if_waiting(header_.tail, header_.consumer_waits);
    AREAL_HPC_FAULT_POINT("consumer woken");
  }

  bool forget(int64_t ticket) {
    const auto entry = in_flight_.find(ticket);
    if (entry == in_flight_.end()) return false;
    if (entry->second < kMaxInFlight)
      header_.in_flight[entry->second].store(0, std::memory_order_relaxed);
    else
      header_.num_untracked.fetch_sub(1, std::memory_order_relaxed);
    in_flight_.erase(entry);
    inherited_.erase(ticket);
    return true;
  }

  void write_header(uint64_t position, RecordHeader header) {
    header.lane = static_cast<uint16_t>(header_.lane);
    header.incarnation = incarnation_;
    header.header_crc32c = crc32c(&header, offsetof(RecordHeader, header_crc32c));
    std::memcpy(at(position), &header, sizeof header);
  }

  void note_full() {
    const uint64_t now = monotonic_ns();
    header_.heartbeat_ns.store(now, std::memory_order_relaxed);
    if (full_since_ns_ == 0) {
      full_since_ns_ = now;
      header_.full_since_ns.store(now, std::memory_order_relaxed);
      header_.full_waits.fetch_add(1, std::memory_order_relaxed);
    }
    if (header_.consumer_closed.load(std::memory_order_relaxed)) throw LaneClosed(name() + ": its consumer has closed it");
    if (now < next_liveness_check_ns_) return;
    next_liveness_check_ns_ = now + kLivenessPeriod_ns;
    if (!is_alive(header_.consumer_tag))
      throw LaneClosed(name() + ": its consumer, process " + std::to_string(header_.consumer_tag >> 32) + ", is dead");
  }

  void note_room() {
    if (full_since_ns_ == 0) return;
    header_.full_wait_ns.fetch_add(monotonic_ns() - full_since_ns_, std::memory_order_relaxed);
    full_since_ns_ = 0;
    header_.full_since_ns.store(0, std::memory_order_relaxed);
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
  uint64_t tail_ = 0, head_ = 0;  // ours; last seen of the consumer's (never ahead of it)
  uint64_t seq_ = 0;
  uint64_t padding_ = 0, needed_ = 0, payload_bytes_ = 0;  // of the reservation
  uint64_t full_since_ns_ = 0, next_liveness_check_ns_ = 0;
  bool reserved_ = false, is_frame_ = false, closed_ = false;
  std::unordered_map<int64_t, uint32_t> in_flight_;  // ticket -> slot in the header; kMaxInFlight: counted only
  std::unordered_set<int64_t> inherited_;            // of them: from a predecessor that died, not begun again
  uint32_t fork_depth_ = fork_depth().load(std::memory_order_relaxed);
};

struct RecordView {
  RecordHeader header;
  const std::byte* payload;
  uint64_t lease;
  uint64_t end;  // position behind the record
};

struct ConsumerCounters {
  uint64_t records = 0, bytes = 0, markers = 0, checksum_errors = 0;  // delivered, or found damaged
  uint64_t empty_waits = 0, empty_wait_ns = 0;                        // waits for a record
};

struct DeadProducer {
  uint64_t tag = 0;  // process_tag()
  uint32_t incarnation = 0;
  std::vector<int64_t> tickets;  // begun, and neither delivered nor cancelled
  uint64_t num_untracked = 0;    // more of them, unnamed
};

enum class ProducerState { kUnattached, kAlive, kDead, kClosed };

// The reading end. A mutex that nobody contends in normal use lets a record be released wherever it is dropped.
class Consumer {
 public:
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
    if (fork_depth_ != fork_depth().load(std::memory_order_relaxed))
      throw LaneBusy("lane " + std::to_string(lane()) + ": this consumer belongs to process " + std::to_string(owner_) +
                     ", of which this one was forked");
    if (closed_) throw LaneClosed("lane " + std::to_string(lane()) + " is closed");
    if (corrupt_) throw_corrupt();
    if (thread_ != ring_detail::ConsumingThreads::self()) {
      thread_ = ring_detail::ConsumingThreads::self();
      ring_detail::consuming_threads.set(this, thread_);
    }
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
      if (header.kind == Kind::kMarker) {
        ++counters_.markers;
      } else {
        ++counters_.records;
      }
      counters_.bytes += header.payload_bytes;
      return RecordView{header, payload, lease, read_};
    }
  }

  // Bytes that try_peek() may have to look at: what is committed and not seen yet, as of the last look.
  uint64_t num_unseen_bytes() const { return header_.tail.load(std::memory_order_relaxed) - read_; }

  // Waits until there is something to peek at, or the producer closed the lane.
  bool wait_for_record(double timeout_s) {
    const uint64_t start = monotonic_ns();
    const bool found = ring_detail::wait(header_.tail, header_.consumer_waits, timeout_s,
                                         [this] { return header_.tail.load(std::memory_order_relaxed) != read_ || closed_by_producer(); });
    const std::lock_guard lock(mutex_);
    ++counters_.empty_waits;
    counters_.empty_wait_ns += monotonic_ns() - start;
    return found;
  }

  // The producer, if it died and everything it committed has been seen. Looks at the process at most every 100 ms unless `now`.
  std::optional<DeadProducer> dead_producer(bool now = false) {
    const std::lock_guard lock(mutex_);
    if (!now) {
      const uint64_t time = monotonic_ns();
      if (time < next_liveness_check_ns_) return std::nullopt;
      next_liveness_check_ns_ = time + kLivenessPeriod_ns;
    }
    const uint64_t tag = header_.producer_tag.load(std::memory_order_relaxed);
    // Who closes the lane with tickets in flight has given them up without a word: an exception ended it, say.
    const bool gave_up = closed_by_producer();
    if (tag == 0 || (!gave_up && is_alive(tag))) return std::nullopt;
    // Its stores are all visible now. Another one may have attached meanwhile.
    if (header_.tail.load(std::memory_order_relaxed) != read_ || header_.producer_tag.load(std::memory_order_relaxed) != tag)
      return std::nullopt;
    next_liveness_check_ns_ = 0;  // the next call answers the same
    DeadProducer dead{tag, header_.incarnation.load(std::memory_order_relaxed), {}, header_.num_untracked.load(std::memory_order_relaxed)};
    const int64_t settled = settled_ticket(header_);
    for (const auto& slot : header_.in_flight) {
      const int64_t entry = slot.load(std::memory_order_relaxed);
      if (entry != 0 && entry - 1 != settled) dead.tickets.push_back(entry - 1);
    }
    if (gave_up && dead.tickets.empty() && dead.num_untracked == 0) return std::nullopt;
    std::sort(dead.tickets.begin(), dead.tickets.end());
    return dead;
  }

  // Ends a lease; false if it had ended before.
  bool release(uint64_t lease) {
    const std::lock_guard lock(mutex_);
    if (lease < first_lease_ || leases_[lease - first_lease_].released) return false;
    if (!closed_) give_back(lease);
    return true;
  }

  ProducerState producer_state() const {
    if (closed_by_producer()) return ProducerState::kClosed;
    const uint64_t tag = header_.producer_tag.load(std::memory_order_relaxed);
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
  uint64_t head_position() const { return header_.head.load(std::memory_order_relaxed); }
  uint64_t tail_position() const { return header_.tail.load(std::memory_order_relaxed); }
  uint64_t used_bytes() const { return tail_position() - head_position(); }

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
    ring_detail::consuming_threads.erase(this);
    if (::getpid() != owner_) return;
    unlink();
    header_.consumer_closed.store(1, std::memory_order_relaxed);
    ring_detail::wake(header_.head);
  }

 private:
  struct Lease {
    uint64_t end;  // position behind the record
    bool released;
  };

  std::byte* at(uint64_t position) const { return segment_->data() + position % capacity_; }

  // Then nothing follows the tail that is read next.
  bool closed_by_producer() const { return header_.producer_closed.load(std::memory_order_acquire); }  // pairs with P4

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
    header_.head.store(head_, std::memory_order_release);  // P2: all reads of the records before the head
    AREAL_HPC_FAULT_POINT("head published");
    ring_detail::wake_if_waiting(header_.head, header_.producer_waits);
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
  const void* thread_ = nullptr;  // that peeked last
  uint32_t fork_depth_ = fork_depth().load(std::memory_order_relaxed);
  uint64_t next_liveness_check_ns_ = 0;
};

}  // namespace areal_hpc
