// The Python module `reft._C`: one function per folder binds what that folder gives.
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include "python/bindings/backend.h"
#include "python/bindings/base.h"
#include "python/bindings/bulk.h"
#include "python/bindings/device_activity.h"
#include "python/bindings/evidence_exchange.h"
#include "python/bindings/frames.h"
#include "python/bindings/hang.h"
#include "python/bindings/moments.h"
#include "python/bindings/restore.h"
#include "python/bindings/sets.h"
#include "python/bindings/simulate.h"
#include "python/bindings/snapshot.h"
#include "python/bindings/tensors.h"
#include "python/bindings/timeline.h"
#include "python/bindings/value_seal.h"
#include "python/bindings/vaults.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native part of reft.";
  module.attr("torch_version") = TORCH_VERSION;  // that it was compiled for
  reft::bindBase(module);                        // first: it registers the exceptions
  reft::bindValueSeal(module);
  reft::bindBackend(module);
  reft::bindSnapshot(module);
  reft::bindRestore(module);
  reft::bindVaults(module);
  reft::bindEvidenceExchange(module);
  reft::bindHang(module);
  reft::bindDeviceActivity(module);
  reft::bindFrames(module);
  reft::bindSets(module);
  reft::bindBulk(module);
  reft::bindTensors(module);
  reft::bindMoments(module);
  reft::bindSimulate(module);
  reft::bindTimeline(module);
}
