// areal_hpc._ring: the ring and crc32c for Python. Every wait, copy or sum of unknown length runs without the GIL. transport/ring.py adds
// deadlines.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "ring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace areal_hpc {
namespace {

using ReadOnlyView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using WritableView = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// A leased record. Views own it, so a record that is dropped without release() gives its space back only when the last view is gone.
class Record {
 public:
  Record(std::shared_ptr<Consumer> consumer, const RecordView& view) : consumer_(std::move(consumer)), view_(view) {}
  ~Record() {
    if (!released_) consumer_->release(view_.lease);
  }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  const RecordHeader& header() const { return view_.header; }
  const uint8_t* payload() const {
    if (released_)
      throw RingError("the record of ticket " + std::to_string(header().ticket) + " has been released: its bytes belong to the producer");
    return reinterpret_cast<const uint8_t*>(view_.payload);
  }
  bool released() const { return released_; }
  void release() {
    if (released_) throw RingError("the record of ticket " + std::to_string(header().ticket) + " was released before");
    released_ = true;
    consumer_->release(view_.lease);
  }

 private:
  std::shared_ptr<Consumer> consumer_;
  RecordView view_;
  bool released_ = false;
};

std::unique_ptr<Record> try_peek(const std::shared_ptr<Consumer>& consumer) {
  std::optional<RecordView> view;
  {
    const nb::gil_scoped_release no_gil;
    view = consumer->try_peek();
  }
  return view ? std::make_unique<Record>(consumer, *view) : nullptr;
}

std::shared_ptr<Consumer> make_consumer(const std::string& name, uint64_t capacity_bytes, uint32_t lane, uint64_t job_id,
                                        uint64_t restart_id, bool checksum, bool poison) {
  return std::make_shared<Consumer>(name, capacity_bytes, LaneOptions{lane, job_id, restart_id, checksum}, poison);
}

// (producer, "") or (null, why the lane cannot be opened yet).
std::pair<std::shared_ptr<Producer>, std::string> try_open(const std::string& name, uint64_t job_id, uint64_t restart_id) {
  std::string reason;
  std::shared_ptr<Segment> segment = open_lane(name, job_id, restart_id, reason);
  return {segment ? std::make_shared<Producer>(std::move(segment)) : nullptr, reason};
}

uint32_t crc32c_of_buffer(nb::handle buffer, uint32_t seed) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  uint32_t sum;
  {
    const nb::gil_scoped_release no_gil;
    sum = crc32c(view.buf, static_cast<size_t>(view.len), seed);
  }
  PyBuffer_Release(&view);
  return sum;
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
  d["full_waits"] = read(header.full_waits);
  d["full_wait_s"] = static_cast<double>(read(header.full_wait_ns)) * 1e-9;
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

void define_record(nb::module_& m) {
  nb::class_<Record>(m, "Record")
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
      .def_prop_ro("buffer",
                   [](nb::handle_t<Record> self) {
                     const auto& record = nb::cast<const Record&>(self);
                     return ReadOnlyView(record.payload(), {record.header().payload_bytes}, self);
                   })
      .def_prop_ro("released", &Record::released)
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

void define_consumer(nb::module_& m) {
  nb::class_<Consumer>(m, "Consumer")
      .def_prop_ro("lane", &Consumer::lane)
      .def_prop_ro("capacity_bytes", &Consumer::capacity_bytes)
      .def_prop_ro("used_bytes", &Consumer::used_bytes)
      .def_prop_ro("num_leased", &Consumer::num_leased)
      .def_prop_ro("heartbeat_age_s", &heartbeat_age_s)
      .def("wait_for_record", &Consumer::wait_for_record, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("producer_state",
           [](const Consumer& c) {
             constexpr const char* names[] = {"unattached", "alive", "dead", "closed"};
             return names[static_cast<int>(c.producer_state())];
           })
      .def("counters", &counters)
      .def("unlink", &Consumer::unlink)
      .def("close", &Consumer::close);
  m.def("make_consumer", &make_consumer, "name"_a, "capacity_bytes"_a, nb::kw_only(), "lane"_a, "job_id"_a, "restart_id"_a, "checksum"_a,
        "poison"_a);
  m.def("try_peek", &try_peek, "consumer"_a);
}

void define_producer(nb::module_& m) {
  nb::class_<Producer>(m, "Producer")
      .def_prop_ro("lane", &Producer::lane)
      .def_prop_ro("incarnation", &Producer::incarnation)
      .def_prop_ro("capacity_bytes", &Producer::capacity_bytes)
      .def_prop_ro("max_record_bytes", &Producer::max_record_bytes)
      .def_prop_ro("used_bytes", &Producer::used_bytes)
      .def_prop_ro("num_committed", &Producer::num_committed)
      .def_prop_ro("full_waits", &Producer::full_waits)
      .def_prop_ro("full_wait_s", &Producer::full_wait_s)
      .def_prop_ro("consumed_by_this_thread", &Producer::consumed_by_this_thread)
      .def(
          "try_reserve",
          [](nb::handle_t<Producer> self, uint64_t num_bytes) -> std::optional<WritableView> {
            std::byte* slot = nb::cast<Producer&>(self).try_reserve(num_bytes);
            if (slot == nullptr) return std::nullopt;
            return WritableView(reinterpret_cast<uint8_t*>(slot), {num_bytes}, self);
          },
          "num_bytes"_a, nb::sig("def try_reserve(self, num_bytes: int) -> numpy.ndarray | None"))
      .def("wait_for_room", &Producer::wait_for_room, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "commit",
          [](Producer& p, int64_t ticket, int32_t version_min, int32_t version_max, uint32_t num_tokens, uint32_t num_samples) {
            const nb::gil_scoped_release no_gil;
            return p.commit({ticket, version_min, version_max, num_tokens, num_samples});
          },
          "ticket"_a, "version_min"_a, "version_max"_a, "num_tokens"_a, "num_samples"_a)
      .def(
          "commit_marker", [](Producer& p, int64_t marker_id) { return p.commit({.ticket = marker_id}, Kind::kMarker); }, "marker_id"_a)
      .def("abort", &Producer::abort)
      .def("beat", &Producer::beat)
      .def("close", &Producer::close);
  m.def("try_open", &try_open, "name"_a, "job_id"_a, "restart_id"_a);
}

}  // namespace
}  // namespace areal_hpc

NB_MODULE(_ring, m) {
  using namespace areal_hpc;
  m.doc() = "One-producer one-consumer lanes in POSIX shared memory, and CRC32C. Use areal_hpc.transport.ring.";
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.attr("HEADER_BYTES") = sizeof(RecordHeader);
  m.attr("NAME_PREFIX") = kNamePrefix;
  define_errors(m);
  define_record(m);
  define_consumer(m);
  define_producer(m);
  m.def("sweep_stale", &sweep_stale);
  m.def("crc32c", &crc32c_of_buffer, "buffer"_a, "seed"_a = 0);
}
