// The check macros throw the right type with the right text, and only then.
#include <cstdlib>
#include <iostream>

#include "rlinf/comm/check.h"

using namespace rlinf::comm;

namespace {

template <typename Error, typename Function>
std::string text_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  throw std::runtime_error("nothing of the expected type was thrown");
}

void expect(bool condition, const std::string& what) {
  if (!condition) {
    throw std::runtime_error(what);
  }
}

}  // namespace

int main() {
  RLINF_CHECK_USER(true, "not thrown");
  RLINF_CHECK_INTERNAL(true, "not thrown");
  RLINF_CHECK_SYSTEM(true, "not thrown");
  RLINF_CHECK_NOTHROW(true, "not printed");

  const std::string user = text_of<UserError>([] { RLINF_CHECK_USER(1 > 2, "capacity=", 3, "; at least ", 4); });
  expect(user == "capacity=3; at least 4", user);
  const std::string internal = text_of<InternalError>([] { RLINF_CHECK_INTERNAL(1 > 2, "block ", 7); });
  expect(internal.find("test_check.cc:") != std::string::npos, internal);
  expect(internal.find("1 > 2 does not hold: block 7") != std::string::npos, internal);
  const std::string system = text_of<SystemError>([] {
    errno = ENOENT;
    RLINF_CHECK_SYSTEM(false, "open of ", "x");
  });
  expect(system == "open of x: No such file or directory", system);
  try {
    errno = EACCES;
    RLINF_CHECK_SYSTEM(false, "y");
  } catch (const SystemError& error) {
    expect(error.error_number() == EACCES, "the errno is lost");
  }
  RLINF_CHECK_NOTHROW(false, "this line is expected");
  std::cout << "check macros: ok\n";
  return EXIT_SUCCESS;
}
