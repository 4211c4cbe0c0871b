// The CUDA driver, opened at run time, and copies between a lane's shared memory and a device.
//
// Nothing here needs the toolkit: the few functions are declared below and found by name in libcuda.so.1 (AREAL_HPC_CUDA_DRIVER names
// another library), so one build serves login, CPU and GPU nodes; where the driver is missing, CudaUnavailable says so. With
// AREAL_HPC_CUDA_HEADERS defined the declarations are checked against the real <cuda.h> at the end of this file.
//
// A copy runs on a side stream of its own: it begins behind what the streams named with it have queued, an event ends it, and nobody may
// use the host bytes (publish the slot, release the record) before that event. transport/cuda.py sees to it.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// Opaque, under the names of cuda.h.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;

namespace areal_hpc::cuda {

// cuda.h's enumerations are passed as the unsigned int that they are.
using Result = unsigned int;
using DeviceHandle = int;
using DevicePointer = unsigned long long;
using ContextHandle = CUctx_st*;
using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;

inline constexpr Result kSuccess = 0, kInvalidValue = 1, kNotReady = 600, kHostMemoryAlreadyRegistered = 712;
inline constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostRegisterPortable = 1;
inline constexpr unsigned kAttributeMemoryType = 2, kAttributeDeviceOrdinal = 9, kMemoryTypeHost = 1, kMemoryTypeDevice = 2;

// X(member, name in cuda.h, symbol in the library, parameters...); each returns a Result. A symbol may be a later version of the name.
#define AREAL_HPC_CUDA_FUNCTIONS(X)                                                                               \
  X(init, cuInit, cuInit, unsigned int)                                                                           \
  X(driver_get_version, cuDriverGetVersion, cuDriverGetVersion, int*)                                             \
  X(get_error_name, cuGetErrorName, cuGetErrorName, Result, const char**)                                         \
  X(get_error_string, cuGetErrorString, cuGetErrorString, Result, const char**)                                   \
  X(device_get_count, cuDeviceGetCount, cuDeviceGetCount, int*)                                                   \
  X(device_get, cuDeviceGet, cuDeviceGet, DeviceHandle*, int)                                                     \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, ContextHandle*, DeviceHandle)         \
  X(primary_ctx_release, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, DeviceHandle)                   \
  X(ctx_get_current, cuCtxGetCurrent, cuCtxGetCurrent, ContextHandle*)                                            \
  X(ctx_get_device, cuCtxGetDevice, cuCtxGetDevice, DeviceHandle*)                                                \
  X(ctx_push_current, cuCtxPushCurrent, cuCtxPushCurrent_v2, ContextHandle)                                       \
  X(ctx_pop_current, cuCtxPopCurrent, cuCtxPopCurrent_v2, ContextHandle*)                                         \
  X(mem_host_register, cuMemHostRegister, cuMemHostRegister_v2, void*, size_t, unsigned int)                      \
  X(mem_host_unregister, cuMemHostUnregister, cuMemHostUnregister, void*)                                         \
  X(memcpy_htod_async, cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, DevicePointer, const void*, size_t, StreamHandle) \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, void*, DevicePointer, size_t, StreamHandle)       \
  X(pointer_get_attribute, cuPointerGetAttribute, cuPointerGetAttribute, void*, unsigned int, DevicePointer)      \
  X(stream_create, cuStreamCreate, cuStreamCreate, StreamHandle*, unsigned int)                                   \
  X(stream_destroy, cuStreamDestroy, cuStreamDestroy_v2, StreamHandle)                                            \
  X(stream_query, cuStreamQuery, cuStreamQuery, StreamHandle)                                                     \
  X(stream_wait_event, cuStreamWaitEvent, cuStreamWaitEvent, StreamHandle, EventHandle, unsigned int)             \
  X(event_create, cuEventCreate, cuEventCreate, EventHandle*, unsigned int)                                       \
  X(event_destroy, cuEventDestroy, cuEventDestroy_v2, EventHandle)                                                \
  X(event_record, cuEventRecord, cuEventRecord, EventHandle, StreamHandle)                                        \
  X(event_query, cuEventQuery, cuEventQuery, EventHandle)

struct CudaUnavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CudaError : std::runtime_error {
  CudaError(std::string call_, std::string name_, std::string text_)
      : std::runtime_error(call_ + ": " + name_ + " (" + text_ + ")"),
        call(std::move(call_)),
        name(std::move(name_)),
        text(std::move(text_)) {}
  std::string call, name, text;  // of the driver's function, error and description
};

// A loaded and initialised driver. It stays loaded: no driver promises to survive dlclose.
class Driver {
 public:
#define AREAL_HPC_CUDA_MEMBER(member, name, symbol, ...) Result (*member)(__VA_ARGS__) = nullptr;
  AREAL_HPC_CUDA_FUNCTIONS(AREAL_HPC_CUDA_MEMBER)
#undef AREAL_HPC_CUDA_MEMBER

  // Throws CudaUnavailable, which says why in one sentence. A failure is not remembered: the next call tries again.
  static Driver& get() {
    static std::mutex mutex;
    static std::map<std::string, std::unique_ptr<Driver>>& drivers = *new std::map<std::string, std::unique_ptr<Driver>>;
    const char* chosen = std::getenv("AREAL_HPC_CUDA_DRIVER");
    const std::string path = chosen != nullptr && *chosen != '\0' ? chosen : "libcuda.so.1";
    const std::lock_guard lock(mutex);
    std::unique_ptr<Driver>& driver = drivers[path];
    if (!driver) driver.reset(new Driver(path));
    driver->find_devices();
    return *driver;
  }

  int num_devices() const { return num_devices_; }

  // "13.0"
  std::string version() const {
    int number = 0;
    check(driver_get_version(&number), "cuDriverGetVersion");
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  }

  CudaError error(Result result, const char* call) const {
    const char *name = nullptr, *text = nullptr;
    if (get_error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
    if (get_error_string(result, &text) != kSuccess || text == nullptr) text = "no description";
    return {call, name == std::string("unknown error") ? "error " + std::to_string(result) : name, text};
  }
  void check(Result result, const char* call) const {
    if (result != kSuccess) throw error(result, call);
  }

  // Registers host memory for DMA by every device of this process, once for all who ask; a context must be current.
  void acquire_host(uint64_t address, uint64_t num_bytes) {
    const std::lock_guard lock(ranges_mutex_);
    if (const auto found = ranges_.find(address); found != ranges_.end()) {
      if (found->second.num_bytes != num_bytes) throw std::invalid_argument("host memory at that address is registered with another size");
      ++found->second.num_users;
      return;
    }
    const Result result = mem_host_register(reinterpret_cast<void*>(address), num_bytes, kHostRegisterPortable);
    const bool foreign = result == kHostMemoryAlreadyRegistered;  // by other code of this process, which will unregister it
    if (!foreign) check(result, "cuMemHostRegister");
    ranges_[address] = {num_bytes, 1, foreign};
  }
  Result release_host(uint64_t address) {
    const std::lock_guard lock(ranges_mutex_);
    const auto found = ranges_.find(address);
    if (found == ranges_.end() || --found->second.num_users > 0) return kSuccess;
    const bool foreign = found->second.foreign;
    ranges_.erase(found);
    return foreign ? kSuccess : mem_host_unregister(reinterpret_cast<void*>(address));
  }

 private:
  explicit Driver(const std::string& path) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw CudaUnavailable(::dlerror());
    const auto find = [&](const char* symbol) {
      if (void* address = ::dlsym(library, symbol)) return address;
      throw CudaUnavailable(path + " has no function " + symbol + ": it is no CUDA driver, or too old a one");
    };
#define AREAL_HPC_CUDA_FIND(member, name, symbol, ...) member = reinterpret_cast<Result (*)(__VA_ARGS__)>(find(#symbol));
    AREAL_HPC_CUDA_FUNCTIONS(AREAL_HPC_CUDA_FIND)
#undef AREAL_HPC_CUDA_FIND
  }

  void find_devices() {
    try {
      check(init(0), "cuInit");
      check(device_get_count(&num_devices_), "cuDeviceGetCount");
    } catch (const CudaError& e) {
      throw CudaUnavailable(e.what());
    }
    if (num_devices_ == 0) throw CudaUnavailable("the CUDA driver is there, but shows this process no device");
  }

  struct Range {
    uint64_t num_bytes = 0;
    int num_users = 0;
    bool foreign = false;
  };
  std::mutex ranges_mutex_;
  std::map<uint64_t, Range> ranges_;
  int num_devices_ = 0;
};

// "available: 1 device, driver 13.0" or "absent: " and why.
inline std::string status() {
  try {
    const Driver& driver = Driver::get();
    const int count = driver.num_devices();
    return "available: " + std::to_string(count) + (count == 1 ? " device" : " devices") + ", driver " + driver.version();
  } catch (const std::runtime_error& e) {
    return std::string("absent: ") + e.what();
  }
}

class Copy;

// One device of this process and the side stream on which its copies run. The calling thread's current context is used if it is of that
// device (so whatever made it, torch for one, shares memory and streams with us), else the device's primary context.
class Device : public std::enable_shared_from_this<Device> {
 public:
  struct Piece {
    uint64_t host, device, num_bytes;
  };

  explicit Device(int ordinal) : driver_(Driver::get()) {
    if (ordinal < 0 || ordinal >= driver_.num_devices()) {
      throw CudaUnavailable("device " + std::to_string(ordinal) + " does not exist: the driver shows this process " +
                            std::to_string(driver_.num_devices()));
    }
    driver_.check(driver_.device_get(&device_, ordinal), "cuDeviceGet");
    driver_.check(driver_.ctx_get_current(&context_), "cuCtxGetCurrent");
    DeviceHandle current = -1;
    if (context_ == nullptr || driver_.ctx_get_device(&current) != kSuccess || current != device_) {
      driver_.check(driver_.primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
      retained_ = true;
    }
    try {
      const Current context(*this);
      context.check();
      driver_.check(driver_.stream_create(&stream_, kStreamNonBlocking), "cuStreamCreate");
    } catch (...) {
      release_context();
      throw;
    }
  }
  ~Device() {
    close();
    release_context();
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  uint64_t stream() const { return reinterpret_cast<uint64_t>(stream_); }

  void register_host(uint64_t address, uint64_t num_bytes) {
    const Current context(*this);
    context.check();
    driver_.acquire_host(address, num_bytes);
    registered_.push_back(address);
  }

  // (memory type of cuda.h or 0 for memory the driver does not know, ordinal of its device)
  std::pair<unsigned, int> pointer(uint64_t address) const {
    const Current context(*this);
    context.check();
    unsigned type = 0;
    int ordinal = -1;
    const Result result = driver_.pointer_get_attribute(&type, kAttributeMemoryType, address);
    if (result == kInvalidValue || (result == kSuccess && type == 0)) return {0, -1};
    driver_.check(result, "cuPointerGetAttribute");
    driver_.check(driver_.pointer_get_attribute(&ordinal, kAttributeDeviceOrdinal, address), "cuPointerGetAttribute");
    return {type, ordinal};
  }

  // Unregisters one range; the caller has waited for its copies.
  void unregister_host(uint64_t address) {
    const Current context(*this);
    context.check();
    const auto found = std::find(registered_.begin(), registered_.end(), address);
    if (found == registered_.end()) return;
    registered_.erase(found);
    driver_.check(driver_.release_host(address), "cuMemHostUnregister");
  }

  // Queues the pieces behind what `streams` have queued so far; what is queued there later waits for the copy. Throws if nothing was
  // queued; whatever goes wrong afterwards is told by the Copy, once what was queued has ended.
  std::shared_ptr<Copy> copy(bool to_host, const std::vector<Piece>& pieces, const std::vector<uint64_t>& streams);

  // The caller has waited for its copies. Gives back stream and registrations; nothing when closed before. Failures cost nothing here: they
  // are those of a driver that is gone, or of an error that every earlier call has reported.
  void close() {
    if (stream_ == nullptr) return;
    const Current context(*this);
    driver_.stream_destroy(std::exchange(stream_, nullptr));
    for (const uint64_t address : std::exchange(registered_, {})) driver_.release_host(address);
  }

 private:
  friend class Copy;

  // This device's context is the calling thread's for as long as this lives, unless `result` says why not.
  class Current {
   public:
    explicit Current(const Device& device) : result(device.driver_.ctx_push_current(device.context_)), driver_(device.driver_) {}
    ~Current() {
      ContextHandle popped;
      if (result == kSuccess) driver_.ctx_pop_current(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    void check() const { driver_.check(result, "cuCtxPushCurrent"); }
    const Result result;

   private:
    const Driver& driver_;
  };

  void release_context() {
    if (std::exchange(retained_, false)) driver_.primary_ctx_release(device_);
  }

  Driver& driver_;
  DeviceHandle device_ = -1;
  ContextHandle context_ = nullptr;
  StreamHandle stream_ = nullptr;
  std::vector<uint64_t> registered_;
  bool retained_ = false;
};

// Bytes on their way. Threads may share it.
class Copy {
 public:
  Copy(std::shared_ptr<Device> device, EventHandle event, uint64_t num_bytes)
      : device_(std::move(device)), event_(event), num_bytes_(num_bytes) {}
  ~Copy() { destroy_event(); }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  uint64_t num_bytes() const { return num_bytes_; }

  // Whether the device is done with the bytes, well or badly.
  bool ended() {
    const std::lock_guard lock(mutex_);
    if (ended_) return true;
    const Driver& driver = device_->driver_;
    const Device::Current context(*device_);
    Result result = context.result;
    const char* call = "cuCtxPushCurrent";
    if (result == kSuccess) {
      // Where no event could be recorded, the stream itself has to be empty.
      call = event_recorded_ ? "cuEventQuery" : "cuStreamQuery";
      result = event_recorded_ ? driver.event_query(event_) : driver.stream_query(device_->stream_);
    }
    if (result == kNotReady) return false;
    ended_ = true;
    if (result != kSuccess) fail(result, call);
    destroy_event();
    return true;
  }

  // Waits until it has ended; false: not within `timeout_s`. Polls, because the driver's own wait has no deadline.
  bool wait(double timeout_s) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const auto deadline =
        start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e9)));
    for (;;) {
      if (ended()) return true;
      const auto now = Clock::now();
      if (now >= deadline) return ended();
      const auto waited = now - start;
      if (waited < std::chrono::microseconds(50)) continue;  // a few kilobytes take about that long
      const auto nap = std::min<Clock::duration>(waited / 8, std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::min<Clock::duration>(nap, deadline - now));
    }
  }

  // Of a copy that has failed so far, even if some of it is still under way.
  bool failed() const {
    const std::lock_guard lock(mutex_);
    return error_ != kSuccess;
  }
  void check() const {
    const std::lock_guard lock(mutex_);
    device_->driver_.check(error_, error_call_);
  }

 private:
  friend class Device;

  void fail(Result result, const char* call) {
    if (error_ != kSuccess) return;  // the first one tells most
    error_ = result;
    error_call_ = call;
  }
  void destroy_event() {
    if (event_ == nullptr) return;
    const Device::Current context(*device_);
    device_->driver_.event_destroy(std::exchange(event_, nullptr));
  }

  std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  EventHandle event_;
  uint64_t num_bytes_;
  bool event_recorded_ = false, ended_ = false;
  Result error_ = kSuccess;
  const char* error_call_ = "";
};

inline std::shared_ptr<Copy> Device::copy(bool to_host, const std::vector<Piece>& pieces, const std::vector<uint64_t>& streams) {
  if (stream_ == nullptr) throw std::logic_error("the device copier is closed");
  const Current context(*this);
  context.check();
  uint64_t num_bytes = 0;
  for (const Piece& piece : pieces) num_bytes += piece.num_bytes;
  EventHandle event = nullptr;
  driver_.check(driver_.event_create(&event, kEventDisableTiming), "cuEventCreate");
  const auto copy = std::make_shared<Copy>(shared_from_this(), event, num_bytes);
  for (const uint64_t handle : streams) {  // the event may be recorded anew: a wait keeps what it saw
    driver_.check(driver_.event_record(event, reinterpret_cast<StreamHandle>(handle)), "cuEventRecord");
    driver_.check(driver_.stream_wait_event(stream_, event, 0), "cuStreamWaitEvent");
  }
  for (const Piece& piece : pieces) {
    void* const host = reinterpret_cast<void*>(piece.host);
    const Result result = to_host ? driver_.memcpy_dtoh_async(host, piece.device, piece.num_bytes, stream_)
                                  : driver_.memcpy_htod_async(piece.device, host, piece.num_bytes, stream_);
    if (result != kSuccess) {
      copy->fail(result, to_host ? "cuMemcpyDtoHAsync" : "cuMemcpyHtoDAsync");
      break;
    }
  }
  if (const Result result = driver_.event_record(event, stream_); result != kSuccess) {
    copy->fail(result, "cuEventRecord");
    return copy;
  }
  copy->event_recorded_ = true;
  for (const uint64_t handle : streams) {
    const Result result = driver_.stream_wait_event(reinterpret_cast<StreamHandle>(handle), event, 0);
    if (result != kSuccess) copy->fail(result, "cuStreamWaitEvent");
  }
  return copy;
}

}  // namespace areal_hpc::cuda

#ifdef AREAL_HPC_CUDA_HEADERS
#include <cuda.h>

#include <string_view>
#include <type_traits>

// cuda.h renames functions by macros (cuMemHostRegister is cuMemHostRegister_v2): the name, expanded, must be the symbol looked up above.
#define AREAL_HPC_CUDA_TEXT_OF(text) #text
#define AREAL_HPC_CUDA_TEXT(name) AREAL_HPC_CUDA_TEXT_OF(name)
#define AREAL_HPC_CUDA_CHECK(member, name, symbol, ...)                                                               \
  static_assert(std::is_same_v<Plain<decltype(&::name)>::type, decltype(Driver::member)>, "declaration of " #symbol); \
  static_assert(std::string_view(AREAL_HPC_CUDA_TEXT(name)) == #symbol, "symbol of " #symbol);

namespace areal_hpc::cuda::headers {

template <class T, bool = std::is_enum_v<T>>
struct Number {
  using type = T;
};
template <class T>
struct Number<T, true> {
  using type = std::underlying_type_t<T>;
};
template <class T>
struct Plain;  // the function with numbers for enumerations
template <class R, class... A>
struct Plain<R (*)(A...)> {
  using type = typename Number<R>::type (*)(typename Number<A>::type...);
};

AREAL_HPC_CUDA_FUNCTIONS(AREAL_HPC_CUDA_CHECK)
static_assert(std::is_same_v<CUcontext, ContextHandle> && std::is_same_v<CUstream, StreamHandle> && std::is_same_v<CUevent, EventHandle>);
static_assert(kSuccess == CUDA_SUCCESS && kInvalidValue == CUDA_ERROR_INVALID_VALUE && kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kHostMemoryAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING && kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kAttributeMemoryType == CU_POINTER_ATTRIBUTE_MEMORY_TYPE && kAttributeDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(kMemoryTypeHost == CU_MEMORYTYPE_HOST && kMemoryTypeDevice == CU_MEMORYTYPE_DEVICE);

}  // namespace areal_hpc::cuda::headers
#undef AREAL_HPC_CUDA_CHECK
#undef AREAL_HPC_CUDA_TEXT
#undef AREAL_HPC_CUDA_TEXT_OF
#endif
