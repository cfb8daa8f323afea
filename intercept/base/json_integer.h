// Integers out of foreign JSON.
//
// nlohmann's get<int>() converts any number: 4e26 is undefined behaviour, 2^32 + 5 becomes 5. Here
// a number that is not an integer of the type is an error.
//
// Threads: any. Errors: InvalidArgument.
#pragma once

#include <concepts>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "intercept/base/error.h"

namespace reft {

template <std::integral T>
T integerOf(const nlohmann::json& value) {
  if (value.is_number_unsigned() && std::in_range<T>(value.get<uint64_t>())) {
    return static_cast<T>(value.get<uint64_t>());
  }
  if (value.is_number_integer() && !value.is_number_unsigned() &&
      std::in_range<T>(value.get<int64_t>())) {
    return static_cast<T>(value.get<int64_t>());
  }
  throw InvalidArgument(
      value.is_number() ? "a number" : "a value",
      value.is_number() ? value.dump() : std::string("of type ") + value.type_name(),
      "integers in " + std::to_string(std::numeric_limits<T>::min()) + ".." +
          std::to_string(std::numeric_limits<T>::max()));
}

template <std::integral T>
std::vector<T> integersOf(const nlohmann::json& array) {
  if (!array.is_array()) {
    throw InvalidArgument("a value", std::string("of type ") + array.type_name(),
                          "an array of integers");
  }
  std::vector<T> integers;
  integers.reserve(array.size());
  for (const nlohmann::json& value : array) {
    integers.push_back(integerOf<T>(value));
  }
  return integers;
}

}  // namespace reft
