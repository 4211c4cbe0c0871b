// areal_hpc._cuda: copies between lanes and a CUDA device, for Python. The GIL is released around every call of the driver that may take
// long. transport/cuda.py adds tensors, slots, records and deadlines.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "cuda.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace areal_hpc::cuda {
namespace {

// Layout of a DLPack capsule (dlpack.h, versions 0 and 1), as far as it is read here.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *shape, *strides;  // of elements; strides may be null for C order
  uint64_t byte_offset;
};
struct DlManagedVersioned {
  uint32_t version_major, version_minor;
  void* manager;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;  // bit 0: read only
  DlTensor tensor;
};

using DlDescription = std::tuple<uint64_t, uint64_t, std::vector<int64_t>, std::optional<std::vector<int64_t>>, bool>;

// (address, bits per element, shape, strides in elements or None, read only). The capsule keeps the memory; it is not consumed.
DlDescription describe_dlpack(nb::handle capsule) {
  const DlTensor* tensor = nullptr;
  bool read_only = false;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    tensor = static_cast<const DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));  // DLManagedTensor starts with it
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* managed = static_cast<const DlManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version_major != 1) {
      throw std::invalid_argument("DLPack version " + std::to_string(managed->version_major) + " is not known here, only 0 and 1");
    }
    tensor = &managed->tensor;
    read_only = (managed->flags & 1) != 0;
  } else {
    throw std::invalid_argument("__dlpack__ returned no unused DLPack capsule");
  }
  const auto list = [&](const int64_t* values) { return std::vector<int64_t>(values, values + tensor->num_dimensions); };
  const bool scalar = tensor->num_dimensions == 0;
  std::optional<std::vector<int64_t>> strides;
  if (!scalar && tensor->strides != nullptr) strides = list(tensor->strides);
  return {reinterpret_cast<uint64_t>(tensor->data) + tensor->byte_offset, uint64_t{tensor->type_bits} * tensor->type_lanes,
          scalar ? std::vector<int64_t>{} : list(tensor->shape), strides, read_only};
}

std::shared_ptr<Device> open_device(int ordinal) { return std::make_shared<Device>(ordinal); }

std::shared_ptr<Copy> start_copy(Device& device, bool to_host, const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& pieces,
                                 const std::vector<uint64_t>& streams) {
  std::vector<Device::Piece> list;
  for (const auto& [host, on_device, num_bytes] : pieces) list.push_back({host, on_device, num_bytes});
  return device.copy(to_host, list, streams);
}

void define_errors(nb::module_& m) {
  nb::exception<CudaUnavailable>(m, "CudaUnavailable", PyExc_RuntimeError);
  static nb::object& cuda_error = *new nb::object(nb::exception<CudaError>(m, "CudaError", PyExc_RuntimeError));
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const CudaError& e) {
      nb::object error = cuda_error(e.what());
      error.attr("call") = e.call;
      error.attr("name") = e.name;
      error.attr("text") = e.text;
      PyErr_SetObject(cuda_error.ptr(), error.ptr());
    }
  });
}

}  // namespace
}  // namespace areal_hpc::cuda

NB_MODULE(_cuda, m) {
  using namespace areal_hpc::cuda;
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  m.doc() = "Copies between lanes in shared memory and a CUDA device. Use areal_hpc.transport.cuda.";
  m.attr("MEMORY_HOST") = kMemoryTypeHost;
  m.attr("MEMORY_DEVICE") = kMemoryTypeDevice;
  define_errors(m);
  nb::class_<Copy>(m, "Copy")
      .def_prop_ro("num_bytes", &Copy::num_bytes)
      .def("ended", &Copy::ended, NoGil())
      .def("wait", &Copy::wait, "timeout_s"_a, NoGil())
      .def("failed", &Copy::failed)
      .def("check", &Copy::check);
  nb::class_<Device>(m, "Device")
      .def_prop_ro("stream", &Device::stream)
      .def("register_host", &Device::register_host, "address"_a, "num_bytes"_a, NoGil())
      .def("unregister_host", &Device::unregister_host, "address"_a, NoGil())
      .def("pointer", &Device::pointer, "address"_a, NoGil())
      .def("copy", &start_copy, "to_host"_a, "pieces"_a, "streams"_a, NoGil())
      .def("close", &Device::close, NoGil());
  m.def("open_device", &open_device, "ordinal"_a, NoGil());
  m.def("status", &status, NoGil());
  m.def("describe_dlpack", &describe_dlpack, "capsule"_a);
}
