// MessagePack, as much of it as the codec's headers use: nil, bool, integers of 64 bits, doubles, text, bytes, arrays
// and maps. Nothing here knows Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace rlinf::comm {

// Appends to a string.
class MsgpackWriter {
 public:
  explicit MsgpackWriter(std::string* out) : out_(*out) {}

  void nil() { byte(0xc0); }
  void boolean(bool value) { byte(value ? 0xc3 : 0xc2); }
  void integer(int64_t value) {
    if (value >= 0) {
      natural(static_cast<uint64_t>(value));
    } else if (value >= -32) {
      byte(static_cast<uint8_t>(value));
    } else if (value >= INT8_MIN) {
      tagged<uint8_t>(0xd0, static_cast<uint8_t>(value));
    } else if (value >= INT16_MIN) {
      tagged<uint16_t>(0xd1, static_cast<uint16_t>(value));
    } else if (value >= INT32_MIN) {
      tagged<uint32_t>(0xd2, static_cast<uint32_t>(value));
    } else {
      tagged<uint64_t>(0xd3, static_cast<uint64_t>(value));
    }
  }
  void natural(uint64_t value) {
    if (value < 0x80) {
      byte(static_cast<uint8_t>(value));
    } else if (value <= UINT8_MAX) {
      tagged<uint8_t>(0xcc, static_cast<uint8_t>(value));
    } else if (value <= UINT16_MAX) {
      tagged<uint16_t>(0xcd, static_cast<uint16_t>(value));
    } else if (value <= UINT32_MAX) {
      tagged<uint32_t>(0xce, static_cast<uint32_t>(value));
    } else {
      tagged<uint64_t>(0xcf, value);
    }
  }
  size_t size() const { return out_.size(); }
  // A natural in kWideBytes, for a value that is filled in later: see fill_wide().
  void wide(uint64_t value) { tagged<uint64_t>(0xcf, value); }
  static constexpr size_t kWideBytes = 9;
  // Overwrites the value that wide() wrote at `bytes`.
  static void fill_wide(char* bytes, uint64_t value) {
    for (size_t i = 1; i < kWideBytes; ++i) {
      bytes[i] = static_cast<char>(value >> (8 * (kWideBytes - 1 - i)));
    }
  }
  void real(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    tagged<uint64_t>(0xcb, bits);
  }
  void text(std::string_view value) {
    if (value.size() < 32) {
      byte(static_cast<uint8_t>(0xa0 | value.size()));
    } else {
      length(0xd9, value.size());
    }
    out_.append(value);
  }
  void binary(std::string_view value) {
    length(0xc4, value.size());
    out_.append(value);
  }
  // The elements follow.
  void array(uint64_t size) { container(0x90, 0xdc, size); }
  // Keys and values follow, in turn.
  void map(uint64_t size) { container(0x80, 0xde, size); }

 private:
  void byte(uint8_t value) { out_.push_back(static_cast<char>(value)); }
  template <typename Word>
  void tagged(uint8_t tag, Word value) {
    char bytes[1 + sizeof(Word)];
    bytes[0] = static_cast<char>(tag);
    for (size_t i = 0; i < sizeof(Word); ++i) {
      bytes[1 + i] = static_cast<char>(value >> (8 * (sizeof(Word) - 1 - i)));
    }
    out_.append(bytes, sizeof(bytes));
  }
  // `tag` for a length of 8 bits; the next two are for 16 and 32 bits.
  void length(uint8_t tag, uint64_t size) {
    if (size <= UINT8_MAX) {
      tagged<uint8_t>(tag, static_cast<uint8_t>(size));
    } else {
      long_length(static_cast<uint8_t>(tag + 1), size);
    }
  }
  void container(uint8_t small_tag, uint8_t tag, uint64_t size) {
    if (size < 16) {
      byte(static_cast<uint8_t>(small_tag | size));
    } else {
      long_length(tag, size);
    }
  }
  void long_length(uint8_t tag, uint64_t size) {
    if (size <= UINT16_MAX) {
      tagged<uint16_t>(tag, static_cast<uint16_t>(size));
    } else if (size <= UINT32_MAX) {
      tagged<uint32_t>(static_cast<uint8_t>(tag + 1), static_cast<uint32_t>(size));
    } else {
      throw std::invalid_argument("more than 4294967295 elements or bytes in one container, text or bytes object");
    }
  }

  std::string& out_;
};

// Bytes that are no MessagePack, or not what the codec writes.
class MalformedError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Walks over bytes that anybody may have sent, and never reads beyond their end. No size it returns exceeds what is
// left; that the sizes of nested containers hold all together is what check_msgpack() makes sure of.
class MsgpackReader {
 public:
  enum class Kind { kNil, kBool, kInteger, kNatural, kReal, kText, kBinary, kArray, kMap };
  struct Token {
    Kind kind;
    union {
      bool boolean;
      int64_t integer;   // kInteger
      uint64_t natural;  // kNatural: beyond int64_t
      double real;
      uint64_t size;  // kArray, kMap
    };
    std::string_view bytes;  // kText, kBinary
  };

  explicit MsgpackReader(std::string_view bytes) : cursor_(bytes.data()), end_(bytes.data() + bytes.size()) {}

  bool at_end() const { return cursor_ == end_; }
  const char* cursor() const { return cursor_; }

  Token next() {
    const uint8_t tag = word<uint8_t>();
    Token token;
    if (tag < 0x80) {
      return integer(tag);
    }
    if (tag >= 0xe0) {
      return integer(static_cast<int8_t>(tag));
    }
    if (tag < 0x90) {
      return container(Kind::kMap, tag & 0x0f);
    }
    if (tag < 0xa0) {
      return container(Kind::kArray, tag & 0x0f);
    }
    if (tag < 0xc0) {
      return bytes(Kind::kText, tag & 0x1f);
    }
    switch (tag) {
      case 0xc0:
        token.kind = Kind::kNil;
        return token;
      case 0xc2:
      case 0xc3:
        token.kind = Kind::kBool;
        token.boolean = tag == 0xc3;
        return token;
      case 0xc4:
        return bytes(Kind::kBinary, word<uint8_t>());
      case 0xc5:
        return bytes(Kind::kBinary, word<uint16_t>());
      case 0xc6:
        return bytes(Kind::kBinary, word<uint32_t>());
      case 0xcb: {
        const uint64_t bits = word<uint64_t>();
        token.kind = Kind::kReal;
        std::memcpy(&token.real, &bits, sizeof(bits));
        return token;
      }
      case 0xcc:
        return integer(word<uint8_t>());
      case 0xcd:
        return integer(word<uint16_t>());
      case 0xce:
        return integer(word<uint32_t>());
      case 0xcf: {
        const uint64_t value = word<uint64_t>();
        if (value <= INT64_MAX) {
          return integer(static_cast<int64_t>(value));
        }
        token.kind = Kind::kNatural;
        token.natural = value;
        return token;
      }
      case 0xd0:
        return integer(static_cast<int8_t>(word<uint8_t>()));
      case 0xd1:
        return integer(static_cast<int16_t>(word<uint16_t>()));
      case 0xd2:
        return integer(static_cast<int32_t>(word<uint32_t>()));
      case 0xd3:
        return integer(static_cast<int64_t>(word<uint64_t>()));
      case 0xd9:
        return bytes(Kind::kText, word<uint8_t>());
      case 0xda:
        return bytes(Kind::kText, word<uint16_t>());
      case 0xdb:
        return bytes(Kind::kText, word<uint32_t>());
      case 0xdc:
        return container(Kind::kArray, word<uint16_t>());
      case 0xdd:
        return container(Kind::kArray, word<uint32_t>());
      case 0xde:
        return container(Kind::kMap, word<uint16_t>());
      case 0xdf:
        return container(Kind::kMap, word<uint32_t>());
      default:
        throw MalformedError("a byte that starts nothing");
    }
  }

  uint64_t array_size() { return expect(Kind::kArray).size; }
  std::string_view text() { return expect(Kind::kText).bytes; }
  // A number from 0 up.
  uint64_t count() {
    const int64_t value = expect(Kind::kInteger).integer;
    if (value < 0) {
      throw MalformedError("a negative count");
    }
    return static_cast<uint64_t>(value);
  }
  // A number from 0 up, also beyond int64_t.
  uint64_t natural() {
    const Token token = next();
    if (token.kind == Kind::kNatural) {
      return token.natural;
    }
    if (token.kind != Kind::kInteger || token.integer < 0) {
      throw MalformedError("no natural number");
    }
    return static_cast<uint64_t>(token.integer);
  }

 private:
  Token expect(Kind kind) {
    const Token token = next();
    if (token.kind != kind) {
      throw MalformedError("an element of another kind than expected");
    }
    return token;
  }
  template <typename Word>
  Word word() {
    require(sizeof(Word));
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(Word); ++i) {
      value = value << 8 | static_cast<uint8_t>(cursor_[i]);
    }
    cursor_ += sizeof(Word);
    return static_cast<Word>(value);
  }
  void require(uint64_t num_bytes) const {
    if (static_cast<uint64_t>(end_ - cursor_) < num_bytes) {
      throw MalformedError("cut short");
    }
  }
  Token integer(int64_t value) const {
    Token token;
    token.kind = Kind::kInteger;
    token.integer = value;
    return token;
  }
  Token container(Kind kind, uint64_t size) const {
    require(kind == Kind::kMap ? 2 * size : size);
    Token token;
    token.kind = kind;
    token.size = size;
    return token;
  }
  Token bytes(Kind kind, uint64_t size) {
    require(size);
    Token token;
    token.kind = kind;
    token.bytes = std::string_view(cursor_, size);
    cursor_ += size;
    return token;
  }

  const char* cursor_;
  const char* end_;
};

// Deepest nesting of arrays and maps that check_msgpack() lets pass.
constexpr size_t kMaxMsgpackDepth = 258;

// Walks over all of `bytes` and takes no memory: MalformedError unless they are one whole element with nothing behind
// it, every container holds what it claims, and none is nested too deeply. A caller may then allocate by every size.
inline void check_msgpack(std::string_view bytes) {
  MsgpackReader reader(bytes);
  std::array<uint64_t, kMaxMsgpackDepth + 1> num_left;  // elements to come, of each container that is open
  num_left[0] = 1;
  for (size_t depth = 0;;) {
    if (num_left[depth] == 0) {
      if (depth-- == 0) {
        break;
      }
      continue;
    }
    --num_left[depth];
    const MsgpackReader::Token token = reader.next();
    const bool is_map = token.kind == MsgpackReader::Kind::kMap;
    if (is_map || token.kind == MsgpackReader::Kind::kArray) {
      if (depth == kMaxMsgpackDepth) {
        throw MalformedError("containers nested more than " + std::to_string(kMaxMsgpackDepth) + " deep");
      }
      num_left[++depth] = is_map ? 2 * token.size : token.size;
    }
  }
  if (!reader.at_end()) {
    throw MalformedError("bytes after the end");
  }
}

}  // namespace rlinf::comm
