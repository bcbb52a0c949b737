#include "server/rpc/step_listener.h"

#include <chrono>

namespace kvpool {

void StepListener::Hop() {
  if (shut_ || hopping_) return;
  hopping_ = true;
  alarm_.Set(queue_->cq(), std::chrono::system_clock::time_point(), tag_);  // Long past: at once.
}

void StepListener::OnPending() {
  MutexLock lock(&mu_);
  if (in_verb_) {
    missed_ = true;
  } else {
    Hop();
  }
}

void StepListener::OnSuperseded() {
  MutexLock lock(&mu_);
  superseded_ = true;
  Hop();
}

void StepListener::BeginVerb() {
  MutexLock lock(&mu_);
  in_verb_ = true;
  missed_ = false;
}

bool StepListener::EndVerb() {
  MutexLock lock(&mu_);
  in_verb_ = false;
  return missed_;
}

void StepListener::Landed() {
  MutexLock lock(&mu_);
  hopping_ = false;
}

bool StepListener::superseded() {
  MutexLock lock(&mu_);
  return superseded_;
}

bool StepListener::Shut() {
  MutexLock lock(&mu_);
  shut_ = true;
  return hopping_;
}

}  // namespace kvpool
