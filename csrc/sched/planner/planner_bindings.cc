// The planner's part of rlinf_sched._C. Rows are float64 arrays, copied in and out.
#include "planner_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "../interrupts.h"
#include "../simulator/simulator_bindings.h"
#include "front.h"
#include "plan_timer.h"
#include "stage_times.h"

namespace py = pybind11;
namespace sched = rlinf::sched;

namespace {

using Rows = py::array_t<double, py::array::c_style | py::array::forcecast>;
using Signatures = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Flags = py::array_t<bool, py::array::c_style | py::array::forcecast>;
using Counts = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

void offer_all(sched::Front& front, const Rows& rows, const Signatures& signatures, const Flags& mixed,
               const Counts& numbers) {
  if (rows.ndim() != 2 || rows.shape(1) != front.columns().width() || signatures.ndim() != 2 ||
      signatures.shape(0) != rows.shape(0) || mixed.ndim() != 1 || mixed.shape(0) != rows.shape(0) ||
      numbers.ndim() != 1 || numbers.shape(0) != rows.shape(0)) {
    throw py::value_error("rows, signatures and flags do not fit the front");
  }
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    front.offer(rows.data(i, 0), signatures.data() + i * signatures.shape(1), *mixed.data(i),
                sched::Origin{-1, 0, *numbers.data(i), *numbers.data(i)});
  }
}

py::array_t<double> rows_of(const sched::Front& front) {
  const py::ssize_t width = front.columns().width(), size = static_cast<py::ssize_t>(front.size());
  py::array_t<double> result({size, width});
  for (py::ssize_t i = 0; i < size; ++i) std::copy_n(front.row(i), width, result.mutable_data(i, 0));
  return result;
}

py::array_t<int32_t> origins_of(const sched::Front& front) {
  const py::ssize_t size = static_cast<py::ssize_t>(front.size());
  py::array_t<int32_t> result({size, py::ssize_t{4}});
  auto out = result.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < size; ++i) {
    const sched::Origin origin = front.origin(i);
    out(i, 0) = origin.kind;
    out(i, 1) = origin.before_part;
    out(i, 2) = origin.before_row;
    out(i, 3) = origin.after_row;
  }
  return result;
}

py::array_t<double> steps_of(const sched::Front& front) {
  py::array_t<double> result(static_cast<py::ssize_t>(front.size()));
  for (std::size_t i = 0; i < front.size(); ++i) result.mutable_at(i) = front.step_s(front.row(i));
  return result;
}

py::array_t<bool> mixed_of(const sched::Front& front) {
  py::array_t<bool> result(static_cast<py::ssize_t>(front.size()));
  for (std::size_t i = 0; i < front.size(); ++i) result.mutable_at(i) = front.is_mixed(i);
  return result;
}

// float64 [cases, fractions + 3]: `StageTimes::of` each number of instances and size.
py::array_t<double> stage_times(int batching, const Rows& seconds, const Rows& costs, int max_items, int num_steps,
                                const std::vector<double>& fractions, const Counts& num_instances,
                                const Counts& sizes) {
  if (num_instances.ndim() != 1 || sizes.ndim() != 1 || sizes.shape(0) != num_instances.shape(0) || !costs.size()) {
    throw py::value_error("give items, and as many sizes as numbers of instances");
  }
  const py::ssize_t num_cases = sizes.shape(0);
  py::array_t<double> result({num_cases, static_cast<py::ssize_t>(fractions.size() + 3)});
  const auto list = [](const Rows& array) { return std::vector<double>(array.data(), array.data() + array.size()); };
  sched::StageTimes times({static_cast<sched::StageWork::Batching>(batching), list(seconds), list(costs), max_items,
                           num_steps},
                          fractions);
  const py::gil_scoped_release release;
  for (py::ssize_t i = 0; i < num_cases; ++i) {
    sched::handle_signals();
    times.of(*num_instances.data(i), *sizes.data(i), result.mutable_data(i, 0));
  }
  return result;
}

}  // namespace

void rlinf::sched::bind_planner(py::module_& m) {
  m.def("stage_times", &stage_times, py::kw_only(), py::arg("batching"), py::arg("seconds"), py::arg("costs"),
        py::arg("max_items"), py::arg("num_steps"), py::arg("fractions"), py::arg("num_instances"),
        py::arg("sizes"));
  py::class_<sched::PlanTimer>(m, "PlanTimer")
      .def(py::init([](const py::dict& arrays, const std::vector<std::string>& names, int32_t num_items,
                       int32_t num_steps, int32_t max_staleness, const std::vector<Rows>& arrays_of_seconds,
                       std::vector<int32_t> node_of, std::vector<double> edge_bytes, std::vector<double> sync_bytes,
                       std::vector<double> sync_latency_s, std::vector<int32_t> sync_ends, double latency_s, double node_bytes_per_s,
                       double network_bytes_per_s) {
             const auto num_devices = static_cast<int32_t>(node_of.size());
             sched::Traffic traffic{std::move(node_of),   std::move(edge_bytes), std::move(sync_bytes),
                                    std::move(sync_latency_s), std::move(sync_ends), latency_s,             node_bytes_per_s,
                                    network_bytes_per_s};
             sched::Model model =
                 sched::read_model(arrays, names, num_items, num_steps, max_staleness, num_devices);
             std::vector<std::vector<double>> tables;
             for (const Rows& one : arrays_of_seconds) tables.emplace_back(one.data(), one.data() + one.size());
             return sched::PlanTimer(std::move(model), tables, std::move(traffic));
           }),
           py::arg("arrays"), py::kw_only(), py::arg("names"), py::arg("num_items"), py::arg("num_steps"),
           py::arg("max_staleness"), py::arg("tables"), py::arg("node_of"), py::arg("edge_bytes"),
           py::arg("sync_bytes"), py::arg("sync_latency_s"), py::arg("sync_ends"), py::arg("latency_s"), py::arg("node_bytes_per_s"),
           py::arg("network_bytes_per_s"))
      .def(
          "add",
          [](sched::PlanTimer& timer, std::vector<int32_t> devices, int32_t num_instances, int32_t hand_over,
             int32_t room, bool whole, double step_s, double onload_s, double offload_s, int32_t table) {
            return timer.add({std::move(devices), num_instances, hand_over, room, whole, step_s, onload_s, offload_s,
                              table});
          },
          py::kw_only(), py::arg("devices"), py::arg("num_instances"), py::arg("hand_over"), py::arg("room"),
          py::arg("whole"), py::arg("step_s"), py::arg("onload_s"), py::arg("offload_s"), py::arg("table"))
      .def("step_s", &sched::PlanTimer::step_s, py::arg("places"), py::arg("most_s"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<sched::Columns>(m, "Columns")
      .def(py::init(
               [](int num_pools, int num_out, int num_edges) { return sched::Columns{num_pools, num_out, num_edges}; }),
           py::kw_only(), py::arg("num_pools"), py::arg("num_out"), py::arg("num_edges"));
  py::class_<sched::Limits>(m, "Limits")
      .def(py::init([](std::vector<double> devices, std::vector<double> memory, std::vector<double> rest_resident,
                       std::vector<double> rest_peak, int steps_under_way, double bound_s, double rest_area,
                       double tolerance_s, double tolerance_share, bool may_mix,
                       std::size_t most_rows) {
             return sched::Limits{std::move(devices),
                                  std::move(memory),
                                  std::move(rest_resident),
                                  std::move(rest_peak),
                                  steps_under_way,
                                  bound_s,
                                  rest_area,
                                  tolerance_s,
                                  tolerance_share,
                                  may_mix,
                                  most_rows};
           }),
           py::kw_only(), py::arg("devices"), py::arg("memory"), py::arg("rest_resident"), py::arg("rest_peak"),
           py::arg("steps_under_way"), py::arg("bound_s"), py::arg("rest_area"), py::arg("tolerance_s"),
           py::arg("tolerance_share"), py::arg("may_mix"), py::arg("most_rows") = 0);
  py::class_<sched::Join>(m, "Join").def(
      py::init([](int kind, int before_part, bool feeds, double moved_s, double waits, std::vector<bool> syncs,
                  double sync_latency_s, double sync_bytes_per_s, bool mixes) {
        return sched::Join{kind,  before_part,      feeds,          moved_s,          waits,
                           std::move(syncs), sync_latency_s, sync_bytes_per_s, mixes};
      }),
      py::kw_only(), py::arg("kind"), py::arg("before_part"), py::arg("feeds"), py::arg("moved_s"), py::arg("waits"),
      py::arg("syncs"), py::arg("sync_latency_s"), py::arg("sync_bytes_per_s"), py::arg("mixes"));
  py::class_<sched::Front>(m, "Front")
      .def(py::init<sched::Columns, sched::Limits, int>(), py::arg("columns"), py::arg("limits"), py::kw_only(),
           py::arg("num_groups"))
      .def("offer", &offer_all, py::arg("rows"), py::arg("signatures"), py::arg("is_mixed"), py::arg("numbers"))
      .def("offer_joins", &sched::Front::offer_joins, py::arg("before"), py::arg("after"), py::arg("join"),
           py::arg("forget"), py::call_guard<py::gil_scoped_release>())
      .def(
          "best_joins",
          [](const sched::Front& front, const sched::Front& before, const sched::Front& after, const sched::Join& join,
             std::size_t count) {
            std::vector<sched::Whole> wholes;
            {
              const py::gil_scoped_release release;
              wholes = front.best_joins(before, after, join, count);
            }
            py::list result;
            for (const sched::Whole& w : wholes) {
              const auto origin =
                  py::make_tuple(w.origin.kind, w.origin.before_part, w.origin.before_row, w.origin.after_row);
              result.append(py::make_tuple(w.step_s, w.sync_s, w.is_mixed, origin));
            }
            return result;
          },
          py::arg("before"), py::arg("after"), py::arg("join"), py::kw_only(), py::arg("count"))
      .def("__len__", &sched::Front::size)
      .def_property_readonly("was_thinned", &sched::Front::was_thinned)
      .def_property_readonly("rows", &rows_of)
      .def_property_readonly("steps_s", &steps_of)
      .def_property_readonly("is_mixed", &mixed_of)
      .def_property_readonly("origins", &origins_of);
}
