// Fields of JSON that may be damaged: one that is absent, or of another type, is what the caller
// says.
//
// Threads: re-entrant. Errors: none (except std::bad_alloc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include <nlohmann/json.hpp>

namespace reft::json_fields {

template <typename Number>
Number number(const nlohmann::json& object, const char* key, Number otherwise) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_number()) {
    return otherwise;
  }
  if constexpr (std::is_floating_point_v<Number>) {
    return at->template get<Number>();
  } else if (at->is_number_unsigned()) {
    const auto value = at->template get<uint64_t>();
    return value <= static_cast<uint64_t>(std::numeric_limits<Number>::max())
               ? static_cast<Number>(value)
               : otherwise;
  } else if (at->is_number_integer()) {
    const auto value = at->template get<int64_t>();  // negative: others are unsigned
    return std::is_signed_v<Number> &&
                   value >= static_cast<int64_t>(std::numeric_limits<Number>::min())
               ? static_cast<Number>(value)
               : otherwise;
  }
  return otherwise;
}

// Cut after `most` bytes.
inline std::string text(const nlohmann::json& object, const char* key,
                        size_t most = std::string::npos) {
  const auto at = object.find(key);
  return at != object.end() && at->is_string() ? at->get_ref<const std::string&>().substr(0, most)
                                               : "";
}

inline bool flag(const nlohmann::json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_boolean() && at->get<bool>();
}

// Calls `body` for each object in the list of this name.
template <typename Body>
void each(const nlohmann::json& object, const char* key, Body body) {
  const auto list = object.find(key);
  if (list == object.end() || !list->is_array()) {
    return;
  }
  for (const nlohmann::json& entry : *list) {
    if (entry.is_object()) {
      body(entry);
    }
  }
}

}  // namespace reft::json_fields
