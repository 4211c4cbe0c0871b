// What lies in the shared memory of a lane, and the errors that its two ends raise.
//
//   offset 0      LaneHeader, one page
//   offset 4096   data: `capacity_bytes` bytes of records, used as a circle
//
// A record is a 64-byte RecordHeader and its payload, padded to a multiple of 64 bytes. It never wraps: where it does not fit before the
// end of the data, a padding record fills the rest. Positions (head, tail) count bytes since the lane was made, so `position %
// capacity_bytes` is the offset and `tail - head` the bytes in use; at a terabyte a second they overflow after half a year.

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace areal_hpc {

inline constexpr uint64_t kMagic = 0x474e495248504152u;  // "RAPHRING"
inline constexpr uint32_t kLayoutVersion = 2;            // raise with any change below
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kAlignment = 64;
inline constexpr uint64_t kMaxInFlight = 440;  // tickets that one lane can name as in flight; more are only counted

static_assert(std::endian::native == std::endian::little, "a futex waits on the low half of a position");
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

enum class Kind : uint16_t { kData = 1, kMarker = 2, kPadding = 3 };

struct RecordHeader {
  uint32_t payload_bytes = 0;  // padding: bytes behind this header
  uint32_t payload_crc32c = 0;
  Kind kind = Kind::kData;
  uint16_t lane = 0;
  uint32_t incarnation = 0;  // which producer of this lane wrote it: 1, 2, ...
  uint64_t seq = 0;          // 0, 1, ... over the data and marker records of one incarnation
  int64_t ticket = 0;        // marker: its id
  int32_t version_min = 0, version_max = 0;
  uint32_t num_tokens = 0, num_samples = 0;
  double commit_time_s = 0.0;  // CLOCK_MONOTONIC
  uint32_t reserved = 0;
  uint32_t header_crc32c = 0;  // of the 60 bytes before: a length that can be trusted is what finds the next record
};
static_assert(sizeof(RecordHeader) == kAlignment);

// Atomics are grouped by who writes them, one group per cache line. Who writes an atomic alone may read it relaxed.
struct LaneHeader {
  // Identity, the same in every layout version. Written by the consumer before it release-stores `magic` [P0: acquire load in open_lane].
  std::atomic<uint64_t> magic;
  uint32_t layout_version;
  uint32_t lane;
  uint64_t consumer_tag;   // process_tag() of the consumer
  uint64_t pid_namespace;  // in which the pids below mean something
  uint64_t job_id;
  uint64_t restart_id;
  uint64_t capacity_bytes;
  uint64_t checksum;  // 1: payloads are checksummed; headers always are

  alignas(kAlignment) std::atomic<uint64_t> tail;  // end of the last committed record; written by the producer
  alignas(kAlignment) std::atomic<uint64_t> head;  // start of the oldest record not given back; written by the consumer

  // Set while that side sleeps on the other's position, so that an awake peer saves the other the system call.
  alignas(kAlignment) std::atomic<uint32_t> consumer_waits;
  alignas(kAlignment) std::atomic<uint32_t> producer_waits;

  // Written by the producer; statistics are relaxed, they order nothing.
  alignas(kAlignment) std::atomic<uint64_t> producer_tag;  // 0: nobody attached yet
  std::atomic<uint32_t> incarnation;
  std::atomic<uint32_t> producer_closed;
  std::atomic<uint64_t> heartbeat_ns;
  std::atomic<uint64_t> full_waits, full_wait_ns, high_water_bytes;
  std::atomic<uint64_t> full_since_ns;  // 0: there was room at the last look; part of full_wait_ns only once there is room again

  // Written by the consumer.
  alignas(kAlignment) std::atomic<uint32_t> consumer_closed;

  // Tickets begun and neither committed nor cancelled, each plus one (0: free), written by the producer: what its death costs.
  alignas(kAlignment) std::atomic<uint64_t> num_untracked;  // in flight beyond the slots below
  std::atomic<uint64_t> settling_tail;  // not 0 in a commit that ends a ticket: once `tail` is here, settling_ticket is in flight no more
  std::atomic<int64_t> settling_ticket;
  std::array<std::atomic<int64_t>, kMaxInFlight> in_flight;
};
static_assert(sizeof(LaneHeader) <= kPageBytes);

constexpr uint64_t aligned(uint64_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Errors; bindings.cpp gives each a Python class of the same name.
struct RingError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct LaneClosed : RingError {  // the other side closed the lane, or died
  using RingError::RingError;
};
struct LaneBusy : RingError {  // this end of the lane belongs to somebody
  using RingError::RingError;
};
struct LaneMismatch : RingError {  // segment of another job, attempt, layout version or PID namespace
  using RingError::RingError;
};
struct ChecksumError : RingError {  // the record was damaged; it is counted and skipped
  using RingError::RingError;
};
struct LaneCorrupt : ChecksumError {  // a header was damaged: nothing behind it can be found, the lane has ended
  using ChecksumError::ChecksumError;
};
struct RecordTooLarge : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace areal_hpc
