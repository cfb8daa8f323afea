// What an engine knows about the devices that train, over all of its snapshots: the copy streams,
// where program points and gates lie on the training stream, which streams optimizers stepped on,
// and what the device did in each step.
//
// Regions on one device, with DeviceMarks, are followed step by step (device_placement.h); on
// several devices copies only wait for the streams that train.
//
// Threads: learn() on the first copy thread; copy() and placement() also by whoever copies. The
// rest on the thread that trains. Errors: none are thrown besides std::bad_alloc. The first call of
// the driver that fails ends snapshots of device memory: begin() and pin() refuse, why() tells the
// reason.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "intercept/base/mutex.h"
#include "snapshot/device/device_copy.h"
#include "snapshot/device/device_placement.h"
#include "snapshot/device/device_step.h"
#include "snapshot/vault/writer.h"

namespace reft {

class DeviceTracker {
 public:
  struct Learned {
    std::array<uint64_t, kTiers> untimed{};  // bytes copied, of steps whose times are lost
    std::vector<DeviceStep> steps;
    ScheduleModel::Errors errors;
  };
  enum class Begun { kYes, kCapturing, kCapturingElsewhere, kBroken };

  // `api`: of regions on devices, nullptr: this process's. `marks`: nullptr if the training stream
  // is not followed. All outlive it.
  DeviceTracker(const CudaApi* api, DeviceMarks* marks, Vault& vault, const Clock& clock);
  ~DeviceTracker();
  DeviceTracker(const DeviceTracker&) = delete;
  DeviceTracker& operator=(const DeviceTracker&) = delete;

  // -- program point --

  // The program point of `step`, as the device comes to it, if begin() was called before.
  void beginPoint(int64_t step, std::span<const DeviceStream> streams);
  // For a capture: marks the point anew if it has other streams, or was not marked yet.
  void pointOf(int64_t step, std::span<const DeviceStream> streams);
  // The next step begins. True: learn() has something to do.
  bool endPoint(uint64_t block, bool beside_copy, int64_t begin_ns, int64_t end_ns);
  // Steps that the device has ended since the call before, each with its gate.
  std::vector<DeviceStep> takeSteps() EXCLUDES(mutex_);

  // -- capture --

  // Makes copies wait for this point of the streams. kCapturing: one of `streams` captures a graph.
  Begun begin(std::span<const DeviceStream> streams);
  std::string why() const { return copy_->why(); }
  // Makes the payload of a slot fit for copies, until the vault moves it.
  bool pin(std::byte* payload, uint64_t bytes) { return copy_->pin(payload, bytes); }
  // Makes parities of a device's memory possible. False: DeviceXor::hindrance() says why, or the
  // device has failed.
  bool prepareSum(int device);
  // Whether they are possible of state on these devices, as in CaptureInput.
  bool hasSums(std::span<const int> devices) const;
  // Whether the copies of `step` can be ordered by placement().
  bool follows(int64_t step) const { return marked_step_ == step; }
  // Streams besides `streams` that may have work on the state: those that optimizers stepped on,
  // and `others`. Streams that capture do not run.
  std::vector<DeviceStream> writersBeside(std::span<const DeviceStream> streams,
                                          std::span<const DeviceStream> others);
  // Pinned memory for what is no chunk, of one snapshot at a time; nullptr: none can be had.
  std::byte* extraMemory(size_t bytes);

  // -- gate --

  // An optimizer steps on these streams.
  void stepOn(std::span<const DeviceStream> streams);
  // `hold` makes the streams wait for copies. Marked on the stream, except at a program point,
  // where a snapshot is only brought to its end.
  void gate(std::span<const DeviceStream> streams, const std::function<void()>& hold);

  // -- copy threads, from the first begin() on; placement() only if the step is followed --
  DeviceCopy& copy() { return *copy_; }
  DevicePlacement& placement() { return *placement_; }

  // Whether the device has passed marks that learn() has not read.
  bool hasMarks() const { return marks_ != nullptr && marks_->pending(); }
  // Whether learn() must be called from time to time, to give marks back.
  bool followsDevice() const { return marks_ != nullptr && marks_->following(); }
  // `report` receives what the device did since the call before; takeSteps() has it afterwards.
  void learn(const std::function<void(const Learned&)>& report) EXCLUDES(mutex_);

 private:
  void mark(int64_t step, std::span<const DeviceStream> streams);
  DeviceCopy& useDevices();

  const CudaApi* const api_;
  DeviceMarks* const marks_;
  Vault& vault_;
  const Clock& clock_;

  std::unique_ptr<DeviceCopy> copy_;                 // from the first use of a device on
  std::unique_ptr<DevicePlacement> placement_;       // from the program point behind it on
  std::atomic<DevicePlacement*> learning_{nullptr};  // placement_, for the copy thread
  int64_t marked_step_ = -1;                         // newest program point that is marked
  DeviceStream marked_;                              // where it is
  bool at_point_ = false;
  std::vector<DeviceStream> stepped_;  // on by optimizers, and may still be used
  std::byte* extra_ = nullptr;         // of copy_
  size_t extra_bytes_ = 0;

  Mutex mutex_;
  std::vector<DeviceStep> steps_ GUARDED_BY(mutex_);
};

}  // namespace reft
