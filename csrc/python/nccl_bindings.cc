// NCCL for Python (rlinf_comm.nccl): results are returned as numbers, texts and deadlines are made there.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings.h"
#include "gil.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/nccl/nccl_communicator.h"

namespace rlinf::comm {

namespace {

using nccl::Communicator;
using nccl::Config;
using nccl::Library;
using nccl::UniqueId;
using TransferTuple = std::tuple<bool, int, uintptr_t, size_t>;

UniqueId id_from(const py::bytes& bytes) {
  const auto view = static_cast<std::string_view>(bytes);
  RLINF_CHECK_USER(view.size() == sizeof(UniqueId), "an NCCL unique id has ", sizeof(UniqueId), " bytes, not ",
                   view.size());
  UniqueId id;
  std::memcpy(&id, view.data(), sizeof(id));
  return id;
}

py::bytes bytes_of(const UniqueId& id) {
  return py::bytes(id.bytes, sizeof(id.bytes));
}

Config config_from(const std::string& name, int max_ctas) {
  Config config;
  config.comm_name = name.empty() ? nullptr : name.c_str();
  config.max_ctas = max_ctas > 0 ? max_ctas : nccl::kUndefined;
  config.split_share = 1;
  return config;
}

void* pointer_from(uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

void bind_nccl(py::module_& module) {
  using NoGil = py::call_guard<WithoutGil>;
  py::class_<Library, std::shared_ptr<Library>>(module, "NcclLibrary")
      .def_static("load", &Library::load, py::arg("candidates"), NoGil())
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("origin", &Library::origin)
      .def_property_readonly("version", &Library::version)
      .def("capabilities", &Library::capabilities)
      .def("error_string",
           [](const Library& library, int result) { return library.functions().get_error_string(result); })
      .def("unique_id", [](const Library& library) {
        UniqueId id{};
        int result;
        {
          const WithoutGil no_gil;
          result = library.functions().get_unique_id(&id);
        }
        RLINF_CHECK_USER(result == nccl::kSuccess, "ncclGetUniqueId: ", library.functions().get_error_string(result));
        return bytes_of(id);
      });

  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "NcclCommunicator")
      .def_static("create",
                  [](std::shared_ptr<Library> library, const py::bytes& id, int num_ranks, int rank,
                     const std::string& name, int max_ctas) {
                    const UniqueId unique = id_from(id);
                    const WithoutGil no_gil;
                    return Communicator::create(std::move(library), unique, num_ranks, rank,
                                                config_from(name, max_ctas));
                  })
      .def_static("join",
                  [](std::shared_ptr<Library> library, const py::bytes& id, int num_ranks, int rank,
                     const std::string& name, int max_ctas) {
                    const UniqueId unique = id_from(id);
                    const WithoutGil no_gil;
                    return Communicator::join(std::move(library), unique, num_ranks, rank, config_from(name, max_ctas));
                  })
      .def("state", &Communicator::state, NoGil())
      .def("last_error", &Communicator::last_error, NoGil())
      .def("exchange",
           [](Communicator& self, const std::vector<TransferTuple>& tuples, uintptr_t stream) {
             std::vector<nccl::Transfer> transfers;
             for (const auto& [is_send, peer, pointer, num_bytes] : tuples) {
               transfers.push_back({is_send, peer, pointer_from(pointer), num_bytes});
             }
             const WithoutGil no_gil;
             return self.exchange(transfers, pointer_from(stream));
           })
      .def(
          "broadcast",
          [](Communicator& self, uintptr_t source, uintptr_t target, size_t num_bytes, int root, uintptr_t stream) {
            return self.broadcast(pointer_from(source), pointer_from(target), num_bytes, root, pointer_from(stream));
          },
          NoGil())
      .def(
          "split",
          [](Communicator& self, int color, int key, const std::string& name, int max_ctas) {
            return self.split(color, key, config_from(name, max_ctas));
          },
          NoGil())
      .def(
          "shrink",
          [](Communicator& self, std::vector<int> excluded, bool aborts, const std::string& name, int max_ctas) {
            return self.shrink(std::move(excluded), aborts, config_from(name, max_ctas));
          },
          NoGil())
      .def("grow",
           [](Communicator& self, int num_ranks, const py::object& id, const std::string& name, int max_ctas) {
             std::optional<UniqueId> unique;
             if (!id.is_none()) {
               unique = id_from(id.cast<py::bytes>());
             }
             const WithoutGil no_gil;
             return self.grow(num_ranks, unique, config_from(name, max_ctas));
           })
      .def("grow_id", [](Communicator& self) { return bytes_of(self.grow_id()); })
      .def("revoke", &Communicator::revoke, NoGil())
      .def("suspend", &Communicator::suspend, NoGil())
      .def("resume", &Communicator::resume, NoGil())
      .def("finalize", &Communicator::finalize, NoGil())
      .def("destroy", &Communicator::destroy, NoGil())
      .def("abort", &Communicator::abort, NoGil());
}

}  // namespace rlinf::comm
