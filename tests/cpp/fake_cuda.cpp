// A CUDA driver without a device, for tests: the functions of libcuda.so.1 that areal_hpc uses, and fake_cuda_* to steer and inspect it.
//
// Honest where it matters: device addresses point into memory without any access (the bytes lie elsewhere), so touching them on the CPU
// crashes; streams are threads, a call returns before its copy has begun, and a copy stops half-way for the chosen delay; events end in the
// order of their streams; the default stream waits for blocking streams and they for it; a copy needs registered host memory and allocated
// device memory when it is queued and when it runs; an error while it runs sticks to the context, as on a device.

#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>

#include "cuda.hpp"

using areal_hpc::cuda::ContextHandle;
using areal_hpc::cuda::DeviceHandle;
using areal_hpc::cuda::DevicePointer;
using areal_hpc::cuda::EventHandle;
using areal_hpc::cuda::Result;
using areal_hpc::cuda::StreamHandle;

namespace {

constexpr Result kOk = 0, kBadValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100, kBadDevice = 101, kBadContext = 201,
                 kBadHandle = 400, kPending = 600, kIllegalAddress = 700, kAlreadyRegistered = 712, kNotRegistered = 713;

struct Error {
  Result code;
  const char *name, *text;
};
constexpr Error kErrors[] = {
    {kOk, "CUDA_SUCCESS", "no error"},
    {kBadValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kBadDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kBadContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kBadHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kPending, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
};

struct Token {  // of one piece of work in a stream
  bool done = false;
};
using TokenPtr = std::shared_ptr<Token>;

struct Work {
  std::vector<TokenPtr> after;
  std::function<void(std::unique_lock<std::mutex>&)> run;  // may let go of the lock while it waits
  TokenPtr token = std::make_shared<Token>();
};

struct Allocation {
  std::vector<std::byte> bytes;
  size_t reserved = 0;
  int device = 0;
};

}  // namespace

struct CUstream_st {
  ContextHandle context;
  bool blocking;
  std::deque<Work> queue{};
  TokenPtr tail = std::make_shared<Token>(Token{true});
  bool destroyed = false;
};
struct CUevent_st {
  ContextHandle context;
  TokenPtr token = std::make_shared<Token>(Token{true});
};
struct CUctx_st {
  int device = 0;
  int num_retains = 0;
  Result sticky = kOk;
  StreamHandle legacy = nullptr;
  std::map<pthread_t, StreamHandle> per_thread;
  std::vector<StreamHandle> streams;  // all but the legacy one
};

namespace {

// Never destroyed: the streams' threads live as long as the process.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  bool initialized = false;
  int num_devices = 1;
  bool held = false;
  std::chrono::microseconds delay{0};
  std::map<std::string, std::deque<Result>> failures;
  std::map<int, CUctx_st> contexts;
  std::map<uint64_t, uint64_t> registered;
  std::map<uint64_t, Allocation> allocations;
  std::map<std::string, int64_t> counts;
};
State& state() {
  static State& the = *new State;
  return the;
}
using Lock = std::unique_lock<std::mutex>;

thread_local std::vector<ContextHandle> current;

std::optional<Result> planned_failure(const std::string& what) {
  auto& planned = state().failures[what];
  if (planned.empty()) return std::nullopt;
  const Result result = planned.front();
  planned.pop_front();
  if (result == kOk) return std::nullopt;
  return result;
}

// Every call begins here; `needs_context`: it wants one, and it fails once an error sticks to it.
Result enter(const char* what, bool needs_context = true) {
  if (const auto failure = planned_failure(what)) return *failure;
  if (!state().initialized) return kNotInitialized;
  if (!needs_context) return kOk;
  if (current.empty()) return kBadContext;
  return current.back()->sticky;
}

bool is_registered(uint64_t address, uint64_t num_bytes) {
  auto next = state().registered.upper_bound(address);
  if (next == state().registered.begin()) return false;
  --next;
  return address + num_bytes <= next->first + next->second;
}

// Where the bytes of a device address really lie; null if they are not all of one allocation.
std::byte* shadow(DevicePointer address, uint64_t num_bytes, int* device = nullptr) {
  auto next = state().allocations.upper_bound(address);
  if (next == state().allocations.begin()) return nullptr;
  --next;
  const uint64_t offset = address - next->first;
  if (offset + num_bytes > next->second.bytes.size() || (offset > 0 && offset == next->second.bytes.size())) return nullptr;
  if (device != nullptr) *device = next->second.device;
  return next->second.bytes.data() + offset;
}

void work_off(StreamHandle stream) {
  State& s = state();
  Lock lock(s.mutex);
  for (;;) {
    s.changed.wait(lock, [&] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) break;
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    s.changed.wait(lock, [&] { return std::all_of(work.after.begin(), work.after.end(), [](const TokenPtr& t) { return t->done; }); });
    if (work.run && stream->context->sticky == kOk) work.run(lock);
    work.token->done = true;
    s.changed.notify_all();
  }
  delete stream;
}

StreamHandle make_stream(ContextHandle context, bool blocking) {
  auto* stream = new CUstream_st{.context = context, .blocking = blocking};
  std::thread(work_off, stream).detach();
  return stream;
}

void push(StreamHandle stream, Work work) {
  stream->tail = work.token;
  stream->queue.push_back(std::move(work));
  state().changed.notify_all();
}

// The default stream's rule: it waits for the blocking streams of its context, and they for it.
void submit(StreamHandle stream, Work work) {
  ContextHandle context = stream->context;
  if (stream != context->legacy) return push(stream, std::move(work));
  for (const StreamHandle other : context->streams) {
    if (other->blocking) work.after.push_back(other->tail);
  }
  const TokenPtr token = work.token;
  push(stream, std::move(work));
  for (const StreamHandle other : context->streams) {
    if (other->blocking) push(other, Work{.after = {token}, .run = {}});
  }
}

// 0 and 1: the legacy default stream, 2: the thread's own. Null for a handle that is none.
StreamHandle resolve(StreamHandle handle) {
  ContextHandle context = current.back();
  const auto number = reinterpret_cast<uint64_t>(handle);
  if (number <= 1) {
    if (context->legacy == nullptr) context->legacy = make_stream(context, true);
    return context->legacy;
  }
  if (number == 2) {
    StreamHandle& mine = context->per_thread[pthread_self()];
    if (mine == nullptr) context->streams.push_back(mine = make_stream(context, true));
    return mine;
  }
  for (auto& [device, other] : state().contexts) {
    if (std::find(other.streams.begin(), other.streams.end(), handle) != other.streams.end()) return handle;
  }
  return nullptr;
}

Result copy(const char* what, bool to_host, uint64_t host, DevicePointer device, size_t num_bytes, StreamHandle handle) {
  State& s = state();
  const Lock lock(s.mutex);
  if (const Result result = enter(what)) return result;
  const StreamHandle stream = resolve(handle);
  if (stream == nullptr || stream->context != current.back()) return kBadHandle;
  if (!is_registered(host, num_bytes) || shadow(device, num_bytes) == nullptr) return kBadValue;
  submit(stream, Work{.after = {}, .run = [=, &s](Lock& running) {
                        for (size_t half = 0; half < 2; ++half) {
                          const size_t begin = half == 0 ? 0 : num_bytes / 2,
                                       length = half == 0 ? num_bytes / 2 : num_bytes - num_bytes / 2;
                          std::byte* bytes = shadow(device, num_bytes);
                          const auto failure = half == 1 ? planned_failure("async") : std::nullopt;
                          if (failure || bytes == nullptr || !is_registered(host, num_bytes)) {
                            stream->context->sticky = failure ? *failure : kIllegalAddress;
                            return;
                          }
                          auto* memory = reinterpret_cast<std::byte*>(host);
                          if (to_host)
                            std::memcpy(memory + begin, bytes + begin, length);
                          else
                            std::memcpy(bytes + begin, memory + begin, length);
                          if (half == 0) {
                            if (s.delay.count() > 0) s.changed.wait_for(running, s.delay, [] { return false; });
                            s.changed.wait(running, [&] { return !s.held; });
                          }
                        }
                        s.counts[to_host ? "bytes_to_host" : "bytes_to_device"] += static_cast<int64_t>(num_bytes);
                      }});
  return kOk;
}

}  // namespace

extern "C" {

Result cuInit(unsigned int) {
  const Lock lock(state().mutex);
  if (const auto failure = planned_failure("cuInit")) return *failure;
  if (state().num_devices == 0) return kNoDevice;
  state().initialized = true;
  return kOk;
}

Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kOk;
}

Result cuGetErrorName(Result code, const char** name) {
  for (const Error& error : kErrors) {
    if (error.code == code) return *name = error.name, kOk;
  }
  return *name = nullptr, kBadValue;
}

Result cuGetErrorString(Result code, const char** text) {
  for (const Error& error : kErrors) {
    if (error.code == code) return *text = error.text, kOk;
  }
  return *text = nullptr, kBadValue;
}

Result cuDeviceGetCount(int* count) {
  const Lock lock(state().mutex);
  *count = state().num_devices;
  return enter("cuDeviceGetCount", false);
}

Result cuDeviceGet(DeviceHandle* device, int ordinal) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuDeviceGet", false)) return result;
  if (ordinal < 0 || ordinal >= state().num_devices) return kBadDevice;
  *device = ordinal;
  return kOk;
}

Result cuDevicePrimaryCtxRetain(ContextHandle* context, DeviceHandle device) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuDevicePrimaryCtxRetain", false)) return result;
  *context = &state().contexts[device];
  (*context)->device = device;
  ++(*context)->num_retains;
  return kOk;
}

Result cuDevicePrimaryCtxRelease_v2(DeviceHandle device) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuDevicePrimaryCtxRelease", false)) return result;
  if (state().contexts[device].num_retains == 0) return kBadContext;
  --state().contexts[device].num_retains;
  return kOk;
}

Result cuCtxGetCurrent(ContextHandle* context) {
  const Lock lock(state().mutex);
  *context = current.empty() ? nullptr : current.back();
  return enter("cuCtxGetCurrent", false);
}

Result cuCtxGetDevice(DeviceHandle* device) {
  const Lock lock(state().mutex);
  if (current.empty()) return kBadContext;
  *device = current.back()->device;
  return enter("cuCtxGetDevice", false);
}

Result cuCtxPushCurrent_v2(ContextHandle context) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuCtxPushCurrent", false)) return result;
  if (context == nullptr || context->num_retains == 0) return kBadContext;
  current.push_back(context);
  return kOk;
}

Result cuCtxPopCurrent_v2(ContextHandle* context) {
  const Lock lock(state().mutex);
  if (current.empty()) return kBadContext;
  *context = current.back();
  current.pop_back();
  return kOk;
}

Result cuMemHostRegister_v2(void* address, size_t num_bytes, unsigned int) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuMemHostRegister")) return result;
  const auto begin = reinterpret_cast<uint64_t>(address);
  if (begin == 0 || num_bytes == 0) return kBadValue;
  for (const auto& [other, length] : state().registered) {
    if (begin < other + length && other < begin + num_bytes) return kAlreadyRegistered;
  }
  state().registered[begin] = num_bytes;
  return kOk;
}

Result cuMemHostUnregister(void* address) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuMemHostUnregister")) return result;
  return state().registered.erase(reinterpret_cast<uint64_t>(address)) == 1 ? kOk : kNotRegistered;
}

Result cuMemcpyHtoDAsync_v2(DevicePointer device, const void* host, size_t num_bytes, StreamHandle stream) {
  return copy("cuMemcpyHtoDAsync", false, reinterpret_cast<uint64_t>(host), device, num_bytes, stream);
}

Result cuMemcpyDtoHAsync_v2(void* host, DevicePointer device, size_t num_bytes, StreamHandle stream) {
  return copy("cuMemcpyDtoHAsync", true, reinterpret_cast<uint64_t>(host), device, num_bytes, stream);
}

Result cuPointerGetAttribute(void* data, unsigned int attribute, DevicePointer address) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuPointerGetAttribute")) return result;
  int device = 0;
  const bool on_device = shadow(address, 1, &device) != nullptr;
  if (!on_device && !is_registered(address, 1)) return kBadValue;
  if (attribute == areal_hpc::cuda::kAttributeMemoryType)
    *static_cast<unsigned int*>(data) = on_device ? areal_hpc::cuda::kMemoryTypeDevice : areal_hpc::cuda::kMemoryTypeHost;
  else if (attribute == areal_hpc::cuda::kAttributeDeviceOrdinal)
    *static_cast<int*>(data) = device;
  else
    return kBadValue;
  return kOk;
}

Result cuStreamCreate(StreamHandle* stream, unsigned int flags) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuStreamCreate")) return result;
  *stream = make_stream(current.back(), (flags & areal_hpc::cuda::kStreamNonBlocking) == 0);
  current.back()->streams.push_back(*stream);
  ++state().counts["live_streams"];
  return kOk;
}

Result cuStreamDestroy_v2(StreamHandle stream) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuStreamDestroy")) return result;
  auto& streams = stream->context->streams;
  const auto found = std::find(streams.begin(), streams.end(), stream);
  if (found == streams.end()) return kBadHandle;
  streams.erase(found);
  --state().counts["live_streams"];
  stream->destroyed = true;  // its thread works off what is queued, then frees it
  state().changed.notify_all();
  return kOk;
}

Result cuStreamQuery(StreamHandle handle) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuStreamQuery")) return result;
  const StreamHandle stream = resolve(handle);
  if (stream == nullptr) return kBadHandle;
  return stream->tail->done ? kOk : kPending;
}

Result cuStreamWaitEvent(StreamHandle handle, EventHandle event, unsigned int) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuStreamWaitEvent")) return result;
  const StreamHandle stream = resolve(handle);
  if (stream == nullptr || event == nullptr) return kBadHandle;
  submit(stream, Work{.after = {event->token}, .run = {}});
  return kOk;
}

Result cuEventCreate(EventHandle* event, unsigned int) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuEventCreate")) return result;
  *event = new CUevent_st{.context = current.back()};
  ++state().counts["live_events"];
  return kOk;
}

Result cuEventDestroy_v2(EventHandle event) {
  const Lock lock(state().mutex);
  if (const auto failure = planned_failure("cuEventDestroy")) return *failure;
  --state().counts["live_events"];
  delete event;
  return kOk;
}

Result cuEventRecord(EventHandle event, StreamHandle handle) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuEventRecord")) return result;
  const StreamHandle stream = resolve(handle);
  if (stream == nullptr || stream->context != event->context) return kBadHandle;
  Work work;
  event->token = work.token;
  submit(stream, std::move(work));
  return kOk;
}

Result cuEventQuery(EventHandle event) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuEventQuery")) return result;
  return event->token->done ? kOk : kPending;
}

// What only tests call: device memory, and work of "another library".

Result cuMemAlloc_v2(DevicePointer* address, size_t num_bytes) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuMemAlloc")) return result;
  if (num_bytes == 0) return kBadValue;
  const size_t reserved = (num_bytes + 4096) / 4096 * 4096;
  void* memory = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<uint64_t>(memory);
  state().allocations[*address] = {std::vector<std::byte>(num_bytes), reserved, current.back()->device};
  return kOk;
}

Result cuMemFree_v2(DevicePointer address) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuMemFree")) return result;
  const auto found = state().allocations.find(address);
  if (found == state().allocations.end()) return kBadValue;
  ::munmap(reinterpret_cast<void*>(address), found->second.reserved);
  state().allocations.erase(found);
  return kOk;
}

Result cuMemsetD8Async(DevicePointer address, unsigned char value, size_t num_bytes, StreamHandle handle) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuMemsetD8Async")) return result;
  const StreamHandle stream = resolve(handle);
  if (stream == nullptr) return kBadHandle;
  submit(stream, Work{.after = {}, .run = [=](Lock&) {
                        std::byte* bytes = shadow(address, num_bytes);
                        if (bytes == nullptr)
                          stream->context->sticky = kIllegalAddress;
                        else
                          std::memset(bytes, value, num_bytes);
                      }});
  return kOk;
}

// Holds the stream until the number at `address` (of the device) is at least `value`; other conditions are not offered.
Result cuStreamWaitValue32_v2(StreamHandle handle, DevicePointer address, uint32_t value, unsigned int flags) {
  const Lock lock(state().mutex);
  if (const Result result = enter("cuStreamWaitValue32")) return result;
  const StreamHandle stream = resolve(handle);
  if (stream == nullptr) return kBadHandle;
  if (flags != 0 || shadow(address, sizeof value) == nullptr) return kBadValue;
  submit(stream, Work{.after = {}, .run = [=](Lock& running) {
                        state().changed.wait(running, [&] {
                          uint32_t now = value;
                          if (const std::byte* bytes = shadow(address, sizeof now)) std::memcpy(&now, bytes, sizeof now);
                          return static_cast<int32_t>(now - value) >= 0;
                        });
                      }});
  return kOk;
}

// Steering and inspection. None waits for a stream.

// The next call of `what` (a name of cuda.h), or the next copy that runs ("async"), fails with `code`; 0: that one goes well. Plans queue
// up.
void fake_cuda_fail_next(const char* what, Result code) {
  const Lock lock(state().mutex);
  state().failures[what].push_back(code);
}

// Copies stop half-way until it is undone.
void fake_cuda_hold(int held) {
  const Lock lock(state().mutex);
  state().held = held != 0;
  state().changed.notify_all();
}

// Each copy takes that much longer.
void fake_cuda_set_delay_us(int64_t delay) {
  const Lock lock(state().mutex);
  state().delay = std::chrono::microseconds(delay);
}

void fake_cuda_set_devices(int count) {
  const Lock lock(state().mutex);
  state().num_devices = count;
}

// Forgets planned failures, sticky errors, delay and hold, and shows one device.
void fake_cuda_reset() {
  const Lock lock(state().mutex);
  state().failures.clear();
  for (auto& [device, context] : state().contexts) context.sticky = kOk;
  state().held = false;
  state().delay = {};
  state().num_devices = 1;
  state().changed.notify_all();
}

// Copies between ordinary memory and a device address, now. 0: done.
int fake_cuda_write(DevicePointer address, const void* data, size_t num_bytes) {
  const Lock lock(state().mutex);
  std::byte* bytes = shadow(address, num_bytes);
  if (bytes == nullptr) return 1;
  std::memcpy(bytes, data, num_bytes);
  state().changed.notify_all();
  return 0;
}
int fake_cuda_read(DevicePointer address, void* data, size_t num_bytes) {
  const Lock lock(state().mutex);
  const std::byte* bytes = shadow(address, num_bytes);
  if (bytes == nullptr) return 1;
  std::memcpy(data, bytes, num_bytes);
  return 0;
}

// Of what is alive: live_streams, live_events, live_allocations, registered_ranges, registered_bytes, retained_contexts, unfinished
// (streams with work left); of what happened: bytes_to_host, bytes_to_device. -1 for a name that is none of these.
int64_t fake_cuda_count(const char* name) {
  const Lock lock(state().mutex);
  const std::string what = name;
  int64_t sum = 0;
  if (what == "live_allocations") return static_cast<int64_t>(state().allocations.size());
  if (what == "registered_ranges") return static_cast<int64_t>(state().registered.size());
  if (what == "registered_bytes") {
    for (const auto& [address, length] : state().registered) sum += static_cast<int64_t>(length);
    return sum;
  }
  if (what == "retained_contexts") {
    for (const auto& [device, context] : state().contexts) sum += context.num_retains;
    return sum;
  }
  if (what == "unfinished") {
    for (const auto& [device, context] : state().contexts) {
      for (const StreamHandle stream : context.streams) sum += stream->tail->done ? 0 : 1;
      sum += context.legacy != nullptr && !context.legacy->tail->done ? 1 : 0;
    }
    return sum;
  }
  if (what == "live_streams" || what == "live_events" || what == "bytes_to_host" || what == "bytes_to_device") return state().counts[what];
  return -1;
}

}  // extern "C"

// The functions have the types under which areal_hpc looks them up.
#define FAKE_CUDA_CHECK(member, name, symbol, ...) \
  static_assert(std::is_same_v<decltype(&symbol), decltype(areal_hpc::cuda::Driver::member)>);
AREAL_HPC_CUDA_FUNCTIONS(FAKE_CUDA_CHECK)
