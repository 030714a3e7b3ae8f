// Pools for Python. The tensors of a pool cross channels in pooled_tensors.cc.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "codec.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/pool_registry.h"

namespace rlinf::comm {

namespace {

// What a SharedPool object holds.
class PoolHandle {
 public:
  explicit PoolHandle(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  ~PoolHandle() {
    pool_.reset();
    try {
      PoolRegistry::instance().trim();
    } catch (const std::exception& error) {
      RLINF_CHECK_NOTHROW(false, error.what());
    }
  }
  PoolHandle(const PoolHandle&) = delete;
  PoolHandle& operator=(const PoolHandle&) = delete;

  Pool& pool() const { return *pool_; }

  // A tensor; or, when there was no room, why, as an int.
  py::object allocate(Codec& codec, const std::string& dtype, const std::vector<int64_t>& shape, uint64_t num_bytes,
                      const py::object& timeout_s) const {
    WaitState wait;
    wait.deadline_ns = deadline_from(timeout_s);
    std::shared_ptr<PoolBlock> block;
    const Outcome outcome = wait_for([&] { return PoolRegistry::instance().allocate(pool_, num_bytes, wait, &block); });
    if (outcome != Outcome::kDone) {
      return py::int_(static_cast<int>(outcome));
    }
    const OwnedBytes bytes{block, block->bytes(), num_bytes};
    py::object tensor = codec.tensors().build(dtype, shape, bytes);
    if (!tensor) {
      tensor = codec.hooks().build_tensor(py::cast(BorrowedBytes{bytes}), dtype, shape);
    }
    return tensor;
  }

 private:
  std::shared_ptr<Pool> pool_;
};

py::dict counts(const PoolHandle& handle) {
  PoolCounts counts;
  {
    const WithoutGil no_gil;
    counts = handle.pool().counts();
  }
  py::dict held_bytes;
  py::dict in_flight_bytes;
  for (const PoolCounts::Holder& holder : counts.holders) {
    const py::int_ pid(holder.process.pid);
    if (holder.held_bytes > 0) {
      held_bytes[pid] = holder.held_bytes;
    }
    if (holder.in_flight_bytes > 0) {
      in_flight_bytes[pid] = holder.in_flight_bytes;
    }
  }
  py::dict result;
  result["capacity_bytes"] = counts.capacity_bytes;
  result["used_bytes"] = counts.used_bytes;
  result["largest_hole_bytes"] = counts.largest_hole_bytes;
  result["num_blocks"] = counts.num_blocks;
  result["num_holds"] = counts.num_holds;
  result["max_holds"] = counts.max_holds;
  result["held_bytes"] = held_bytes;
  result["in_flight_bytes"] = in_flight_bytes;
  return result;
}

}  // namespace

void bind_pool(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) {
        std::rethrow_exception(pointer);
      }
    } catch (const HoldsExhausted& error) {
      const py::object type = py::module_::import("rlinf_comm.errors").attr("PoolFull");
      PyErr_SetString(type.ptr(), error.what());
    } catch (const BlockLost& error) {
      const py::object type = py::module_::import("rlinf_comm.errors").attr("PeerLost");
      PyErr_SetString(type.ptr(), error.what());
    }
  });

  py::class_<PoolHandle>(module, "Pool")
      .def_static(
          "create",
          [](const std::string& name, uint64_t capacity_bytes) {
            return std::make_unique<PoolHandle>(PoolRegistry::instance().create(name, capacity_bytes));
          },
          py::arg("name"), py::arg("capacity_bytes"))
      .def_static(
          "open",
          [](const py::tuple& address) {
            const SegmentAddress where = address_from(address);
            const WithoutGil no_gil;
            PoolRegistry::instance().trim();  // else a pool without tensors here would outlive its creator's death
            return std::make_unique<PoolHandle>(PoolRegistry::instance().open(where));
          },
          py::arg("address"))
      .def(
          "prefault", [](const PoolHandle& handle) { handle.pool().prefault(); }, py::call_guard<WithoutGil>())
      .def("address", [](const PoolHandle& handle) { return address_tuple(handle.pool().address()); })
      .def_property_readonly("capacity_bytes", [](const PoolHandle& handle) { return handle.pool().capacity_bytes(); })
      .def("allocate", &PoolHandle::allocate, py::arg("codec"), py::arg("dtype"), py::arg("shape"),
           py::arg("num_bytes"), py::arg("timeout_s"))
      .def(
          "reclaim", [](const PoolHandle& handle) { return PoolRegistry::instance().reclaim(handle.pool()); },
          py::call_guard<WithoutGil>())
      .def("counts", &counts)
      .def("_lock_and_leave", [](const PoolHandle& handle) { handle.pool().lock_and_leave(); });
}

}  // namespace rlinf::comm
