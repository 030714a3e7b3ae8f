#pragma once

#include <pybind11/pybind11.h>

namespace rlinf::sched {

void bind_simulator(pybind11::module_& module);

}  // namespace rlinf::sched
