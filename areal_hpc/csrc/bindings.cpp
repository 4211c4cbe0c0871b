// areal_hpc._ring: the ring and crc32c for Python; transport/ring.py adds deadlines. Every wait, and every copy or sum that takes longer
// than a switch of threads, runs without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <exception>

#include "ring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace areal_hpc {
namespace {

using ReadOnlyView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using WritableView = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// Bytes that are summed or copied in about a microsecond: fewer are not worth two switches of the GIL.
constexpr uint64_t kShort = 16 << 10;

template <class Work>
auto without_gil_if_long(uint64_t num_bytes, Work work) {
  if (num_bytes < kShort) return work();
  const nb::gil_scoped_release no_gil;
  return work();
}

// A contiguous buffer that somebody lends us.
class Borrowed {
 public:
  explicit Borrowed(nb::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Borrowed() { PyBuffer_Release(&view_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  void* data() const { return view_.buf; }
  size_t num_bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// numpy.frombuffer(owner, uint8): a view that keeps its owner.
nb::object numpy_view(nb::handle owner) {
  static PyObject* const from_buffer = nb::object(nb::module_::import_("numpy").attr("frombuffer")).release().ptr();
  static PyObject* const uint8 = nb::object(nb::module_::import_("numpy").attr("uint8")).release().ptr();
  PyObject* const arguments[] = {owner.ptr(), uint8};
  PyObject* view = PyObject_Vectorcall(from_buffer, arguments, 2, nullptr);
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

// A leased record. Views own it, so a record that is dropped without release() gives its space back only when the last view is gone.
class Record {
 public:
  Record(nb::object owner, Consumer& consumer, const RecordView& view) : owner_(std::move(owner)), consumer_(consumer), view_(view) {}
  ~Record() {
    if (!released_) consumer_.release(view_.lease);
  }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  const RecordHeader& header() const { return view_.header; }
  const uint8_t* payload() const {
    if (released_)
      throw RingError("the record of ticket " + std::to_string(header().ticket) + " has been released: its bytes belong to the producer");
    return reinterpret_cast<const uint8_t*>(view_.payload);
  }
  uint64_t end() const { return view_.end; }
  bool released() const { return released_; }
  void release() {
    if (released_) throw RingError("the record of ticket " + std::to_string(header().ticket) + " was released before");
    released_ = true;
    consumer_.release(view_.lease);
  }

 private:
  nb::object owner_;  // of consumer_
  Consumer& consumer_;
  RecordView view_;
  bool released_ = false;
};

// Space for one record. Until it is committed or aborted.
class Slot {
 public:
  Slot(nb::object owner, Producer& producer, std::byte* memory, uint64_t num_bytes)
      : owner_(std::move(owner)), producer_(producer), memory_(memory), num_bytes_(num_bytes) {}
  ~Slot() { abort(); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;

  uint64_t num_bytes() const { return num_bytes_; }
  std::byte* memory() const {
    if (memory_ == nullptr) throw RingError("the slot has been committed or aborted: its bytes are no longer the producer's");
    return memory_;
  }
  uint64_t commit(const RecordFields& fields) {
    memory();
    const uint64_t seq = without_gil_if_long(num_bytes_, [&] { return producer_.commit(fields); });
    memory_ = nullptr;
    return seq;
  }
  void commit_frame() {
    memory();
    producer_.commit_frame();
    memory_ = nullptr;
  }
  void abort() {
    if (memory_ == nullptr) return;
    memory_ = nullptr;
    producer_.abort();
  }

 private:
  nb::object owner_;  // of producer_
  Producer& producer_;
  std::byte* memory_;
  uint64_t num_bytes_;
};

template <class Lent>
int lend(PyObject* self, Py_buffer* view, int flags) noexcept {
  try {
    auto& lent = *nb::inst_ptr<Lent>(nb::handle(self));
    if constexpr (std::is_same_v<Lent, Record>)
      return PyBuffer_FillInfo(view, self, const_cast<uint8_t*>(lent.payload()), static_cast<Py_ssize_t>(lent.header().payload_bytes), 1,
                               flags);
    else
      return PyBuffer_FillInfo(view, self, lent.memory(), static_cast<Py_ssize_t>(lent.num_bytes()), 0, flags);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_BufferError, error.what());
    view->obj = nullptr;
    return -1;
  }
}

template <class Lent>
PyType_Slot lends_buffer[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&lend<Lent>)}, {0, nullptr}};

nb::object try_peek(nb::handle_t<Consumer> self) {
  auto& consumer = nb::cast<Consumer&>(self);
  const std::optional<RecordView> view = without_gil_if_long(consumer.num_unseen_bytes(), [&] { return consumer.try_peek(); });
  if (!view) return nb::none();
  nb::object record = nb::inst_alloc(nb::type<Record>());
  new (nb::inst_ptr<Record>(record)) Record(nb::borrow(self), consumer, *view);
  nb::inst_mark_ready(record);
  return record;
}

// (ticket, payload copied) of the oldest record, which is given back; payload None: a marker.
nb::object try_pop(nb::handle_t<Consumer> self) {
  auto& consumer = nb::cast<Consumer&>(self);
  const std::optional<RecordView> view = without_gil_if_long(consumer.num_unseen_bytes(), [&] { return consumer.try_peek(); });
  if (!view) return nb::none();
  nb::object payload = nb::none();
  if (view->header.kind == Kind::kData) payload = nb::steal(PyBytes_FromStringAndSize(nullptr, view->header.payload_bytes));
  if (payload.is_valid() && !payload.is_none())
    without_gil_if_long(view->header.payload_bytes,
                        [&] { std::memcpy(PyBytes_AS_STRING(payload.ptr()), view->payload, view->header.payload_bytes); });
  consumer.release(view->lease);
  if (!payload.is_valid()) throw nb::python_error();
  return nb::make_tuple(view->header.ticket, payload);
}

nb::object make_slot(nb::handle self, Producer& producer, std::byte* memory, uint64_t num_bytes) {
  if (memory == nullptr) return nb::none();
  nb::object slot = nb::inst_alloc(nb::type<Slot>());
  new (nb::inst_ptr<Slot>(slot)) Slot(nb::borrow(self), producer, memory, num_bytes);
  nb::inst_mark_ready(slot);
  return slot;
}

// Copies and sums block by block, so that the sum finds its bytes in the cache.
uint32_t copy_and_sum(std::byte* target, const std::byte* source, uint64_t num_bytes) {
  uint32_t sum = 0;
  for (uint64_t done = 0; done < num_bytes;) {
    const uint64_t block = std::min(num_bytes - done, kShort);
    std::memcpy(target + done, source + done, block);
    sum = crc32c(target + done, block, sum);
    done += block;
  }
  return sum;
}

// Copies `data` into a record; none if the lane is full.
std::optional<uint64_t> try_push(Producer& producer, nb::handle data, const RecordFields& fields) {
  const Borrowed source(data);
  std::byte* slot = producer.try_reserve(source.num_bytes());
  if (slot == nullptr) return std::nullopt;
  return without_gil_if_long(source.num_bytes(), [&] {
    std::optional<uint32_t> sum;
    if (producer.checksum())
      sum = copy_and_sum(slot, static_cast<const std::byte*>(source.data()), source.num_bytes());
    else
      std::memcpy(slot, source.data(), source.num_bytes());
    return producer.commit(fields, Kind::kData, sum);
  });
}

void copy_to(const Record& record, nb::handle target) {
  const Borrowed buffer(target, PyBUF_WRITABLE);
  const uint64_t num_bytes = record.header().payload_bytes;
  const uint8_t* payload = record.payload();
  if (buffer.num_bytes() != num_bytes)
    throw std::invalid_argument("a payload of " + std::to_string(num_bytes) + " bytes does not fill a buffer of " +
                                std::to_string(buffer.num_bytes()));
  without_gil_if_long(num_bytes, [&] { std::memcpy(buffer.data(), payload, num_bytes); });
}

uint32_t crc32c_of_buffer(nb::handle object, uint32_t seed) {
  const Borrowed buffer(object);
  return without_gil_if_long(buffer.num_bytes(), [&] { return crc32c(buffer.data(), buffer.num_bytes(), seed); });
}

nb::dict counters(const Consumer& consumer) {
  const ConsumerCounters c = consumer.counters();
  const LaneHeader& header = consumer.segment()->header();
  const auto read = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  nb::dict d;
  d["records"] = c.records;
  d["bytes"] = c.bytes;
  d["markers"] = c.markers;
  d["checksum_errors"] = c.checksum_errors;
  d["empty_waits"] = c.empty_waits;
  d["empty_wait_s"] = static_cast<double>(c.empty_wait_ns) * 1e-9;
  d["full_waits"] = read(header.full_waits);
  d["full_wait_s"] = ring_detail::full_wait_s(header);
  d["high_water_bytes"] = read(header.high_water_bytes);
  return d;
}

// Seconds since the producer last touched the lane; infinite before the first time.
double heartbeat_age_s(const Consumer& consumer) {
  const uint64_t then = consumer.segment()->header().heartbeat_ns.load(std::memory_order_relaxed), now = monotonic_ns();
  if (then == 0) return std::numeric_limits<double>::infinity();
  return now > then ? static_cast<double>(now - then) * 1e-9 : 0.0;
}

void define_errors(nb::module_& m) {
  const auto ring_error = nb::exception<RingError>(m, "RingError", PyExc_RuntimeError);
  nb::exception<LaneClosed>(m, "LaneClosed", ring_error.ptr());
  nb::exception<LaneBusy>(m, "LaneBusy", ring_error.ptr());
  nb::exception<LaneMismatch>(m, "LaneMismatch", ring_error.ptr());
  const auto checksum_error = nb::exception<ChecksumError>(m, "ChecksumError", ring_error.ptr());
  nb::exception<LaneCorrupt>(m, "LaneCorrupt", checksum_error.ptr());
  nb::exception<RecordTooLarge>(m, "RecordTooLarge", PyExc_ValueError);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {  // OSError picks its subclass by the number
      const nb::object arguments = nb::make_tuple(e.code().value(), e.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
}

void define_segment(nb::module_& m) {
  nb::class_<Segment>(m, "Segment");
  m.def(
      "make_lane",
      [](const std::string& name, uint64_t capacity_bytes, uint32_t lane, uint64_t job_id, uint64_t restart_id, bool checksum) {
        return create_lane(name, capacity_bytes, LaneOptions{lane, job_id, restart_id, checksum});
      },
      "name"_a, "capacity_bytes"_a, nb::kw_only(), "lane"_a, "job_id"_a, "restart_id"_a, "checksum"_a,
      nb::call_guard<nb::gil_scoped_release>());
  // (segment, "") or (None, why the lane cannot be opened yet).
  m.def(
      "try_open",
      [](const std::string& name, uint64_t job_id, uint64_t restart_id) {
        std::string reason;
        std::shared_ptr<Segment> segment = open_lane(name, job_id, restart_id, reason);
        return std::make_pair(segment, reason);
      },
      "name"_a, nb::kw_only(), "job_id"_a, "restart_id"_a);
}

std::pair<uint64_t, uint64_t> extent(const Segment& segment) {
  return {reinterpret_cast<uint64_t>(&segment.header()), segment.num_bytes()};
}

void define_record(nb::module_& m) {
  nb::class_<Record>(m, "Record", nb::type_slots(lends_buffer<Record>))
      .def_prop_ro("kind", [](const Record& r) { return r.header().kind == Kind::kMarker ? "marker" : "data"; })
      .def_prop_ro("num_bytes", [](const Record& r) { return r.header().payload_bytes; })
      .def_prop_ro("lane", [](const Record& r) { return r.header().lane; })
      .def_prop_ro("incarnation", [](const Record& r) { return r.header().incarnation; })
      .def_prop_ro("seq", [](const Record& r) { return r.header().seq; })
      .def_prop_ro("ticket", [](const Record& r) { return r.header().ticket; })
      .def_prop_ro("version_min", [](const Record& r) { return r.header().version_min; })
      .def_prop_ro("version_max", [](const Record& r) { return r.header().version_max; })
      .def_prop_ro("num_tokens", [](const Record& r) { return r.header().num_tokens; })
      .def_prop_ro("num_samples", [](const Record& r) { return r.header().num_samples; })
      .def_prop_ro("commit_time_s", [](const Record& r) { return r.header().commit_time_s; })
      .def_prop_ro("header", [](const Record& r) { return nb::bytes(reinterpret_cast<const char*>(&r.header()), sizeof(RecordHeader)); })
      .def_prop_ro("buffer", [](nb::handle self) { return numpy_view(self); })
      .def_prop_ro("frame",
                   [](nb::handle_t<Record> self) {
                     const auto& record = nb::cast<const Record&>(self);
                     return ReadOnlyView(record.payload() - kAlignment, {kAlignment + record.header().payload_bytes}, self);
                   })
      .def_prop_ro("address", [](const Record& r) { return reinterpret_cast<uint64_t>(r.payload()); })
      .def_prop_ro("end_position", &Record::end)
      .def_prop_ro("released", &Record::released)
      .def("copy_to", &copy_to, "target"_a)
      .def("release", &Record::release)
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__",
           [](Record& r, nb::args) {
             if (!r.released()) r.release();
           })
      .def("__repr__", [](const Record& r) {
        const RecordHeader& h = r.header();
        return "<Record lane " + std::to_string(h.lane) + " seq " + std::to_string(h.seq) + ": " +
               (h.kind == Kind::kMarker ? "marker " : "ticket ") + std::to_string(h.ticket) + ", " + std::to_string(h.payload_bytes) +
               " bytes>";
      });
}

void define_slot(nb::module_& m) {
  nb::class_<Slot>(m, "Slot", nb::type_slots(lends_buffer<Slot>))
      .def_prop_ro("num_bytes", &Slot::num_bytes)
      .def_prop_ro("buffer",
                   [](nb::handle_t<Slot> self) {
                     nb::cast<Slot&>(self).memory();
                     return numpy_view(self);
                   })
      .def_prop_ro("address", [](const Slot& slot) { return reinterpret_cast<uint64_t>(slot.memory()); })
      .def(
          "commit",
          [](Slot& slot, int64_t ticket, int32_t version_min, int32_t version_max, uint32_t num_tokens, uint32_t num_samples) {
            return slot.commit({ticket, version_min, version_max, num_tokens, num_samples});
          },
          nb::kw_only(), "ticket"_a, "version_min"_a, "version_max"_a, "num_tokens"_a, "num_samples"_a)
      .def("commit_frame", &Slot::commit_frame)
      .def("abort", &Slot::abort)
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](Slot& slot, nb::args) { slot.abort(); });
}

void define_consumer(nb::module_& m) {
  nb::class_<Consumer>(m, "Consumer")
      .def(nb::init<std::string, std::shared_ptr<Segment>, bool>(), "name"_a, "segment"_a, "poison"_a)
      .def_prop_ro("lane", &Consumer::lane)
      .def_prop_ro("capacity_bytes", &Consumer::capacity_bytes)
      .def_prop_ro("used_bytes", &Consumer::used_bytes)
      .def_prop_ro("head_position", &Consumer::head_position)
      .def_prop_ro("tail_position", &Consumer::tail_position)
      .def_prop_ro("num_leased", &Consumer::num_leased)
      .def_prop_ro("heartbeat_age_s", &heartbeat_age_s)
      .def_prop_ro("segment", [](const Consumer& c) { return extent(*c.segment()); })
      .def("try_peek", &try_peek)
      .def("try_pop", &try_pop)
      .def("wait_for_record", &Consumer::wait_for_record, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("producer_state",
           [](const Consumer& c) {
             constexpr const char* names[] = {"unattached", "alive", "dead", "closed"};
             return names[static_cast<int>(c.producer_state())];
           })
      .def(
          "dead_producer",
          [](Consumer& c, bool now) -> nb::object {
            const std::optional<DeadProducer> dead = c.dead_producer(now);
            if (!dead) return nb::none();
            return nb::make_tuple(dead->tag >> 32, dead->tickets, dead->num_untracked);
          },
          "now"_a = false)
      .def("counters", &counters)
      .def("unlink", &Consumer::unlink)
      .def("close", &Consumer::close);
}

void define_producer(nb::module_& m) {
  nb::class_<Producer>(m, "Producer")
      .def(nb::init<std::shared_ptr<Segment>>(), "segment"_a)
      .def_prop_ro("lane", &Producer::lane)
      .def_prop_ro("incarnation", &Producer::incarnation)
      .def_prop_ro("capacity_bytes", &Producer::capacity_bytes)
      .def_prop_ro("max_record_bytes", &Producer::max_record_bytes)
      .def_prop_ro("used_bytes", &Producer::used_bytes)
      .def_prop_ro("num_committed", &Producer::num_committed)
      .def_prop_ro("full_waits", &Producer::full_waits)
      .def_prop_ro("full_wait_s", &Producer::full_wait_s)
      .def_prop_ro("segment", [](const Producer& p) { return extent(*p.segment()); })
      .def(
          "try_reserve",
          [](nb::handle_t<Producer> self, uint64_t num_bytes) {
            auto& producer = nb::cast<Producer&>(self);
            return make_slot(self, producer, producer.try_reserve(num_bytes), num_bytes);
          },
          "num_bytes"_a)
      .def(
          "try_reserve_frame",
          [](nb::handle_t<Producer> self, uint64_t num_bytes) {
            auto& producer = nb::cast<Producer&>(self);
            return make_slot(self, producer, producer.try_reserve_frame(num_bytes), num_bytes);
          },
          "num_bytes"_a)
      .def(
          "try_push",
          [](Producer& p, nb::handle data, int64_t ticket, int32_t version_min, int32_t version_max, uint32_t num_tokens,
             uint32_t num_samples) { return try_push(p, data, {ticket, version_min, version_max, num_tokens, num_samples}); },
          "data"_a, nb::kw_only(), "ticket"_a, "version_min"_a = 0, "version_max"_a = 0, "num_tokens"_a = 0, "num_samples"_a = 0)
      .def(
          "try_push_marker",
          [](Producer& p, int64_t marker_id) -> std::optional<uint64_t> {
            if (p.try_reserve(0) == nullptr) return std::nullopt;
            return p.commit({.ticket = marker_id}, Kind::kMarker);
          },
          "marker_id"_a)
      .def("wait_for_room", &Producer::wait_for_room, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("begin", &Producer::begin, "ticket"_a)
      .def("cancel", &Producer::cancel, "ticket"_a)
      .def("in_flight", &Producer::in_flight)
      .def("check_consumer", &Producer::check_consumer)
      .def("beat", &Producer::beat)
      .def("close", &Producer::close);
  m.def("consumes_here", [] { return ring_detail::consuming_threads.contains(ring_detail::ConsumingThreads::self()); });
}

}  // namespace
}  // namespace areal_hpc

NB_MODULE(_ring, m) {
  using namespace areal_hpc;
  m.doc() = "One-producer one-consumer lanes in POSIX shared memory, and CRC32C. Use areal_hpc.transport.ring.";
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.attr("HEADER_BYTES") = sizeof(RecordHeader);
  m.attr("MAX_IN_FLIGHT") = kMaxInFlight;
  m.attr("NAME_PREFIX") = kNamePrefix;
  define_errors(m);
  define_segment(m);
  define_record(m);
  define_slot(m);
  define_consumer(m);
  define_producer(m);
  m.def("sweep_stale", &sweep_stale);
  m.def("crc32c", &crc32c_of_buffer, "buffer"_a, "seed"_a = 0);
}
