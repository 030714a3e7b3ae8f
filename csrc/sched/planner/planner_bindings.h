#pragma once

#include <pybind11/pybind11.h>

namespace rlinf::sched {

void bind_planner(pybind11::module_& module);

}  // namespace rlinf::sched
