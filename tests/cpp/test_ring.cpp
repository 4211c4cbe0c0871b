// Tests of the ring in C++: functional, fuzz with two threads and closed-form sums, and a producer killed at every store. Built plain and
// with sanitizers (option AREAL_HPC_SANITIZE); tests/transport/test_ring_cpp.py does that. Usage: test_ring [number of fuzz records] [seed]

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
  auto consumer = std::make_unique<Consumer>(name, 8192, LaneOptions{.lane = 7, .job_id = 11, .restart_id = 2}, false);
  check_throws<LaneBusy>([&] { Consumer(name, 8192, {}, false); });
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

// Two threads, random sizes, leases released out of order; sums against their closed forms.
void test_fuzz(uint64_t num_records, uint64_t seed, uint64_t capacity_bytes, bool slow_consumer) {
  auto segment = make_segment("fuzz", capacity_bytes);
  Consumer consumer("fuzz", segment, false);
  Producer producer(segment);
  const auto size_of = [&](uint64_t k) { return k % (producer.max_record_bytes() + 1); };
  std::thread writer([&] {
    std::mt19937_64 random(seed);
    for (uint64_t k = 0; k < num_records; ++k) {
      while (!push(producer, static_cast<int64_t>(k), size_of(k))) producer.wait_for_room(1.0);
      if (random() % 8 == 0 && producer.try_reserve(random() % 64) != nullptr) producer.abort();
      if (!slow_consumer && random() % 64 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));  // the consumer falls asleep
    }
    producer.close();
  });
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
  const uint64_t cycle = producer.max_record_bytes() + 1, rest = num_records % cycle;
  CHECK(num_delivered == num_records && sum_tickets == num_records * (num_records - 1) / 2);
  CHECK(consumer.counters().records == num_records && consumer.used_bytes() == 0);
  CHECK(consumer.counters().bytes == num_records / cycle * (cycle * (cycle - 1) / 2) + (rest == 0 ? 0 : rest * (rest - 1) / 2));
}

// A child writes records and is killed at one store; then another goes on behind it. All that was committed arrives, nothing else does.
void test_killed_at_every_store() {
  const std::array<const char*, 4> points = {"payload written", "padding written", "record written", "tail published"};
  for (const char* point : points) {
    for (int round = 1; round <= 9; ++round) {
      auto segment = make_segment("killed", 4096);
      Consumer consumer("killed", segment, false);
      const auto write = [&](int64_t first) {
        Producer producer(segment);
        for (int64_t k = first;; ++k) {
          std::byte* slot;
          while ((slot = producer.try_reserve(700)) == nullptr) producer.wait_for_room(1.0);
          write_pattern(slot, static_cast<uint64_t>(k), 700);
          fault_point("payload written");
          producer.commit({.ticket = k});
        }
      };
      const int64_t num_committed = std::string_view(point) == "tail published" ? round : round - 1;
      int64_t num_delivered = 0;
      for (uint32_t incarnation = 1; incarnation <= 2; ++incarnation) {
        const int64_t first = num_delivered;
        const pid_t child = ::fork();
        if (child == 0) {
          g_die_at = point;
          g_die_after = round;
          write(first);
          ::_exit(1);
        }
        while (true) {
          const bool dead = segment->header().incarnation.load() == incarnation && consumer.producer_state() == ProducerState::kDead;
          const auto record = consumer.try_peek();
          if (record && record->header.incarnation == incarnation) {
            CHECK(record->header.ticket == num_delivered++ && record->header.payload_bytes == 700 && matches_pattern(*record));
            CHECK(consumer.release(record->lease));
          } else if (dead) {
            CHECK(!record);
            break;
          }
          if (!record) consumer.wait_for_record(0.001);
        }
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(num_delivered == first + num_committed && consumer.used_bytes() == 0);
      }
    }
  }
}

// A consumer that dies leaves a name, which the next start finds; the producer is told.
void test_dead_consumer() {
  const std::string name = unique_name("stale");
  const auto leave_stale = [&] {
    const pid_t child = ::fork();
    if (child == 0) {
      Consumer doomed(name, 4096, {}, false);
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
    Consumer next(name, 8192, {.job_id = 5}, false);  // replaces it
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
  test_killed_at_every_store();
  test_fuzz(num_records, seed, 4096, false);
  test_fuzz(num_records, seed, 4096, true);
  test_fuzz(num_records / 4, seed, 3 * 4096, false);
  std::puts("ring: all passed");
}
