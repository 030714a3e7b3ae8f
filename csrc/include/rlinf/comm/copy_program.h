// Many strided copies, casts and digests of memory, lowered once and run many times with other base pointers.
//
// A table names n copies: an N-d box of each goes from a place in a source buffer to one in a destination buffer. The
// program made from it drops dimensions of length 1, walks each box in the order of the source's addresses, fuses
// dimensions that are contiguous on both sides, joins copies that continue each other, and cuts the whole into tasks of
// about kTaskBytes. A task reads its sources in ascending order: interleaving several sources to write rows of the
// destination in order costs a third of the speed.
//
// The copies of a table are not ordered among themselves: none may read or overwrite what another writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rlinf/comm/data_type.h"
#include "rlinf/comm/digest.h"
#include "rlinf/comm/store_choice.h"

namespace rlinf::comm {

// About what a task moves. Rows of up to 16 KB so have at least 64 neighbours in their task, enough for the processor's
// prefetcher to follow; 256 KB were as good, and more tasks cost more.
constexpr int64_t kTaskBytes = int64_t{1} << 20;

// Programs that move less write through the caches, where the reader may then find the result.
constexpr int64_t kStreamingProgramBytes = int64_t{4} << 20;

constexpr int64_t kMaxCopyDims = 16;

// Columns of the table: element i of each belongs to copy i. Offsets and strides in bytes.
struct CopyTable {
  int64_t num_copies = 0;
  int64_t num_dims = 0;
  std::vector<int32_t> src_buffer;
  std::vector<int64_t> src_offset;
  std::vector<uint8_t> src_dtype;
  std::vector<int64_t> lengths;      // [num_copies, num_dims]
  std::vector<int64_t> src_strides;  // [num_copies, num_dims]
  // Empty when nothing is copied and only digests are wanted.
  std::vector<int32_t> dst_buffer;
  std::vector<int64_t> dst_offset;
  std::vector<int64_t> dst_strides;
  std::vector<uint8_t> dst_dtype;  // without a destination: the type whose digest is wanted
  // Sizes of the buffers; when given, no copy may leave its buffer, and the number of buffers is known.
  std::vector<int64_t> src_bytes;
  std::vector<int64_t> dst_bytes;
  // Empty when no digests are wanted. The sum in which a copy's values are counted (-1: none), the flat index of its
  // first element in its tensor, and the flat index's strides. Values count as the destination's type.
  std::vector<int32_t> digest_slot;
  std::vector<int64_t> first_index;
  std::vector<int64_t> index_strides;  // [num_copies, num_dims]
  int64_t num_digests = 0;
};

// Throws UserError, naming the copy and what is wrong with it.
void check_table(const CopyTable& table);

// One loop of a copy.
struct CopyLoop {
  int64_t length;
  int64_t src_stride;    // bytes
  int64_t dst_stride;    // bytes
  int64_t index_stride;  // elements; 0 where no digest is wanted
};

constexpr int32_t kNone = -1;

// A lowered copy: outer loops, the last of which steps from row to row, around a row.
struct CopyStep {
  int32_t src_buffer;
  int32_t dst_buffer;   // kNone: nothing is written
  int32_t digest_slot;  // kNone: nothing is added up
  DataType src_dtype;
  DataType dst_dtype;
  int64_t src_offset;
  int64_t dst_offset;
  int64_t first_index;
  int64_t num_rows;
  CopyLoop row;                 // innermost
  std::vector<CopyLoop> loops;  // outermost first; may be empty

  bool is_strided() const {
    return row.length > 1 &&
           (row.src_stride != size_of(src_dtype) || (dst_buffer != kNone && row.dst_stride != size_of(dst_dtype)));
  }
  // Larger of what is read and written.
  int64_t row_bytes() const {
    return row.length * (size_of(src_dtype) > size_of(dst_dtype) ? size_of(src_dtype) : size_of(dst_dtype));
  }
};

// Drops, sorts, fuses and joins.
std::vector<CopyStep> lower(const CopyTable& table);

// Rows of one step, or a part of one row.
struct CopyPart {
  int64_t step;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_column;
  int64_t num_columns;
};

class CopyProgram {
 public:
  // Throws UserError for an invalid table.
  explicit CopyProgram(const CopyTable& table);

  // Pointers: one for each buffer. digests: num_digests() sums, or null to leave them out.
  // Throws UserError for a wrong number of pointers, or a null one that is used.
  void run(const std::vector<uint64_t>& src_pointers, const std::vector<uint64_t>& dst_pointers, int num_threads,
           Digest* digests, InstructionSet instructions, Stores stores = stores_of_environment()) const;

  int64_t num_digests() const { return num_digests_; }
  int64_t num_steps() const { return static_cast<int64_t>(steps_.size()); }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()) - 1; }
  int64_t num_dst_bytes() const { return num_dst_bytes_; }

 private:
  void cut();

  std::vector<CopyStep> steps_;
  std::vector<CopyPart> parts_;
  std::vector<int64_t> tasks_;  // first part of each, and the number of parts
  std::vector<bool> is_src_used_;
  std::vector<bool> is_dst_used_;
  int64_t num_digests_ = 0;
  int64_t num_rows_ = 0;
  int64_t num_dst_bytes_ = 0;  // written; read where nothing is written
  mutable StoreChoice choices_[2];  // without digests, and with them
};

// What a part needs to run.
struct PartContext {
  const std::byte* src;  // base of the buffer
  std::byte* dst;        // likewise; null when nothing is written
  InstructionSet instructions;
  bool may_stream;
  bool wants_digest;
};

// Runs one part and returns its share of the digest.
DigestSum run_part(const CopyStep& step, const CopyPart& part, const PartContext& context);

}  // namespace rlinf::comm
