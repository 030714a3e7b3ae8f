// Registers the simulator's part of rlinf_sched._C.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "model.h"

namespace rlinf::sched {

void bind_simulator(pybind11::module_& module);

// A model from the arrays that rlinf_sched.simulator.lowering makes.
Model read_model(const pybind11::dict& arrays, const std::vector<std::string>& names, int32_t num_items,
                 int32_t num_steps, int32_t max_staleness, int32_t num_devices);

}  // namespace rlinf::sched
