// A thread that runs a function every 100 ms and whenever it is woken: work that no verb should wait for.
#ifndef KVPOOL_SERVER_BASE_HOUSEKEEPER_H_
#define KVPOOL_SERVER_BASE_HOUSEKEEPER_H_

#include <functional>
#include <thread>

#include "proto/support/mutex.h"

namespace kvpool {

class Housekeeper {
 public:
  // Runs `round` until destroyed.
  explicit Housekeeper(std::function<void()> round);
  ~Housekeeper();
  // Starts a round now. Cheap when one is due already.
  void Wake();

 private:
  void Run(const std::function<void()>& round);

  Mutex mu_;
  CondVar wanted_;
  bool due_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_BASE_HOUSEKEEPER_H_
