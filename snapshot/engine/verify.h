// Finds regions that were written or moved between the program point and their copy.
//
// Three kinds of evidence: version counters, which move when an op on a tensor has ended; the place
// of a region's memory; and samples of the bytes (all bytes with `full`), which also show writes
// that bypass the counters. The host cannot read a device at the program point without waiting for
// it, so only regions on the host are sampled. A parity is sampled as the XOR of what it covers,
// unless some of that is on a device; samples that differ are explained by as few regions as can
// be. Early regions are copied before the point returns and are not compared.
//
// Threads: sample() by the thread that trains. copied() and lost() by copy threads, until
// compareVersions(); compareVersions() by one thread, once, when the copies have ended or read no
// counters. compareSamples() by the thread that seals, behind both. late() by any. Errors: none
// besides std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "intercept/base/mutex.h"
#include "snapshot/engine/capture_input.h"
#include "snapshot/engine/snapshot_plan.h"

namespace reft {

class Verify {
 public:
  Verify(std::shared_ptr<const SnapshotPlan> plan, int64_t step, bool full);

  // At the program point, while nothing moves memory. `devices`: as in CaptureInput.
  void sample(std::span<const std::byte* const> addresses, std::span<const int> devices,
              std::shared_ptr<const VersionReader> versions);
  // A piece of `region` was copied just now.
  void copied(uint32_t region);
  // Memory of `region` is gone.
  void lost(uint32_t region);
  // The thread that trains is between two ops. Gives the counters back.
  void compareVersions();
  // Skipped if a region is late already. `payload`: of the slot.
  void compareSamples(const std::byte* payload);

  // Regions that were written too early; empty: the copy holds the state of the program point.
  std::vector<uint32_t> late() const;
  // Whether memory of a region that is late went, or moved.
  bool anyLost() const;

 private:
  bool compares(uint32_t region) const;
  uint64_t hashOf(size_t piece, const std::byte* data) const;
  template <typename Fn>
  void eachSample(size_t parity, Fn fn) const;
  bool isSampled(const ParityPiece& parity) const;
  void sampleParities(std::span<const std::byte* const> addresses);
  void compareParities(const std::byte* payload) REQUIRES(mutex_);

  const std::shared_ptr<const SnapshotPlan> plan_;
  const uint64_t seed_;
  const bool full_;
  std::vector<bool> sampled_;            // by piece
  std::vector<uint64_t> sample_hashes_;  // by piece
  std::vector<bool> on_device_;          // by group, whether some of it is
  std::vector<uint64_t> parity_hashes_;  // of each sample, parity by parity
  std::shared_ptr<const VersionReader> versions_;
  std::vector<uint64_t> versions_at_point_;

  mutable Mutex mutex_;
  std::vector<uint32_t> late_ GUARDED_BY(mutex_);
  bool any_lost_ GUARDED_BY(mutex_) = false;
};

// What samples and lines of one step are drawn by, equal on all ranks.
uint64_t sampleSeed(int64_t step);

// Digest of each sharding group's state at the program point, equal on its members; 0 for groups
// with regions on devices. It covers lines in all of the group, and the whole of digestPart().
std::vector<uint64_t> groupDigests(const SnapshotPlan& plan,
                                   std::span<const std::byte* const> addresses,
                                   std::span<const int> devices, int64_t step);

// That of one group, all of which is on the host. `of_group`: its regions, in table order.
// `addresses`: of all regions of the table.
uint64_t groupDigest(const SnapshotTable& table, std::span<const uint32_t> of_group,
                     std::span<const std::byte* const> addresses, int64_t step);

// The part of a group's bytes that the digest of a step covers without gaps. Successive steps have
// successive parts, and when all had their turn, the next round begins with another one: memory of
// one member that was corrupted is found in the end, however little of it.
struct DigestPart {
  uint64_t begin = 0;
  uint64_t end = 0;
};
DigestPart digestPart(uint64_t bytes, int64_t step);

// Whether group `group` has regions on devices.
bool groupOnDevice(const SnapshotPlan& plan, size_t group, std::span<const int> devices);

}  // namespace reft
