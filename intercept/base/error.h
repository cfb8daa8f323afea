// The errors that reft raises, with what each carries in its message.
//
// python/bindings/base.cc maps every class to the Python exception of the same name.
// Threads: values, freely copied. Errors: none.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace reft {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller is wrong: name, value and what is allowed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
  InvalidArgument(const std::string& name, const std::string& value, const std::string& allowed)
      : Error(name + " is " + value + "; allowed: " + allowed) {}
};

// A driver, library, peer or feature is absent: what, and how to get it or switch it off.
class Unavailable : public Error {
 public:
  using Error::Error;
};

// A deadline passed.
class Timeout : public Error {
 public:
  using Error::Error;
};

// Another rank or its agent failed or left.
class PeerFailure : public Error {
 public:
  using Error::Error;
};

// Checksum, version or format mismatch: where, what was expected, what was found.
class Corruption : public Error {
 public:
  using Error::Error;
};

// A system call failed.
class SystemError : public Error {
 public:
  explicit SystemError(const std::string& call, int code = errno)
      : Error(call + ": " + std::strerror(code)), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

}  // namespace reft
