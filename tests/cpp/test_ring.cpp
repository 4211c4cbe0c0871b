// Tests of the ring in C++: functional, fuzz with two threads and closed-form sums, and producers, forwarders and consumers killed at every
// store. Built plain and with sanitizers (option AREAL_HPC_SANITIZE); tests/cpp/test_sanitizers.py does that.
// Usage: test_ring [number of fuzz records] [seed]

#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <string_view>

namespace {

// The process dies, as by kill -9, when it passes the fault point of this name for the n-th time.
const char* g_die_at = nullptr;
int g_die_after = 0;

void fault_point(const char* name) {
  if (g_die_at != nullptr && std::string_view(name) == g_die_at && --g_die_after == 0) ::raise(SIGKILL);
}

}  // namespace

#define AREAL_HPC_FAULT_POINT(name) fault_point(name)
#include <array>
#include <random>
#include <thread>

#include "ring.hpp"

namespace areal_hpc {
namespace {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

template <class Error, class Action>
void check_throws(Action action) {
  bool thrown = false;
  try {
    action();
  } catch (const Error&) {
    thrown = true;
  }
  CHECK(thrown);
}

std::string unique_name(const char* what) { return std::string("cpp-") + what + "-" + std::to_string(::getpid()); }

std::shared_ptr<Segment> make_segment(const char* what, uint64_t capacity_bytes, LaneOptions options = {}) {
  auto segment = create_lane(unique_name(what), capacity_bytes, options);
  unlink_segment(unique_name(what), segment->inode());
  return segment;
}

// Byte i of record k: recognisable as torn, shifted or stale.
uint8_t pattern(uint64_t k, uint64_t i) { return static_cast<uint8_t>((k * 0x9e3779b97f4a7c15u + i * 131) >> 7); }

void write_pattern(std::byte* slot, uint64_t k, uint64_t num_bytes) {
  for (uint64_t i = 0; i < num_bytes; ++i) slot[i] = static_cast<std::byte>(pattern(k, i));
}

bool matches_pattern(const RecordView& record) {
  const uint64_t k = static_cast<uint64_t>(record.header.ticket);
  for (uint64_t i = 0; i < record.header.payload_bytes; ++i) {
    if (record.payload[i] != static_cast<std::byte>(pattern(k, i))) return false;
  }
  return true;
}

bool push(Producer& producer, int64_t k, uint64_t num_bytes) {
  std::byte* slot = producer.try_reserve(num_bytes);
  if (slot == nullptr) return false;
  write_pattern(slot, static_cast<uint64_t>(k), num_bytes);
  producer.commit(
      {.ticket = k, .version_min = static_cast<int32_t>(k), .version_max = static_cast<int32_t>(k + 1), .num_tokens = 5, .num_samples = 2});
  return true;
}

// Bit by bit from the definition in RFC 3720, sharing nothing with crc32c.hpp.
uint32_t crc32c_by_definition(const uint8_t* data, size_t num_bytes) {
  uint32_t crc = 0xffffffff;
  for (size_t i = 0; i < num_bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78 : 0);
  }
  return ~crc;
}

void test_crc32c() {
  CHECK(crc32c("123456789", 9) == 0xe3069283);
  std::array<uint8_t, 32> bytes{};
  CHECK(crc32c(bytes.data(), 32) == 0x8a9136aa);  // RFC 3720 B.4: 32 bytes of zeroes, of ones, ascending
  bytes.fill(0xff);
  CHECK(crc32c(bytes.data(), 32) == 0x62a8ab43);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  CHECK(crc32c(bytes.data(), 32) == 0x46dd794e);
  std::mt19937_64 random(1);
  std::vector<uint8_t> buffer(40'000);
  for (auto& byte : buffer) byte = static_cast<uint8_t>(random());
  for (const size_t num_bytes : {0, 1, 7, 8, 63, 255, 767, 768, 769, 1'000, 12'287, 12'288, 12'295, 13'056, 39'000}) {
    const uint8_t* start = buffer.data() + random() % 16;
    const uint32_t expected = crc32c_by_definition(start, num_bytes);
    CHECK(crc32c(start, num_bytes) == expected);
    CHECK(~crc_detail::update_table(~0u, start, num_bytes) == expected);
    const size_t cut = num_bytes == 0 ? 0 : random() % num_bytes;
    CHECK(crc32c(start + cut, num_bytes - cut, crc32c(start, cut)) == expected);
  }
}

void test_wrap_and_order() {
  auto segment = make_segment("wrap", 4096);
  Consumer consumer("wrap", segment, true);
  Producer producer(segment);
  CHECK(producer.max_record_bytes() == 1024);
  for (int64_t k = 0; k < 1000; ++k) {  // every size, so every padding
    const uint64_t size = static_cast<uint64_t>(k * 37 % 1025);
    CHECK(push(producer, k, size));
    const auto record = consumer.try_peek();
    CHECK(record && record->header.ticket == k && record->header.seq == static_cast<uint64_t>(k) && record->header.payload_bytes == size);
    CHECK(record->header.version_min == k && record->header.version_max == k + 1 && record->header.num_tokens == 5 &&
          record->header.num_samples == 2);
    CHECK(reinterpret_cast<uintptr_t>(record->payload) % kAlignment == 0 && matches_pattern(*record));
    CHECK(consumer.release(record->lease) && !consumer.release(record->lease));
    CHECK(consumer.used_bytes() == 0 && !consumer.try_peek());
  }
}

void test_out_of_order_release() {
  auto segment = make_segment("leases", 4096);
  Consumer consumer("leases", segment, true);
  Producer producer(segment);
  std::array<std::optional<RecordView>, 4> records;
  for (int64_t k = 0; k < 4; ++k) CHECK(push(producer, k, 960));
  CHECK(!push(producer, 4, 0));
  for (auto& record : records) record = consumer.try_peek();
  CHECK(consumer.num_leased() == 4);
  CHECK(consumer.release(records[2]->lease) && consumer.release(records[1]->lease));
  CHECK(records[1]->payload[5] == std::byte{0xDD});  // poisoned at once
  CHECK(consumer.used_bytes() == 4096 && !push(producer, 4, 0));
  CHECK(matches_pattern(*records[0]) && matches_pattern(*records[3]));
  CHECK(consumer.release(records[0]->lease) && consumer.used_bytes() == 1024);
  CHECK(push(producer, 4, 960) && matches_pattern(*records[3]));
  CHECK(consumer.try_peek()->header.ticket == 4);
}

void test_handles_and_ends() {
  const std::string name = unique_name("handles");
  auto consumer = std::make_unique<Consumer>(name, create_lane(name, 8192, {.lane = 7, .job_id = 11, .restart_id = 2}), false);
  check_throws<LaneBusy>([&] { create_lane(name, 8192, {}); });
  std::string reason;
  check_throws<LaneMismatch>([&] { open_lane(name, 12, 2, reason); });
  check_throws<LaneMismatch>([&] { open_lane(name, 11, 1, reason); });
  consumer->segment()->header().layout_version += 1;
  check_throws<LaneMismatch>([&] { open_lane(name, 11, 2, reason); });
  consumer->segment()->header().layout_version -= 1;
  CHECK(consumer->producer_state() == ProducerState::kUnattached);
  auto producer = std::make_unique<Producer>(open_lane(name, 11, 2, reason));
  check_throws<LaneBusy>([&] { Producer second(open_lane(name, 11, 2, reason)); });
  consumer->unlink();
  CHECK(open_lane(name, 11, 2, reason) == nullptr && reason == "no consumer has made it");
  check_throws<RecordTooLarge>([&] { producer->try_reserve(2049); });
  CHECK(producer->try_reserve(10) != nullptr);
  check_throws<std::logic_error>([&] { producer->try_reserve(10); });
  producer->abort();
  check_throws<std::logic_error>([&] { producer->commit({}); });
  CHECK(push(*producer, 1, 10) && consumer->producer_state() == ProducerState::kAlive);
  producer->close();
  CHECK(consumer->producer_state() == ProducerState::kClosed);
  check_throws<LaneClosed>([&] { producer->try_reserve(10); });
  CHECK(consumer->wait_for_record(60.0) && consumer->try_peek()->header.ticket == 1);
  CHECK(consumer->wait_for_record(60.0) && !consumer->try_peek());  // closed and drained: no wait
  check_throws<LaneClosed>([&] { Producer late(consumer->segment()); });

  auto segment = make_segment("closed", 4096);
  Consumer other("closed", segment, false);
  Producer blocked(segment);
  other.close();
  check_throws<LaneClosed>([&] { blocked.try_reserve(10); });
  check_throws<LaneClosed>([&] { other.try_peek(); });
}

void test_bit_flips() {
  auto segment = make_segment("flips", 4096);
  Consumer consumer("flips", segment, false);
  Producer producer(segment);
  for (int64_t k = 0; k < 3; ++k) CHECK(push(producer, k, 100));
  segment->data()[(64 + 128) + 64 + 99] ^= std::byte{1};  // last payload byte of record 1
  CHECK(consumer.try_peek()->header.ticket == 0);
  check_throws<ChecksumError>([&] { consumer.try_peek(); });
  CHECK(consumer.try_peek()->header.ticket == 2 && consumer.counters().checksum_errors == 1 && consumer.counters().records == 2);
  for (uint64_t bit = 0; bit < 8 * sizeof(RecordHeader); ++bit) {  // any bit of a header ends the lane
    auto damaged = make_segment("header", 4096);
    Consumer reader("header", damaged, false);
    Producer writer(damaged);
    CHECK(push(writer, 0, 100));
    damaged->data()[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    check_throws<LaneCorrupt>([&] { reader.try_peek(); });
    check_throws<LaneCorrupt>([&] { reader.try_peek(); });
    CHECK(reader.counters().checksum_errors == 1 && reader.counters().records == 0);
  }
}

// A writer, with `forwarded` a thread that carries frames to a second lane, and a reader that releases out of order, at random paces; sums
// against their closed forms, tickets begun, cancelled and committed against the list.
void test_fuzz(uint64_t num_records, uint64_t seed, uint64_t capacity_bytes, bool slow_consumer, bool forwarded) {
  auto segment = make_segment("fuzz", capacity_bytes), source_segment = forwarded ? make_segment("fuzz-source", capacity_bytes) : segment;
  Consumer consumer("fuzz", segment, false);
  Producer producer(source_segment);
  const auto size_of = [&](uint64_t k) { return k % (producer.max_record_bytes() + 1); };
  std::thread writer([&] {
    std::mt19937_64 random(seed);
    uint64_t num_cancelled = 0;
    for (uint64_t k = 0; k < num_records; ++k) {
      if (k % 2 == 0) producer.begin(static_cast<int64_t>(k));
      while (k % 16 == 0 && num_cancelled < k) {
        producer.begin(static_cast<int64_t>(num_records + num_cancelled));
        if (num_cancelled >= 5) producer.cancel(static_cast<int64_t>(num_records + num_cancelled - 5));
        ++num_cancelled;
      }
      while (!push(producer, static_cast<int64_t>(k), size_of(k))) producer.wait_for_room(1.0);
      if (random() % 8 == 0 && producer.try_reserve(random() % 64) != nullptr) producer.abort();
      if (!slow_consumer && random() % 64 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));  // the consumer falls asleep
    }
    CHECK(producer.in_flight().size() == std::min<uint64_t>(num_cancelled, 5));
    producer.close();
  });
  std::thread forwarder;
  if (forwarded) {
    forwarder = std::thread([&] {
      Consumer source("fuzz-source", source_segment, false);
      Producer target(segment);
      while (true) {
        const bool ended = source.producer_state() == ProducerState::kClosed;
        const auto record = source.try_peek();
        if (record) {
          const uint64_t num_bytes = kAlignment + record->header.payload_bytes;
          std::byte* frame;
          while ((frame = target.try_reserve_frame(num_bytes)) == nullptr) target.wait_for_room(1.0);
          std::memcpy(frame, record->payload - kAlignment, num_bytes);
          target.commit_frame();
          CHECK(segment->header().tail.load(std::memory_order_relaxed) == record->end);
          source.release(record->lease);
        } else if (ended) {
          return;
        } else {
          source.wait_for_record(1.0);
        }
      }
    });
  }
  std::mt19937_64 random(seed + 1);
  std::vector<RecordView> leased;
  uint64_t sum_tickets = 0, num_delivered = 0;
  while (true) {
    const bool ended = consumer.producer_state() == ProducerState::kClosed;
    const auto record = consumer.try_peek();
    if (record) {
      CHECK(record->header.ticket == static_cast<int64_t>(num_delivered) && record->header.payload_bytes == size_of(num_delivered) &&
            matches_pattern(*record));
      ++num_delivered;
      sum_tickets += static_cast<uint64_t>(record->header.ticket);
      leased.push_back(*record);
    }
    if (slow_consumer && random() % 64 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));  // the producer falls asleep
    while (!leased.empty() && (!record || leased.size() > random() % 4)) {
      std::swap(leased[random() % leased.size()], leased.back());
      CHECK(matches_pattern(leased.back()) && consumer.release(leased.back().lease));
      leased.pop_back();
    }
    if (!record && ended) break;
    if (!record) consumer.wait_for_record(1.0);
  }
  writer.join();
  if (forwarded) forwarder.join();
  const uint64_t cycle = producer.max_record_bytes() + 1, rest = num_records % cycle;
  CHECK(num_delivered == num_records && sum_tickets == num_records * (num_records - 1) / 2);
  CHECK(consumer.counters().records == num_records && consumer.used_bytes() == 0);
  CHECK(consumer.counters().bytes == num_records / cycle * (cycle * (cycle - 1) / 2) + (rest == 0 ? 0 : rest * (rest - 1) / 2));
}

// Runs `work` in a child that dies at the n-th passing of a fault point; `meanwhile(child)` is called here until it has.
template <class Work, class Meanwhile>
void run_until_killed(const char* point, int round, Work work, Meanwhile meanwhile) {
  const pid_t child = ::fork();
  if (child == 0) {
    g_die_at = point;
    g_die_after = round;
    work();
    ::_exit(1);
  }
  int status = 0;
  pid_t ended;
  while ((ended = ::waitpid(child, &status, WNOHANG)) == 0) meanwhile();
  CHECK(ended == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

constexpr std::array<const char*, 7> kProducerPoints = {"payload written", "payload summed", "record written",  "padding written",
                                                        "tail published",  "consumer woken", "ticket forgotten"};

// Does a record count as committed, for which the producer passed this point at last?
bool is_committed_at(std::string_view point) {
  return point == "tail published" || point == "consumer woken" || point == "ticket forgotten";
}

// Writes record k of the lane, with tickets k begun before (committed with it) and `extra` (cancelled, but every third).
void write_with_tickets(Producer& producer, int64_t k, int64_t extra) {
  producer.begin(k);
  producer.begin(extra);
  if (k % 3 != 0) producer.cancel(extra);
  std::byte* slot;
  while ((slot = producer.try_reserve(700)) == nullptr) producer.wait_for_room(1.0);
  write_pattern(slot, static_cast<uint64_t>(k), 700);
  fault_point("payload written");
  producer.commit({.ticket = k});
}

// A child writes records and is killed at one store; another goes on behind it, and is killed too. All that was committed arrives, nothing
// else does, and the tickets of the dead are those begun and neither committed nor cancelled, for the consumer and for the successor.
void test_producer_killed_at_every_store() {
  for (const char* point : kProducerPoints) {
    for (int round = 1; round <= 9; ++round) {
      auto segment = make_segment("killed", 4096);
      Consumer consumer("killed", segment, false);
      int64_t num_delivered = 0;
      std::vector<int64_t> lost;
      for (uint32_t incarnation = 1; incarnation <= 3; ++incarnation) {
        const int64_t first = num_delivered;
        const auto write = [&] {
          Producer producer(segment);
          if (producer.in_flight() != lost) ::_exit(2);  // inherited
          for (const int64_t ticket : lost) {
            if (ticket % 2 == 0 || ticket < 1000) producer.cancel(ticket);  // the odd ones above 1000 stay, and are inherited again
          }
          for (int64_t k = first;; ++k) write_with_tickets(producer, k, 1000 * incarnation + k);
        };
        const auto take = [&] {
          while (const auto record = consumer.try_peek()) {
            CHECK(record->header.ticket == num_delivered && record->header.payload_bytes == 700 && matches_pattern(*record));
            CHECK(record->header.incarnation == incarnation && record->header.seq == static_cast<uint64_t>(num_delivered - first));
            ++num_delivered;
            CHECK(consumer.release(record->lease));
          }
        };
        run_until_killed(point, round, write, [&] {
          take();
          consumer.wait_for_record(0.001);
        });
        take();
        const int64_t num_begun = first + round;
        CHECK(num_delivered == (is_committed_at(point) ? num_begun : num_begun - 1) && consumer.used_bytes() == 0);
        std::vector<int64_t> expected;
        if (!is_committed_at(point)) expected.push_back(num_begun - 1);
        for (const int64_t ticket : lost) {
          if (ticket % 2 != 0 && ticket >= 1000) expected.push_back(ticket);
        }
        for (int64_t k = first; k < num_begun; ++k) {
          if (k % 3 == 0) expected.push_back(1000 * incarnation + k);
        }
        std::sort(expected.begin(), expected.end());
        CHECK(consumer.producer_state() == ProducerState::kDead);
        const auto dead = consumer.dead_producer(true);
        CHECK(dead && dead->incarnation == incarnation && dead->tickets == expected && dead->num_untracked == 0);
        lost = dead->tickets;
      }
    }
  }
}

// The same for a process that carries frames from its own lane to ours; tickets are not its business.
void test_forwarder_killed_at_every_store() {
  for (const char* point : {"record written", "padding written", "tail published", "consumer woken"}) {
    for (int round = 1; round <= 7; ++round) {
      auto segment = make_segment("target", 4096);
      Consumer consumer("target", segment, false);
      int64_t num_delivered = 0;
      const auto take = [&] {
        while (const auto record = consumer.try_peek()) {
          CHECK(record->header.ticket == num_delivered && record->header.incarnation == 1 && matches_pattern(*record));
          ++num_delivered;
          consumer.release(record->lease);
        }
      };
      const auto forward = [&] {
        auto own = make_segment("source", 4096);
        Consumer source("source", own, false);
        Producer writer(own), forwarder(segment);
        const char* die_at = std::exchange(g_die_at, nullptr);  // not in the own lane
        for (int64_t k = 0;; ++k) {
          if (!push(writer, k, 700)) ::_exit(2);
          const auto record = source.try_peek();
          const uint64_t num_bytes = kAlignment + record->header.payload_bytes;
          std::byte* frame;
          while ((frame = forwarder.try_reserve_frame(num_bytes)) == nullptr) forwarder.wait_for_room(1.0);
          std::memcpy(frame, record->payload - kAlignment, num_bytes);
          g_die_at = die_at;
          forwarder.commit_frame();
          g_die_at = nullptr;
          source.release(record->lease);
        }
      };
      run_until_killed(point, round, forward, take);
      take();
      CHECK(num_delivered == (is_committed_at(point) ? round : round - 1));
      const auto dead = consumer.dead_producer(true);
      CHECK(dead && dead->tickets.empty() && consumer.used_bytes() == 0);
    }
  }
}

// A consumer that dies while it makes the lane, or gives space back: the producer is told, and the next consumer of that name starts anew.
void test_consumer_killed_at_every_store() {
  const std::string name = unique_name("reader");
  for (const char* point : {"name claimed", "memory taken", "lane made", "head published"}) {
    const bool is_made = std::string_view(point) == "head published" || std::string_view(point) == "lane made";
    for (int round = 1; round <= (std::string_view(point) == "head published" ? 5 : 1); ++round) {
      const auto read = [&] {
        Consumer consumer(name, create_lane(name, 4096, {}), false);
        while (true) {
          if (const auto record = consumer.try_peek()) consumer.release(record->lease);
        }
      };
      std::unique_ptr<Producer> producer;
      std::string reason;
      run_until_killed(point, round, read, [&] {
        if (std::string_view(point) != "head published") return;
        if (producer == nullptr) {
          if (auto segment = open_lane(name, 0, 0, reason)) producer = std::make_unique<Producer>(segment);
        } else {
          try {
            push(*producer, 0, 700);
          } catch (const LaneClosed&) {  // it is dead already
          }
        }
      });
      if (producer != nullptr) {
        check_throws<LaneClosed>([&] {
          while (true) push(*producer, 0, 1000);
        });
      }
      CHECK(open_lane(name, 0, 0, reason) == nullptr);
      CHECK(reason == (is_made ? "the segment of that name is left from a consumer that died" : "its consumer is making it"));
      Consumer next(name, create_lane(name, 8192, {}), false);
      Producer successor(open_lane(name, 0, 0, reason));
      CHECK(push(successor, 0, 2000) && next.try_peek()->header.payload_bytes == 2000);
    }
  }
  std::string reason;
  CHECK(open_lane(name, 0, 0, reason) == nullptr && reason == "no consumer has made it");
}

void test_tickets() {
  auto segment = make_segment("tickets", 1 << 20);
  Consumer consumer("tickets", segment, false);
  Producer producer(segment);
  check_throws<std::invalid_argument>([&] { producer.begin(-1); });
  check_throws<std::logic_error>([&] { producer.cancel(0); });
  const int64_t num_tickets = kMaxInFlight + 10;
  for (int64_t k = 0; k < num_tickets; ++k) producer.begin(k);
  check_throws<std::logic_error>([&] { producer.begin(5); });
  CHECK(producer.in_flight().size() == static_cast<size_t>(num_tickets));
  CHECK(segment->header().num_untracked.load() == 10 && segment->header().in_flight.back().load() == static_cast<int64_t>(kMaxInFlight));
  CHECK(push(producer, num_tickets - 1, 10));  // one that is only counted
  producer.cancel(kMaxInFlight);
  CHECK(segment->header().num_untracked.load() == 8);
  CHECK(push(producer, 7, 10) && push(producer, 7, 10) && push(producer, -3, 10));  // not in flight: nothing to end
  producer.begin(7);
  CHECK(segment->header().in_flight[7].load() == 8);  // a slot that came free
  check_throws<std::logic_error>([&] { producer.commit({.ticket = 8}); });
  CHECK(producer.in_flight().size() == static_cast<size_t>(num_tickets - 2));
  for (const int64_t ticket : producer.in_flight()) producer.cancel(ticket);
  CHECK(producer.in_flight().empty() && segment->header().num_untracked.load() == 0);
  for (const auto& slot : segment->header().in_flight) CHECK(slot.load() == 0);
  CHECK(!consumer.dead_producer(true));
}

// Records of one lane published in another of its size: the same bytes at the same positions.
void test_frames() {
  auto segments = std::array{make_segment("source", 8192), make_segment("target", 8192)};
  Consumer source("source", segments[0], false), target("target", segments[1], false);
  Producer writer(segments[0]), forwarder(segments[1]);
  std::mt19937_64 random(7);
  for (int64_t k = 0; k < 500; ++k) {
    if (k % 7 == 3) {
      CHECK(writer.try_reserve(0) != nullptr);
      writer.commit({.ticket = k}, Kind::kMarker);
    } else {
      CHECK(push(writer, k, random() % (writer.max_record_bytes() + 1)));
    }
    const auto record = source.try_peek();
    const uint64_t num_bytes = kAlignment + record->header.payload_bytes;
    std::byte* frame = forwarder.try_reserve_frame(num_bytes);
    std::memcpy(frame, record->payload - kAlignment, num_bytes);
    if (k % 5 == 0) {
      const uint64_t bit = random() % (8 * kAlignment);
      frame[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      check_throws<LaneCorrupt>([&] { forwarder.commit_frame(); });
      CHECK(!target.try_peek());
      frame[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    }
    forwarder.commit_frame();
    CHECK(source.tail_position() == target.tail_position());
    const auto arrived = target.try_peek();
    CHECK(std::memcmp(&arrived->header, &record->header, sizeof(RecordHeader)) == 0 && arrived->end == record->end);
    CHECK(std::memcmp(arrived->payload - kAlignment, record->payload - kAlignment, num_bytes) == 0);
    source.release(record->lease);
    target.release(arrived->lease);
    CHECK(source.head_position() == target.head_position() && source.head_position() == record->end);
  }
  CHECK(target.counters().checksum_errors == 0 && target.counters().records == source.counters().records);
  check_throws<std::invalid_argument>([&] { forwarder.try_reserve_frame(63); });
  check_throws<RecordTooLarge>([&] { forwarder.try_reserve_frame(kAlignment + 2049); });
  CHECK(push(writer, 500, 100));  // a frame in a slot of another size, or of another lane
  const auto record = source.try_peek();
  std::byte* frame = forwarder.try_reserve_frame(kAlignment + 128);
  std::memcpy(frame, record->payload - kAlignment, kAlignment + 100);
  check_throws<LaneCorrupt>([&] { forwarder.commit_frame(); });
  check_throws<std::invalid_argument>([&] { forwarder.commit({}); });  // a frame's slot, and a payload's below
  forwarder.abort();
  CHECK(forwarder.try_reserve(100) != nullptr);
  check_throws<std::invalid_argument>([&] { forwarder.commit_frame(); });
  forwarder.abort();
  auto elsewhere = make_segment("elsewhere", 8192, {.lane = 1});
  Producer stranger(elsewhere);
  std::memcpy(stranger.try_reserve_frame(kAlignment + 100), record->payload - kAlignment, kAlignment + 100);
  check_throws<LaneCorrupt>([&] { stranger.commit_frame(); });
}

// A consumer that dies leaves a name, which the next start finds; the producer is told.
void test_dead_consumer() {
  const std::string name = unique_name("stale");
  const auto leave_stale = [&] {
    const pid_t child = ::fork();
    if (child == 0) {
      Consumer doomed(name, create_lane(name, 4096, {}), false);
      ::raise(SIGKILL);
    }
    ::waitpid(child, nullptr, 0);
  };
  leave_stale();
  std::string reason;
  CHECK(open_lane(name, 0, 0, reason) == nullptr && reason == "the segment of that name is left from a consumer that died");
  const auto removed = sweep_stale();
  CHECK(std::count(removed.begin(), removed.end(), name) == 1 && open_lane(name, 0, 0, reason) == nullptr &&
        reason == "no consumer has made it");
  leave_stale();
  {
    Consumer next(name, create_lane(name, 8192, {.job_id = 5}), false);  // replaces it
    Producer producer(open_lane(name, 5, 0, reason));
    CHECK(producer.capacity_bytes() == 8192 && sweep_stale().empty());
    next.segment()->header().consumer_tag = process_tag(::getpid()) ^ 1;  // as if our pid had been another process's before
    check_throws<LaneClosed>([&] {
      while (push(producer, 0, 1000)) CHECK(producer.used_bytes() <= 8192);
    });
  }
}

}  // namespace
}  // namespace areal_hpc

int main(int num_arguments, char** arguments) {
  using namespace areal_hpc;
  const uint64_t num_records = num_arguments > 1 ? std::strtoull(arguments[1], nullptr, 10) : 10'000;
  const uint64_t seed = num_arguments > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
  test_crc32c();
  test_wrap_and_order();
  test_out_of_order_release();
  test_handles_and_ends();
  test_bit_flips();
  test_dead_consumer();
  test_tickets();
  test_frames();
  test_producer_killed_at_every_store();
  test_forwarder_killed_at_every_store();
  test_consumer_killed_at_every_store();
  test_fuzz(num_records, seed, 4096, false, false);
  test_fuzz(num_records, seed, 4096, true, false);
  test_fuzz(num_records / 2, seed, 4096, false, true);
  test_fuzz(num_records / 2, seed, 4096, true, true);
  test_fuzz(num_records / 4, seed, 3 * 4096, false, false);
  std::puts("ring: all passed");
}
