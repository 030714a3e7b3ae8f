// Which elements of a chunk differ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rlinf/comm/data_type.h"

namespace rlinf::comm {

// Writes a bit for each of `length` elements, 1 where `a` and `b` differ; returns how many are 1.
// Element is uint8_t, uint16_t, uint32_t or uint64_t. No alignment is needed.
template <typename Element>
size_t changed_elements(const std::byte* a, const std::byte* b, size_t length, uint64_t* masks,
                        InstructionSet instructions);

}  // namespace rlinf::comm
