// Copy and digest programs for Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings.h"
#include "gil.h"
#include "rlinf/comm/check.h"
#include "rlinf/comm/copy_program.h"
#include "rlinf/comm/digest.h"
#include "rlinf/comm/row_kernels.h"
#include "rlinf/comm/thread_pool.h"

namespace rlinf::comm {

namespace {

template <typename Value>
using Column = py::array_t<Value, py::array::c_style>;

template <typename Value>
std::vector<Value> values_of(const Column<Value>& column) {
  return std::vector<Value>(column.data(), column.data() + column.size());
}

CopyTable copy_table_from(const Column<int64_t>& lengths, const py::dict& columns) {
  RLINF_CHECK_INTERNAL(lengths.ndim() == 2, lengths.ndim());
  CopyTable table;
  table.num_copies = lengths.shape(0);
  table.num_dims = lengths.shape(1);
  table.lengths = values_of(lengths);
  const auto read = [&](const char* name, auto* into) {
    using Value = typename std::decay_t<decltype(*into)>::value_type;
    if (columns.contains(name)) {
      *into = values_of(columns[name].cast<Column<Value>>());
    }
  };
  read("src_buffer", &table.src_buffer);
  read("src_offset", &table.src_offset);
  read("src_dtype", &table.src_dtype);
  read("src_strides", &table.src_strides);
  read("dst_buffer", &table.dst_buffer);
  read("dst_offset", &table.dst_offset);
  read("dst_dtype", &table.dst_dtype);
  read("dst_strides", &table.dst_strides);
  read("src_bytes", &table.src_bytes);
  read("dst_bytes", &table.dst_bytes);
  read("digest_slot", &table.digest_slot);
  read("first_index", &table.first_index);
  read("index_strides", &table.index_strides);
  if (columns.contains("num_digests")) {
    table.num_digests = columns["num_digests"].cast<int64_t>();
  }
  return table;
}

InstructionSet instruction_set_named(const py::object& name) {
  if (name.is_none()) {
    return best_instruction_set();
  }
  const auto text = name.cast<std::string>();
  RLINF_CHECK_USER(text == "scalar" || text == "avx2" || text == "avx512", "instruction set '", text,
                   "'; allowed: scalar, avx2, avx512");
  return text == "scalar" ? InstructionSet::kScalar
                          : (text == "avx2" ? InstructionSet::kAvx2 : InstructionSet::kAvx512);
}

// The digests as uint64[num_digests, 2], low half first; None when they are not wanted.
py::object run_program(const CopyProgram& program, const Column<int64_t>& src_pointers,
                       const Column<int64_t>& dst_pointers, int num_threads, bool wants_digests,
                       const py::object& instructions, const py::object& stores) {
  const std::vector<uint64_t> src(src_pointers.data(), src_pointers.data() + src_pointers.size());
  const std::vector<uint64_t> dst(dst_pointers.data(), dst_pointers.data() + dst_pointers.size());
  const InstructionSet set = instruction_set_named(instructions);
  const Stores kind = stores_named(stores);
  std::vector<Digest> digests(wants_digests ? static_cast<size_t>(program.num_digests()) : 0);
  {
    const WithoutGil no_gil;
    program.run(src, dst, num_threads, wants_digests ? digests.data() : nullptr, set, kind);
  }
  if (!wants_digests) {
    return py::none();
  }
  py::array_t<uint64_t> result({program.num_digests(), int64_t{2}});
  auto rows = result.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < rows.shape(0); ++i) {
    rows(i, 0) = digests[i].low;
    rows(i, 1) = digests[i].high;
  }
  return result;
}

}  // namespace

Stores stores_named(const py::object& name) {
  if (name.is_none()) {
    return stores_of_environment();
  }
  const auto text = name.cast<std::string>();
  RLINF_CHECK_USER(text == "cached" || text == "streaming", "stores '", text, "'; allowed: cached, streaming");
  return text == "cached" ? Stores::kCached : Stores::kStreaming;
}

void bind_copies(py::module_& module) {
  py::class_<CopyProgram>(module, "CopyProgram")
      .def(py::init([](const Column<int64_t>& lengths, const py::dict& columns) {
             const CopyTable table = copy_table_from(lengths, columns);
             const WithoutGil no_gil;
             return std::make_unique<CopyProgram>(table);
           }),
           py::arg("lengths"), py::arg("columns"))
      .def("run", &run_program, py::arg("src_pointers"), py::arg("dst_pointers"), py::arg("num_threads"),
           py::arg("wants_digests"), py::arg("instructions"), py::arg("stores") = py::none())
      .def_property_readonly("num_steps", &CopyProgram::num_steps)
      .def_property_readonly("num_rows", &CopyProgram::num_rows)
      .def_property_readonly("num_tasks", &CopyProgram::num_tasks)
      .def_property_readonly("num_dst_bytes", &CopyProgram::num_dst_bytes);
  module.def("num_pool_threads", &num_pool_threads);
  module.def("best_instruction_set", [] {
    constexpr const char* kNames[] = {"scalar", "avx2", "avx512"};
    return kNames[static_cast<uint8_t>(best_instruction_set())];
  });
}

}  // namespace rlinf::comm
