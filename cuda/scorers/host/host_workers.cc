#include "cuda/scorers/host/host_workers.h"

#include "proto/support/check.h"
#include "proto/support/named_thread.h"

namespace kvpool {

HostWorkers::HostWorkers(uint32_t threads) {
  KVPOOL_CHECK(threads >= 1 && threads <= 1024, "%u threads", threads);
  for (uint32_t worker = 1; worker < threads; ++worker)
    threads_.push_back(NamedThread("host-worker", [this, worker] { Loop(worker); }));
}

HostWorkers::~HostWorkers() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void HostWorkers::Run(uint32_t items, Work work) {
  MutexLock run_lock(&run_mu_);
  if (threads_.empty() || items <= 1) {
    for (uint32_t item = 0; item < items; ++item) work(item, 0);
    return;
  }
  {
    MutexLock lock(&mu_);
    work_ = &work;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    ++round_;
  }
  changed_.SignalAll();
  Take(work, items, 0);
  MutexLock lock(&mu_);
  // A thread that has not woken yet finds no work; one that has is counted in busy_.
  work_ = nullptr;
  while (busy_ > 0) changed_.Wait(&mu_);
}

void HostWorkers::Loop(uint32_t worker) {
  uint64_t seen = 0;
  MutexLock lock(&mu_);
  while (true) {
    while (!stopping_ && (work_ == nullptr || round_ == seen)) changed_.Wait(&mu_);
    if (stopping_) return;
    seen = round_;
    const Work work = *work_;
    const uint32_t items = items_;
    ++busy_;
    mu_.Unlock();
    Take(work, items, worker);
    mu_.Lock();
    if (--busy_ == 0) changed_.SignalAll();
  }
}

void HostWorkers::Take(const Work& work, uint32_t items, uint32_t worker) {
  while (true) {
    const uint32_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= items) return;
    work(item, worker);
  }
}

}  // namespace kvpool
