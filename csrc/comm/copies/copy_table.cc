// What a copy table may say.
#include <algorithm>

#include "rlinf/comm/check.h"
#include "rlinf/comm/copy_program.h"

namespace rlinf::comm {

namespace {

template <typename Column>
void check_column(const char* name, const Column& column, int64_t expected) {
  RLINF_CHECK_USER(static_cast<int64_t>(column.size()) == expected, name, " has ", column.size(),
                   " values; the table needs ", expected);
}

// Far beyond any memory, and small enough that later arithmetic cannot overflow.
constexpr int64_t kMaxExtent = int64_t{1} << 60;

// Lowest and highest byte offset that the elements of a box touch, the highest exclusive. False beyond kMaxExtent.
bool find_extent(int64_t offset, int64_t element_bytes, const int64_t* lengths, const int64_t* strides,
                 int64_t num_dims, int64_t* low, int64_t* high) {
  *low = offset;
  bool fits = !__builtin_add_overflow(offset, element_bytes, high);
  for (int64_t dim = 0; dim < num_dims; ++dim) {
    int64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(lengths[dim] - 1, strides[dim], &reach);
    int64_t* end = reach < 0 ? low : high;
    fits = fits && !__builtin_add_overflow(*end, reach, end);
  }
  return fits && -kMaxExtent <= *low && *high <= kMaxExtent;
}

// One side of all copies.
struct Side {
  const char* name;
  const std::vector<int32_t>& buffer;
  const std::vector<int64_t>& offset;
  const std::vector<int64_t>& strides;
  const std::vector<uint8_t>& dtype;
  const std::vector<int64_t>& buffer_bytes;
};

void check_side(const CopyTable& table, const Side& side, int64_t copy) {
  const int64_t buffer = side.buffer[copy];
  const auto num_buffers = static_cast<int64_t>(side.buffer_bytes.size());
  RLINF_CHECK_USER(buffer >= 0, "copy ", copy, ": ", side.name, " buffer ", buffer, " must not be negative");
  RLINF_CHECK_USER(side.buffer_bytes.empty() || buffer < num_buffers, "copy ", copy, ": ", side.name, " buffer ",
                   buffer, ", but there are ", num_buffers);
  const int64_t first = copy * table.num_dims;
  const int64_t* lengths = table.lengths.data() + first;
  if (std::find(lengths, lengths + table.num_dims, 0) != lengths + table.num_dims) {
    return;  // touches nothing
  }
  int64_t low = 0;
  int64_t high = 0;
  const bool fits = find_extent(side.offset[copy], size_of(static_cast<DataType>(side.dtype[copy])), lengths,
                                side.strides.data() + first, table.num_dims, &low, &high);
  RLINF_CHECK_USER(fits, "copy ", copy, ": its extent in ", side.name, " buffer ", buffer, " is beyond 2^60 bytes");
  RLINF_CHECK_USER(low >= 0, "copy ", copy, ": starts ", -low, " bytes before ", side.name, " buffer ", buffer);
  RLINF_CHECK_USER(side.buffer_bytes.empty() || high <= side.buffer_bytes[buffer], "copy ", copy, ": ends at byte ",
                   high, " of ", side.name, " buffer ", buffer, ", which has ", side.buffer_bytes[buffer]);
}

void check_dtypes(const CopyTable& table, int64_t copy) {
  const uint8_t src = table.src_dtype[copy];
  const uint8_t dst = table.dst_dtype[copy];
  RLINF_CHECK_USER(src < kNumDataTypes && dst < kNumDataTypes, "copy ", copy, ": dtype codes ", int{src}, " and ",
                   int{dst}, "; allowed: 0 to ", kNumDataTypes - 1);
  RLINF_CHECK_USER(src == dst || (is_castable(static_cast<DataType>(src)) && is_castable(static_cast<DataType>(dst))),
                   "copy ", copy, ": no cast from dtype code ", int{src}, " to ", int{dst},
                   "; casts exist among 0 float32, 1 bfloat16, 2 float16");
}

void check_columns(const CopyTable& table) {
  const int64_t n = table.num_copies;
  RLINF_CHECK_USER(table.num_dims >= 0 && table.num_dims <= kMaxCopyDims, "the table has ", table.num_dims,
                   " dimensions; allowed: 0 to ", kMaxCopyDims);
  const int64_t cells = n * table.num_dims;
  check_column("src_buffer", table.src_buffer, n);
  check_column("src_offset", table.src_offset, n);
  check_column("src_dtype", table.src_dtype, n);
  check_column("dst_dtype", table.dst_dtype, n);
  check_column("lengths", table.lengths, cells);
  check_column("src_strides", table.src_strides, cells);
  if (!table.dst_buffer.empty()) {
    check_column("dst_buffer", table.dst_buffer, n);
    check_column("dst_offset", table.dst_offset, n);
    check_column("dst_strides", table.dst_strides, cells);
  }
  if (!table.digest_slot.empty()) {
    check_column("digest_slot", table.digest_slot, n);
    check_column("first_index", table.first_index, n);
    check_column("index_strides", table.index_strides, cells);
  }
}

}  // namespace

namespace {

int64_t count_elements(const CopyTable& table, int64_t copy) {
  int64_t num_elements = 1;
  for (int64_t dim = 0; dim < table.num_dims; ++dim) {
    const int64_t length = table.lengths[copy * table.num_dims + dim];
    RLINF_CHECK_USER(length >= 0, "copy ", copy, ": length ", length, " of dimension ", dim, " must not be negative");
    RLINF_CHECK_USER(!__builtin_mul_overflow(num_elements, length, &num_elements), "copy ", copy,
                     ": its number of elements overflows 64 bits");
  }
  return num_elements;
}

void check_destination(const CopyTable& table, int64_t copy, int64_t num_elements) {
  for (int64_t dim = 0; dim < table.num_dims && num_elements != 0; ++dim) {
    const int64_t cell = copy * table.num_dims + dim;
    RLINF_CHECK_USER(table.lengths[cell] == 1 || table.dst_strides[cell] != 0, "copy ", copy,
                     ": writes the same bytes ", table.lengths[cell], " times, since the dst stride of dimension ", dim,
                     " is 0");
  }
}

void check_digest(const CopyTable& table, int64_t copy, int64_t num_elements) {
  const int64_t slot = table.digest_slot[copy];
  RLINF_CHECK_USER(slot >= kNone && slot < table.num_digests, "copy ", copy, ": digest ", slot, "; there are ",
                   table.num_digests);
  if (slot == kNone || num_elements == 0) {
    return;
  }
  int64_t low = 0;
  int64_t high = 0;
  const int64_t cell = copy * table.num_dims;
  const bool fits = find_extent(table.first_index[copy], 1, table.lengths.data() + cell,
                                table.index_strides.data() + cell, table.num_dims, &low, &high);
  RLINF_CHECK_USER(fits && low >= 0, "copy ", copy, ": its flat indices must lie between 0 and 2^60");
}

}  // namespace

void check_table(const CopyTable& table) {
  check_columns(table);
  const Side src{"src", table.src_buffer, table.src_offset, table.src_strides, table.src_dtype, table.src_bytes};
  const Side dst{"dst", table.dst_buffer, table.dst_offset, table.dst_strides, table.dst_dtype, table.dst_bytes};
  for (int64_t copy = 0; copy < table.num_copies; ++copy) {
    const int64_t num_elements = count_elements(table, copy);
    check_dtypes(table, copy);
    check_side(table, src, copy);
    if (!table.dst_buffer.empty()) {
      check_destination(table, copy, num_elements);
      check_side(table, dst, copy);
    }
    if (!table.digest_slot.empty()) {
      check_digest(table, copy, num_elements);
    }
  }
}

}  // namespace rlinf::comm
