// rlinf_sched._C: the native part of rlinf_sched.
#include <pybind11/pybind11.h>

#include "interrupts.h"
#include "planner/planner_bindings.h"
#include "simulator/simulator_bindings.h"

void rlinf::sched::handle_signals() {
  const pybind11::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native part of rlinf_sched. Private: use the Python modules.";
  rlinf::sched::bind_planner(module);
  rlinf::sched::bind_simulator(module);
}
