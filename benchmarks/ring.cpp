// The ring from C++: one-way latency of a ping-pong between two processes over two lanes, and throughput, each process on its own core.
// Usage: ring RECORD_BYTES CAPACITY_BYTES SECONDS CHECKSUM(0|1) PINNED(0|1); one JSON object on stdout. Built by benchmarks/ring.py.

#include "ring.hpp"

#include <sched.h>
#include <sys/wait.h>

#include <cstdio>
#include <vector>

namespace areal_hpc {
namespace {

constexpr int64_t kEnd = -1;

std::vector<int> allowed_cores() {
  cpu_set_t cores;
  ::sched_getaffinity(0, sizeof cores, &cores);
  std::vector<int> allowed;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &cores)) allowed.push_back(core);
  }
  return allowed;
}
const std::vector<int> g_cores = allowed_cores();  // before anybody is pinned

void pin(size_t k, bool pinned) {
  if (!pinned || g_cores.size() < 2) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(g_cores[k], &one);
  ::sched_setaffinity(0, sizeof one, &one);
}

double seconds_since(uint64_t start_ns) { return static_cast<double>(monotonic_ns() - start_ns) * 1e-9; }

std::shared_ptr<Segment> make_lane(const char* what, uint64_t capacity_bytes, bool checksum) {
  const std::string name = std::string("bench-cpp-") + what + "-" + std::to_string(::getpid());
  auto segment = create_lane(name, capacity_bytes, {.checksum = checksum});
  unlink_segment(name, segment->inode());
  return segment;
}

void push(Producer& producer, int64_t ticket, const std::vector<std::byte>& source) {
  std::byte* slot;
  while ((slot = producer.try_reserve(source.size())) == nullptr) producer.wait_for_room(1.0);
  std::memcpy(slot, source.data(), source.size());
  producer.commit({.ticket = ticket});
}

RecordView take(Consumer& consumer) {
  while (true) {
    if (const auto record = consumer.try_peek()) return *record;
    consumer.wait_for_record(1.0);
  }
}

double throughput_gb_per_s(uint64_t record_bytes, uint64_t capacity_bytes, double seconds, bool checksum, bool pinned) {
  auto segment = make_lane("throughput", capacity_bytes, checksum);
  std::vector<std::byte> source(record_bytes, std::byte{7}), target(record_bytes);
  if (::fork() == 0) {
    pin(1, pinned);
    Producer producer(segment);
    const uint64_t start = monotonic_ns();
    while (seconds_since(start) < seconds) {
      for (int i = 0; i < 16; ++i) push(producer, 0, source);
    }
    push(producer, kEnd, source);
    producer.close();
    ::_exit(0);
  }
  Consumer consumer("throughput", segment, false);
  int64_t ticket = 0;
  uint64_t start = 0;
  while (ticket != kEnd) {
    const RecordView record = take(consumer);
    if (start == 0) start = monotonic_ns();
    std::memcpy(target.data(), record.payload, record_bytes);
    ticket = record.header.ticket;
    consumer.release(record.lease);
  }
  const double gb_per_s = static_cast<double>(consumer.counters().bytes) / seconds_since(start) * 1e-9;
  ::wait(nullptr);
  return gb_per_s;
}

std::vector<double> latencies_us(uint64_t record_bytes, int num_rounds, bool checksum, bool pinned) {
  auto there = make_lane("there", 8 * record_bytes, checksum), back = make_lane("back", 8 * record_bytes, checksum);
  const std::vector<std::byte> source(record_bytes, std::byte{7});
  const auto bounce = [&](Producer& producer, Consumer& consumer, int64_t ticket) {
    push(producer, ticket, source);
    consumer.release(take(consumer).lease);
  };
  if (::fork() == 0) {
    pin(1, pinned);
    Consumer questions("there", there, false);
    Producer answers(back);
    for (int i = 0; i < num_rounds; ++i) {
      questions.release(take(questions).lease);
      push(answers, i, source);
    }
    ::_exit(0);
  }
  Producer questions(there);
  Consumer answers("back", back, false);
  std::vector<double> halves_us(num_rounds);
  for (int i = 0; i < num_rounds; ++i) {
    const uint64_t start = monotonic_ns();
    bounce(questions, answers, i);
    halves_us[i] = seconds_since(start) / 2 * 1e6;
  }
  ::wait(nullptr);
  std::sort(halves_us.begin(), halves_us.end());
  return halves_us;
}

}  // namespace
}  // namespace areal_hpc

int main(int, char** arguments) {
  using namespace areal_hpc;
  const uint64_t record_bytes = std::strtoull(arguments[1], nullptr, 10), capacity_bytes = std::strtoull(arguments[2], nullptr, 10);
  const double seconds = std::atof(arguments[3]);
  const bool checksum = arguments[4][0] == '1', pinned = arguments[5][0] == '1';
  pin(0, pinned);
  const double gb_per_s = throughput_gb_per_s(record_bytes, capacity_bytes, seconds, checksum, pinned);
  const std::vector<double> us = latencies_us(record_bytes, record_bytes > 100'000 ? 1'000 : 20'000, checksum, pinned);
  std::printf("{\"gb_per_s\": %.3f, \"latency_p50_us\": %.3f, \"latency_p99_us\": %.3f}\n", gb_per_s, us[us.size() / 2],
              us[us.size() * 99 / 100]);
}
