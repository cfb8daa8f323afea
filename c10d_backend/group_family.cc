#include "c10d_backend/group_family.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d_backend/backend.h"

namespace reft {

namespace {

StorePtr prefixed(const std::string& prefix, const StorePtr& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

std::string nameOf(const OptionsPtr& opts) {
  return opts ? opts->group_name : std::string();
}

}  // namespace

StorePtr GroupFamily::ownStore(const std::string& key, const StorePtr& store) const {
  return prefixed(parts_.store_prefix + key, store);
}

BackendPtr GroupFamily::child(BackendPtr cpu, BackendPtr cuda, int rank, int size, StorePtr store,
                              const std::string& name) const {
  BackendParts parts;
  parts.cpu = std::move(cpu);
  parts.cuda = std::move(cuda);
  parts.store = std::move(store);
  parts.store_prefix = parts_.store_prefix;
  parts.group_name = name;
  parts.make_cpu = parts_.make_cpu;
  return c10::make_intrusive<ReftBackend>(std::move(parts), rank, size, log_);
}

BackendPtr GroupFamily::split(const StorePtr& store, const std::vector<int>& ranks,
                              const OptionsPtr& opts, std::chrono::milliseconds timeout) {
  const std::string name = nameOf(opts);
  const MutexLock lock(mutex_);
  if (const auto found = children_.find(name); found != children_.end() && !name.empty()) {
    if (BackendPtr known = found->second.lock()) {
      return known;
    }
  }
  const StorePtr own = ownStore("split/" + name, store);
  const auto place = std::find(ranks.begin(), ranks.end(), rank_);
  const bool member = place != ranks.end();
  const int rank = static_cast<int>(place - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  BackendPtr cuda;
  BackendPtr cpu;
  if (parts_.cuda) {
    // Every rank of the parent takes part in NCCL's split, members or not.
    cuda = parts_.cuda->split(prefixed("cuda", own), ranks, opts);
  }
  if (parts_.cpu && member) {
    const StorePtr cpu_store = prefixed("cpu", own);
    cpu = parts_.cuda && parts_.make_cpu  // `opts` are NCCL's
              ? parts_.make_cpu(cpu_store, rank, size, timeout, name)
              : parts_.cpu->split(cpu_store, ranks, opts);
  }
  split_count_.fetch_add(1);
  if (!cuda && !cpu) {
    return nullptr;
  }
  BackendPtr made = child(std::move(cpu), std::move(cuda), rank, size, own, name);
  if (!name.empty()) {
    children_.insert_or_assign(name, c10::weak_intrusive_ptr<c10d::Backend>(made));
  }
  return made;
}

BackendPtr GroupFamily::merge(const StorePtr& store, const OptionsPtr& opts, int rank, int size,
                              std::chrono::milliseconds timeout) {
  const std::string name = nameOf(opts);
  const StorePtr own = ownStore("merge/" + name, store);
  BackendPtr cuda;
  BackendPtr cpu;
  if (parts_.cuda) {
    cuda = parts_.cuda->merge(prefixed("cuda", own), opts, rank, size);
  }
  if (parts_.cpu) {
    const StorePtr cpu_store = prefixed("cpu", own);
    cpu = parts_.make_cpu ? parts_.make_cpu(cpu_store, rank, size, timeout, name)
                          : parts_.cpu->merge(cpu_store, opts, rank, size);
  }
  return child(std::move(cpu), std::move(cuda), rank, size, own, name);
}

BackendPtr GroupFamily::shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                               const OptionsPtr& opts_override, std::chrono::milliseconds timeout) {
  TORCH_CHECK(parts_.cuda, "Backend reft does not support shrink without NCCL");
  BackendPtr cuda = parts_.cuda->shrink(ranks_to_exclude, shrink_flags, opts_override);
  const std::string name =
      parts_.group_name + ":shrunk:" + std::to_string(shrink_count_.fetch_add(1));
  const int rank = cuda->getRank();
  const int size = cuda->getSize();
  BackendPtr cpu;
  StorePtr own = parts_.store;
  if (parts_.cpu && parts_.make_cpu && parts_.store) {
    own = prefixed(name, parts_.store);
    cpu = parts_.make_cpu(prefixed("cpu", own), rank, size, timeout, name);
  }
  return child(std::move(cpu), std::move(cuda), rank, size, std::move(own), name);
}

}  // namespace reft
