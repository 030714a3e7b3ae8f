#include "rlinf/comm/delta.h"

#include <algorithm>
#include <cstring>

#include "delta_masks.h"
#include "rlinf/comm/check.h"

namespace rlinf::comm {

namespace {

constexpr uint32_t kMagic = 0x31444c52;
constexpr unsigned kKindShift = 14;
constexpr uint16_t kCountMask = (1u << kKindShift) - 1;

enum Kind : uint16_t { kNone = 0, kList = 1, kBitmap = 2, kDense = 3 };

struct Header {
  uint32_t magic;
  uint32_t element_bytes;
  uint64_t num_bytes;
  uint64_t num_changed;
};
static_assert(sizeof(Header) == 24, "as the format says");

template <typename Value>
Value load(const std::byte* from) {
  Value value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename Value>
void store(std::byte* to, Value value) {
  std::memcpy(to, &value, sizeof(value));
}

size_t num_words(size_t length) {
  return (length + 63) / 64;
}

uint64_t content_bytes(unsigned kind, size_t count, size_t length, size_t element_bytes) {
  switch (kind) {
    case kNone:
      return 0;
    case kList:
      return count * (sizeof(uint16_t) + element_bytes);
    case kBitmap:
      return num_words(length) * sizeof(uint64_t) + count * element_bytes;
    default:
      return length * element_bytes;
  }
}

Kind smallest(size_t count, size_t length, size_t element_bytes) {
  if (count == 0) {
    return kNone;
  }
  Kind best = kDense;
  for (const Kind kind : {kBitmap, kList}) {
    if (content_bytes(kind, count, length, element_bytes) < content_bytes(best, count, length, element_bytes)) {
      best = kind;
    }
  }
  return best;
}

// Calls visit(position) for every bit that is set, in increasing order.
template <typename Visit>
void for_each_bit(const uint64_t* words, size_t count, const Visit& visit) {
  for (size_t word = 0; word < count; ++word) {
    for (uint64_t bits = words[word]; bits != 0; bits &= bits - 1) {
      visit(word * 64 + static_cast<size_t>(__builtin_ctzll(bits)));
    }
  }
}

template <typename Element>
void write_chunk(Kind kind, const uint64_t* masks, size_t count, const std::byte* current, std::byte* snapshot,
                 size_t length, std::byte* out) {
  constexpr size_t kBytes = sizeof(Element);
  if (kind == kList) {
    std::byte* values = out + count * sizeof(uint16_t);
    for_each_bit(masks, num_words(length), [&](size_t position) {
      const auto value = load<Element>(current + position * kBytes);
      store(out, static_cast<uint16_t>(position));
      store(values, value);
      store(snapshot + position * kBytes, value);
      out += sizeof(uint16_t);
      values += kBytes;
    });
    return;
  }
  std::memcpy(snapshot, current, length * kBytes);
  if (kind == kDense) {
    std::memcpy(out, snapshot, length * kBytes);
    return;
  }
  std::memcpy(out, masks, num_words(length) * sizeof(uint64_t));
  out += num_words(length) * sizeof(uint64_t);
  for_each_bit(masks, num_words(length), [&](size_t position) {
    store(out, load<Element>(snapshot + position * kBytes));
    out += kBytes;
  });
}

template <typename Element>
DeltaSize encode(const std::byte* current, std::byte* snapshot, uint64_t num_bytes, std::byte* out,
                 InstructionSet instructions) {
  const uint64_t num_elements = num_bytes / sizeof(Element);
  const uint64_t num_chunks = (num_elements + kDeltaChunkElements - 1) / kDeltaChunkElements;
  uint64_t written = sizeof(Header) + num_chunks * sizeof(uint16_t);
  bool is_smaller = written < num_bytes;
  uint64_t num_changed = 0;
  uint64_t masks[kDeltaChunkElements / 64];
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const uint64_t first = chunk * kDeltaChunkElements * sizeof(Element);
    const size_t length = std::min<uint64_t>(kDeltaChunkElements, num_elements - chunk * kDeltaChunkElements);
    const size_t count = changed_elements<Element>(current + first, snapshot + first, length, masks, instructions);
    num_changed += count;
    const Kind kind = smallest(count, length, sizeof(Element));
    const uint64_t content = content_bytes(kind, count, length, sizeof(Element));
    is_smaller = is_smaller && written + content < num_bytes;
    if (!is_smaller) {
      std::memcpy(snapshot + first, current + first, length * sizeof(Element));
      continue;
    }
    store(out + sizeof(Header) + chunk * sizeof(uint16_t), static_cast<uint16_t>(kind << kKindShift | count));
    if (kind != kNone) {
      write_chunk<Element>(kind, masks, count, current + first, snapshot + first, length, out + written);
      written += content;
    }
  }
  if (!is_smaller) {
    return {0, num_changed};
  }
  store(out, Header{kMagic, sizeof(Element), num_bytes, num_changed});
  return {written, num_changed};
}

bool is_valid_chunk(unsigned kind, const std::byte* content, size_t count, size_t length) {
  if (kind == kList) {
    int last = -1;
    bool is_increasing = true;
    for (size_t i = 0; i < count; ++i) {
      const int position = load<uint16_t>(content + i * sizeof(uint16_t));
      is_increasing = is_increasing && position > last;
      last = position;
    }
    return is_increasing && last < static_cast<int>(length);
  }
  if (kind == kBitmap) {
    size_t found = 0;
    uint64_t word = 0;
    for (size_t i = 0; i < num_words(length); ++i) {
      word = load<uint64_t>(content + i * sizeof(uint64_t));
      found += static_cast<size_t>(__builtin_popcountll(word));
    }
    return found == count && (length % 64 == 0 || word >> (length % 64) == 0);
  }
  return true;
}

const char* fault_of(const Header& header, const std::byte* chunks, uint64_t num_elements, uint64_t num_chunks,
                     uint64_t delta_bytes) {
  const std::byte* content = chunks + num_chunks * sizeof(uint16_t);
  uint64_t left = delta_bytes - sizeof(Header) - num_chunks * sizeof(uint16_t);
  uint64_t num_changed = 0;
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const auto word = load<uint16_t>(chunks + chunk * sizeof(uint16_t));
    const unsigned kind = word >> kKindShift;
    const size_t count = word & kCountMask;
    const size_t length = std::min<uint64_t>(kDeltaChunkElements, num_elements - chunk * kDeltaChunkElements);
    if (count > length || (kind == kNone) != (count == 0)) {
      return "a chunk says that more elements changed than it has, or none";
    }
    const uint64_t needed = content_bytes(kind, count, length, header.element_bytes);
    if (needed > left) {
      return "it ends before its last chunk";
    }
    if (!is_valid_chunk(kind, content, count, length)) {
      return "the positions of a chunk are not increasing, outside of it or not as many as it says";
    }
    content += needed;
    left -= needed;
    num_changed += count;
  }
  if (left != 0) {
    return "there are bytes behind its last chunk";
  }
  return num_changed == header.num_changed ? nullptr : "it has not as many changed elements as it says";
}

template <typename Element>
void apply(std::byte* buffer, uint64_t num_bytes, const std::byte* chunks) {
  constexpr size_t kBytes = sizeof(Element);
  const uint64_t num_elements = num_bytes / kBytes;
  const uint64_t num_chunks = (num_elements + kDeltaChunkElements - 1) / kDeltaChunkElements;
  const std::byte* content = chunks + num_chunks * sizeof(uint16_t);
  for (uint64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const auto word = load<uint16_t>(chunks + chunk * sizeof(uint16_t));
    const unsigned kind = word >> kKindShift;
    const size_t count = word & kCountMask;
    const size_t length = std::min<uint64_t>(kDeltaChunkElements, num_elements - chunk * kDeltaChunkElements);
    std::byte* to = buffer + chunk * kDeltaChunkElements * kBytes;
    if (kind == kList) {
      const std::byte* values = content + count * sizeof(uint16_t);
      for (size_t i = 0; i < count; ++i) {
        const size_t position = load<uint16_t>(content + i * sizeof(uint16_t));
        store(to + position * kBytes, load<Element>(values + i * kBytes));
      }
    } else if (kind == kBitmap) {
      uint64_t masks[kDeltaChunkElements / 64];
      std::memcpy(masks, content, num_words(length) * sizeof(uint64_t));
      const std::byte* values = content + num_words(length) * sizeof(uint64_t);
      for_each_bit(masks, num_words(length), [&](size_t position) {
        store(to + position * kBytes, load<Element>(values));
        values += kBytes;
      });
    } else if (kind == kDense) {
      std::memcpy(to, content, length * kBytes);
    }
    content += content_bytes(kind, count, length, kBytes);
  }
}

}  // namespace

DeltaSize encode_delta(const std::byte* current, std::byte* snapshot, uint64_t num_bytes, uint32_t element_bytes,
                       std::byte* out, InstructionSet instructions) {
  RLINF_CHECK_USER(element_bytes == 1 || element_bytes == 2 || element_bytes == 4 || element_bytes == 8,
                   "element_bytes=", element_bytes, "; allowed: 1, 2, 4, 8");
  RLINF_CHECK_USER(num_bytes % element_bytes == 0, num_bytes, " bytes are no whole elements of ", element_bytes);
  switch (element_bytes) {
    case 1:
      return encode<uint8_t>(current, snapshot, num_bytes, out, instructions);
    case 2:
      return encode<uint16_t>(current, snapshot, num_bytes, out, instructions);
    case 4:
      return encode<uint32_t>(current, snapshot, num_bytes, out, instructions);
    default:
      return encode<uint64_t>(current, snapshot, num_bytes, out, instructions);
  }
}

const char* apply_delta(std::byte* buffer, uint64_t num_bytes, const std::byte* delta, uint64_t delta_bytes) {
  if (delta_bytes < sizeof(Header)) {
    return "it is shorter than its header";
  }
  const auto header = load<Header>(delta);
  if (header.magic != kMagic) {
    return "it does not begin as a delta";
  }
  const uint64_t size = header.element_bytes;
  if ((size != 1 && size != 2 && size != 4 && size != 8) || header.num_bytes % size != 0) {
    return "its element size is none of 1, 2, 4 and 8 bytes";
  }
  if (header.num_bytes != num_bytes) {
    return "it is of a buffer of another size";
  }
  const uint64_t num_elements = num_bytes / size;
  const uint64_t num_chunks = (num_elements + kDeltaChunkElements - 1) / kDeltaChunkElements;
  if ((delta_bytes - sizeof(Header)) / sizeof(uint16_t) < num_chunks) {
    return "it ends before its list of chunks";
  }
  const std::byte* chunks = delta + sizeof(Header);
  if (const char* fault = fault_of(header, chunks, num_elements, num_chunks, delta_bytes)) {
    return fault;
  }
  switch (size) {
    case 1:
      apply<uint8_t>(buffer, num_bytes, chunks);
      break;
    case 2:
      apply<uint16_t>(buffer, num_bytes, chunks);
      break;
    case 4:
      apply<uint32_t>(buffer, num_bytes, chunks);
      break;
    default:
      apply<uint64_t>(buffer, num_bytes, chunks);
  }
  return nullptr;
}

}  // namespace rlinf::comm
