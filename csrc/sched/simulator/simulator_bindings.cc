// The event core in rlinf_sched._C: copies numpy arrays into a Model, runs the core without the GIL, hands the spans
// back as arrays.
#include "simulator_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "simulator.h"

namespace py = pybind11;

namespace rlinf::sched {
namespace {

template <typename T>
void read(const py::dict& arrays, const char* key, std::vector<T>& field) {
  const auto array = py::array_t<T, py::array::c_style | py::array::forcecast>::ensure(arrays[key]);
  if (!array) {
    throw py::value_error(std::string(key) + " is no array of numbers");
  }
  field.assign(array.data(), array.data() + array.size());
}

// The array owns the vector.
template <typename T>
py::array_t<T> to_array(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  py::capsule owner(owned, [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

}  // namespace

Model read_model(const py::dict& arrays, const std::vector<std::string>& names, int32_t num_items, int32_t num_steps,
                 int32_t max_staleness, int32_t num_devices) {
  Model model;
  model.names = names;
  model.num_items = num_items;
  model.num_steps = num_steps;
  model.max_staleness = max_staleness;
  model.num_devices = num_devices;
  read(arrays, "batching", model.batching);
  read(arrays, "num_instances", model.num_instances);
  read(arrays, "hand_over", model.hand_over);
  read(arrays, "room", model.room);
  read(arrays, "rounds", model.rounds);
  read(arrays, "turn", model.turn);
  read(arrays, "by_key", model.by_key);
  read(arrays, "whole", model.whole);
  read(arrays, "step_s", model.step_s);
  read(arrays, "onload_s", model.onload_s);
  read(arrays, "offload_s", model.offload_s);
  read(arrays, "table_start", model.table_start);
  read(arrays, "table", model.table);
  read(arrays, "costs", model.costs);
  read(arrays, "edge_source", model.edge_source);
  read(arrays, "edge_target", model.edge_target);
  read(arrays, "edge_is_back", model.edge_is_back);
  read(arrays, "edge_latency_s", model.edge_latency_s);
  read(arrays, "edge_item_s", model.edge_item_s);
  read(arrays, "device_start", model.device_start);
  read(arrays, "device", model.device);
  model.node_cores = arrays["node_cores"].cast<double>();
  read(arrays, "cores", model.cores);
  read(arrays, "instance_node", model.instance_node);
  read(arrays, "turn_is_leased", model.turn_is_leased);
  read(arrays, "turn_device_start", model.turn_device_start);
  read(arrays, "turn_device", model.turn_device);
  read(arrays, "sync_s", model.sync_s);
  read(arrays, "sync_source_start", model.sync_source_start);
  read(arrays, "sync_source", model.sync_source);
  return model;
}

namespace {

py::dict simulate(const py::dict& arrays, const std::vector<std::string>& names, int32_t num_items, int32_t num_steps,
                  int32_t max_staleness, int32_t num_devices) {
  const Model model = read_model(arrays, names, num_items, num_steps, max_staleness, num_devices);
  Outcome outcome;
  {
    py::gil_scoped_release release;
    outcome = Simulator(model).run();
  }
  py::dict result;
  Spans& spans = outcome.spans;
  result["stage"] = to_array(std::move(spans.stage));
  result["rank"] = to_array(std::move(spans.rank));
  result["kind"] = to_array(std::move(spans.kind));
  result["step"] = to_array(std::move(spans.step));
  result["num_items"] = to_array(std::move(spans.num_items));
  result["width"] = to_array(std::move(spans.width));
  result["cause"] = to_array(std::move(spans.cause));
  result["start_s"] = to_array(std::move(spans.start_s));
  result["end_s"] = to_array(std::move(spans.end_s));
  result["step_end_s"] = to_array(std::move(outcome.step_end_s));
  result["step_cause"] = to_array(std::move(outcome.step_cause));
  result["num_events"] = outcome.num_events;
  return result;
}

}  // namespace

void bind_simulator(py::module_& module) {
  py::register_exception<Standstill>(module, "Standstill", PyExc_RuntimeError);
  module.def("simulate", &simulate, py::arg("arrays"), py::kw_only(), py::arg("names"), py::arg("num_items"),
             py::arg("num_steps"), py::arg("max_staleness"), py::arg("num_devices"));
}

}  // namespace rlinf::sched
