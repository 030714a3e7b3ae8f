#include "rlinf/comm/box_copy.h"

#include <cstring>

#include "rlinf/comm/memory_copy.h"

namespace rlinf::comm {

namespace {

// Outermost first; drops axes of length 1 and fuses neighbours that are contiguous in both buffers.
std::vector<CopyAxis> fuse(const std::vector<CopyAxis>& axes) {
  std::vector<CopyAxis> fused;
  for (const CopyAxis& axis : axes) {
    if (axis.length == 1) {
      continue;
    }
    if (!fused.empty() && fused.back().source_stride == axis.source_stride * axis.length &&
        fused.back().destination_stride == axis.destination_stride * axis.length) {
      fused.back() = CopyAxis{fused.back().length * axis.length, axis.source_stride, axis.destination_stride};
    } else {
      fused.push_back(axis);
    }
  }
  return fused;
}

template <typename Element>
void copy_strided_row(std::byte* destination, const std::byte* source, const CopyAxis& axis) {
  for (int64_t i = 0; i < axis.length; ++i) {
    Element element;
    std::memcpy(&element, source + i * axis.source_stride, sizeof(Element));
    std::memcpy(destination + i * axis.destination_stride, &element, sizeof(Element));
  }
}

void copy_row(std::byte* destination, const std::byte* source, uint64_t element_bytes, const CopyAxis& axis) {
  struct Element16 {
    uint64_t words[2];
  };
  switch (element_bytes) {
    case 1:
      return copy_strided_row<uint8_t>(destination, source, axis);
    case 2:
      return copy_strided_row<uint16_t>(destination, source, axis);
    case 4:
      return copy_strided_row<uint32_t>(destination, source, axis);
    case 8:
      return copy_strided_row<uint64_t>(destination, source, axis);
    case 16:
      return copy_strided_row<Element16>(destination, source, axis);
    default:
      for (int64_t i = 0; i < axis.length; ++i) {
        std::memcpy(destination + i * axis.destination_stride, source + i * axis.source_stride, element_bytes);
      }
  }
}

void copy_axes(std::byte* destination, const std::byte* source, uint64_t run_bytes, const CopyAxis* axes,
               size_t num_axes) {
  if (num_axes == 0) {
    copy_bytes(destination, source, run_bytes);
    return;
  }
  if (num_axes == 1) {
    if (run_bytes <= 16) {
      copy_row(destination, source, run_bytes, axes[0]);
      return;
    }
    for (int64_t i = 0; i < axes[0].length; ++i) {
      copy_bytes(destination + i * axes[0].destination_stride, source + i * axes[0].source_stride, run_bytes);
    }
    return;
  }
  for (int64_t i = 0; i < axes[0].length; ++i) {
    copy_axes(destination + i * axes[0].destination_stride, source + i * axes[0].source_stride, run_bytes, axes + 1,
              num_axes - 1);
  }
}

}  // namespace

void copy_box(std::byte* destination, const std::byte* source, uint64_t element_bytes, std::vector<CopyAxis> axes) {
  for (const CopyAxis& axis : axes) {
    if (axis.length == 0) {
      return;
    }
  }
  axes = fuse(axes);
  uint64_t run_bytes = element_bytes;
  const auto element_stride = static_cast<int64_t>(element_bytes);
  if (!axes.empty() && axes.back().source_stride == element_stride &&
      axes.back().destination_stride == element_stride) {
    run_bytes *= static_cast<uint64_t>(axes.back().length);
    axes.pop_back();
  }
  copy_axes(destination, source, run_bytes, axes.data(), axes.size());
}

}  // namespace rlinf::comm
