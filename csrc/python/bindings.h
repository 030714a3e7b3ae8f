// What the files of this folder share.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "gil.h"
#include "rlinf/comm/channel.h"
#include "rlinf/comm/segment.h"
#include "rlinf/comm/store_choice.h"

namespace rlinf::comm {

namespace py = pybind11;

py::tuple address_tuple(const SegmentAddress& address);
SegmentAddress address_from(const py::tuple& fields);

// "cached" or "streaming"; what the environment says for None.
Stores stores_named(const py::object& name);

// On CLOCK_MONOTONIC; kNever for None. UserError when negative.
int64_t deadline_from(const py::object& timeout_s);

// Repeats `attempt` until it is no longer pending. Lets Ctrl-C through between the slices.
template <typename Attempt>
Outcome wait_for(Attempt attempt) {
  while (true) {
    Outcome outcome;
    {
      WithoutGil no_gil;
      outcome = attempt();
    }
    if (outcome != Outcome::kPending) {
      return outcome;
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

// One for each file of this folder.
void bind_codec(py::module_& module);
void bind_channel(py::module_& module);
void bind_segment(py::module_& module);
void bind_copies(py::module_& module);
void bind_cuda(py::module_& module);
void bind_pool(py::module_& module);
void bind_ipc(py::module_& module);
void bind_delta(py::module_& module);
void bind_digest(py::module_& module);

}  // namespace rlinf::comm
