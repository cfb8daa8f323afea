#include "agent/peers/admission.h"

#include <algorithm>
#include <map>

namespace reft::agent {

uint64_t surplus(const std::vector<Seat>& seats, size_t most) {
  if (seats.size() <= most) {
    return 0;
  }
  std::map<int, size_t> held;
  for (const Seat& seat : seats) {
    ++held[seat.pid];
  }
  const auto better = [&](const Seat& one, const Seat& other) {
    const size_t of_one = held[one.pid];
    const size_t of_other = held[other.pid];
    return of_one != of_other ? of_one > of_other : one.heard_ns < other.heard_ns;
  };
  return std::min_element(seats.begin(), seats.end(), better)->id;
}

}  // namespace reft::agent
