// Atomics and a futex that promise what C++20 and futex(2) promise and no more: stores wait in a buffer of their thread, in order, and
// later loads overtake them, until a seq_cst fence, a read-modify-write, or settle(). A processor does the same for nanoseconds, which a
// test can hardly hit; here it takes microseconds. tests/cpp/mutate.py compiles copies of the ring's headers against this, with
// `std::atomic`, `std::atomic_thread_fence` and `::syscall(SYS_futex, ...)` replaced.

#pragma once

#include <linux/futex.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>

namespace store_buffer {

struct Pending {
  const void* address;
  uint64_t value;
  void (*apply)(const void* address, uint64_t value);
};

struct Thread {
  std::deque<Pending> pending;
  std::mt19937_64 random{std::hash<const void*>{}(this)};
};
inline Thread& self() {
  static thread_local Thread thread;
  return thread;
}

inline void drain() {
  auto& pending = self().pending;
  for (; !pending.empty(); pending.pop_front()) pending.front().apply(pending.front().address, pending.front().value);
}

inline void dawdle() {
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(self().random() % 5000);
  while (std::chrono::steady_clock::now() < until) {
  }
}

// What every processor does sooner or later.
inline void settle() {
  dawdle();
  drain();
}

inline void fence(std::memory_order order) {
  if (order == std::memory_order_seq_cst) drain();
}

template <class T>
class atomic {
 public:
  static constexpr bool is_always_lock_free = std::atomic<T>::is_always_lock_free;
  atomic() = default;
  atomic(T value) : value_(value) {}
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;

  T load(std::memory_order) const {
    const auto& pending = self().pending;
    for (auto entry = pending.rbegin(); entry != pending.rend(); ++entry) {
      if (entry->address == this) return static_cast<T>(entry->value);  // a thread sees its own stores
    }
    return value_.load();
  }
  void store(T value, std::memory_order order) {
    const auto apply = [](const void* address, uint64_t v) {
      const_cast<atomic*>(static_cast<const atomic*>(address))->value_.store(static_cast<T>(v));
    };
    self().pending.push_back({this, static_cast<uint64_t>(value), apply});
    if (order == std::memory_order_seq_cst) drain();
  }
  T fetch_add(T value, std::memory_order) {
    drain();
    return value_.fetch_add(value);
  }
  T fetch_sub(T value, std::memory_order) {
    drain();
    return value_.fetch_sub(value);
  }
  T exchange(T value, std::memory_order) {
    drain();
    return value_.exchange(value);
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order) {
    drain();
    return value_.compare_exchange_strong(expected, value);
  }

 private:
  std::atomic<T> value_;
};

// The kernel's side: comparing and falling asleep are one step for those who wake. (Linux has a barrier in front of the comparison, which
// futex(2) does not promise; here there is none.)
struct Kernel {
  std::mutex mutex;
  std::map<const uint32_t*, std::condition_variable> sleepers;
};
inline Kernel& kernel() {
  static Kernel the_kernel;
  return the_kernel;
}

inline long futex(uint32_t* word, int operation, uint32_t value, const timespec* timeout, const void*, int) {
  std::unique_lock lock(kernel().mutex);
  auto& sleepers = kernel().sleepers[word];
  if (operation == FUTEX_WAIT) {
    if (__atomic_load_n(word, __ATOMIC_RELAXED) == value) {
      settle();
      sleepers.wait_for(lock, std::chrono::seconds(timeout->tv_sec) + std::chrono::nanoseconds(timeout->tv_nsec));
    }
  } else {
    sleepers.notify_all();
  }
  lock.unlock();
  drain();
  return 0;
}

}  // namespace store_buffer
