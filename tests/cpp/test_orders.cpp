// One small program for each pair of memory orders of the ring. tests/cpp/mutate.py weakens them in turn and expects this to notice.
//
//   test_orders races          Two threads on one mapping, built with -fsanitize=thread: P0 (identity), P1 (records), P2 (space), P4 (end).
//   test_orders wakes SECONDS  P3 (sleep and wake), built with AREAL_HPC_SPIN_NS=0 and a long AREAL_HPC_FUTEX_CAP_NS: two threads on two
//                              CPUs, one of which publishes about when the other falls asleep. A nap that runs to its end although the peer
//                              has published is a lost wake-up: status 1. Status 77: there are no two CPUs.
//
// ThreadSanitizer sees no fences, and the store buffers of processors are emptied too soon for a missing one to be noticed within seconds,
// so mutate.py builds the second with those of store_buffer.hpp (AREAL_HPC_STORE_BUFFER). Without them it tests the processor and the
// kernel.

#include <sched.h>

#include <array>
#include <random>
#include <string_view>
#include <thread>

#ifdef AREAL_HPC_STORE_BUFFER
#include "store_buffer.hpp"
#else
namespace store_buffer {
inline void settle() {}
}  // namespace store_buffer
#endif
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

std::shared_ptr<Segment> make_segment(uint64_t capacity_bytes) {
  const std::string name = "orders-" + std::to_string(::getpid());
  auto segment = create_lane(name, capacity_bytes, {.checksum = false});
  unlink_segment(name, segment->inode());
  return segment;
}

// P0: who sees the magic sees the fields, which are no atomics.
void race_for_identity() {
  for (uint64_t round = 0; round < 50; ++round) {
    alignas(kPageBytes) static std::array<std::byte, kPageBytes> page;
    auto* header = reinterpret_cast<LaneHeader*>(page.data());
    std::atomic<bool> done = false;
    std::thread maker([&] {
      make_header(header, 4096 + round, {.lane = 3, .job_id = 4, .restart_id = 5});
      done.store(true, std::memory_order_relaxed);
    });
    while (!done.load(std::memory_order_relaxed)) {  // says when to look, and orders nothing
    }
    while (!is_made(*header)) {
    }
    CHECK(header->capacity_bytes == 4096 + round && header->lane == 3 && header->job_id == 4 && header->restart_id == 5);
    maker.join();
    page.fill(std::byte{0});
  }
}

// P1: who sees the tail sees the record. P2: who sees the head may overwrite what was read. A lane of four records is overwritten all the
// time.
void race_for_records() {
  constexpr uint64_t kNumRecords = 4000, kNumBytes = 896;
  auto segment = make_segment(4096);
  Consumer consumer("orders", segment, false);
  Producer producer(segment);
  std::thread writer([&] {
    for (uint64_t k = 0; k < kNumRecords; ++k) {
      std::byte* slot;
      while ((slot = producer.try_reserve(kNumBytes)) == nullptr) producer.wait_for_room(1.0);
      std::memset(slot, static_cast<int>(k % 251), kNumBytes);
      producer.commit({.ticket = static_cast<int64_t>(k)});
    }
  });
  for (uint64_t k = 0; k < kNumRecords;) {
    const auto record = consumer.try_peek();
    if (!record) {
      consumer.wait_for_record(1.0);
      continue;
    }
    CHECK(record->header.ticket == static_cast<int64_t>(k));
    uint64_t sum = 0;
    for (uint64_t i = 0; i < kNumBytes; ++i) sum += static_cast<uint64_t>(record->payload[i]);
    CHECK(sum == k % 251 * kNumBytes);
    consumer.release(record->lease);
    ++k;
  }
  writer.join();
}

// P4: who sees the lane closed sees all that the producer did before, its last tail included.
void race_for_the_end(bool asleep) {
  for (int round = 0; round < 50; ++round) {
    auto segment = make_segment(4096);
    Consumer consumer("orders", segment, false);
    Producer producer(segment);
    int last_words = 0;
    std::thread writer([&] {
      last_words = 42;
      producer.close();
    });
    if (asleep)
      CHECK(consumer.wait_for_record(60.0));
    else
      while (consumer.producer_state() != ProducerState::kClosed) {
      }
    CHECK(last_words == 42);
    writer.join();
  }
}

void pin_to(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  CHECK(::sched_setaffinity(0, sizeof cpus, &cpus) == 0);
}

void spin(uint64_t num_ns) {
  for (const uint64_t until = monotonic_ns() + num_ns; monotonic_ns() < until;) {
  }
}

// The peer of a sleeper publishes about when it falls asleep. Returns the number of naps that ran to their end although the peer had
// published.
struct Wakes {
  static constexpr uint64_t kCapacity = 8192;
  static constexpr uint64_t kNumBytes = kCapacity / 4 - kAlignment;  // so that four records fill the lane
  const uint64_t stop_at;
  uint64_t num_rounds = 0, num_lost = 0;
  std::atomic<uint64_t> round = 0;  // that the sleeper is about to wait in
  std::atomic<uint64_t> published_ns = 0;

  explicit Wakes(double seconds) : stop_at(monotonic_ns() + static_cast<uint64_t>(seconds * 1e9)) {}

  bool is_over() const { return num_lost > 0 || monotonic_ns() > stop_at; }
  void judge() {
    ++num_rounds;
    if (monotonic_ns() - published_ns.load(std::memory_order_relaxed) > kFutexCap_ns / 10 * 9) ++num_lost;
  }
  // The waiting side calls the clock twice and looks 32 times before it announces that it sleeps: a microsecond or two.
  template <class Action>
  void publish_in_each_round(Action action) {
    std::mt19937_64 random(1);
    for (uint64_t next = 1;; ++next) {
      uint64_t now;
      while ((now = round.load(std::memory_order_acquire)) < next) ring_detail::pause();
      if (now == kOver) return;
      spin(random() % 4000);
      action();
      store_buffer::settle();
    }
  }
  void next_round() { round.store(num_rounds + 1, std::memory_order_release); }
  void end() { round.store(kOver, std::memory_order_release); }
  static constexpr uint64_t kOver = ~uint64_t{0};
};

// The consumer sleeps, the producer commits.
void wake_consumer(Wakes& wakes, int cpu, int other_cpu) {
  auto segment = make_segment(Wakes::kCapacity);
  Consumer consumer("orders", segment, false);
  Producer producer(segment);
  std::thread writer([&] {
    pin_to(other_cpu);
    wakes.publish_in_each_round([&] {
      CHECK(producer.try_reserve(Wakes::kNumBytes) != nullptr);
      wakes.published_ns.store(monotonic_ns(), std::memory_order_relaxed);
      producer.commit({});
    });
  });
  pin_to(cpu);
  while (!wakes.is_over()) {
    wakes.next_round();
    CHECK(consumer.wait_for_record(60.0));
    wakes.judge();
    consumer.release(consumer.try_peek()->lease);
    store_buffer::settle();
  }
  wakes.end();
  writer.join();
}

// The producer sleeps, the consumer gives space back.
void wake_producer(Wakes& wakes, int cpu, int other_cpu) {
  auto segment = make_segment(Wakes::kCapacity);
  Consumer consumer("orders", segment, false);
  Producer producer(segment);
  const auto fill = [&] {
    while (producer.try_reserve(Wakes::kNumBytes) != nullptr) producer.commit({});
  };
  fill();
  store_buffer::settle();
  std::thread reader([&] {
    pin_to(other_cpu);
    wakes.publish_in_each_round([&] {
      const auto record = consumer.try_peek();
      CHECK(record);
      wakes.published_ns.store(monotonic_ns(), std::memory_order_relaxed);
      consumer.release(record->lease);
    });
  });
  pin_to(cpu);
  while (!wakes.is_over()) {
    wakes.next_round();
    CHECK(producer.wait_for_room(60.0));
    wakes.judge();
    fill();
    store_buffer::settle();
  }
  wakes.end();
  reader.join();
}

}  // namespace
}  // namespace areal_hpc

int main(int num_arguments, char** arguments) {
  using namespace areal_hpc;
  const std::string_view mode = num_arguments > 1 ? arguments[1] : "";
  crc32c("", 0);  // initialises its statics here, so that this orders nothing between the threads
  if (mode == "races") {
    race_for_identity();
    race_for_records();
    race_for_the_end(false);
    race_for_the_end(true);
    std::puts("orders: no race");
    return 0;
  }
  if (mode != "wakes" || num_arguments != 3) {
    std::fputs("usage: test_orders races | wakes SECONDS\n", stderr);
    return 2;
  }
  cpu_set_t cpus;
  CHECK(::sched_getaffinity(0, sizeof cpus, &cpus) == 0);
  std::vector<int> usable;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &cpus)) usable.push_back(cpu);
  }
  if (usable.size() < 2) {
    std::puts("orders: sleep and wake race between two CPUs, and there is one");
    return 77;
  }
  const double seconds = std::strtod(arguments[2], nullptr) / 2;
  Wakes consumer(seconds);
  wake_consumer(consumer, usable[0], usable[1]);
  Wakes producer(seconds);
  wake_producer(producer, usable[0], usable[1]);
  std::printf("orders: lost wake-ups: consumer %llu of %llu, producer %llu of %llu\n", static_cast<unsigned long long>(consumer.num_lost),
              static_cast<unsigned long long>(consumer.num_rounds), static_cast<unsigned long long>(producer.num_lost),
              static_cast<unsigned long long>(producer.num_rounds));
  return consumer.num_lost + producer.num_lost == 0 ? 0 : 1;
}
