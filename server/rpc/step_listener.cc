#include "server/rpc/step_listener.h"

namespace kvpool {

void StepListener::Wake() {
  if (shut_ || waking_) return;
  waking_ = true;
  alarm_->Set(tag_);
}

void StepListener::OnPending() {
  MutexLock lock(&mu_);
  if (in_verb_) {
    missed_ = true;
  } else {
    Wake();
  }
}

void StepListener::OnSuperseded() {
  MutexLock lock(&mu_);
  superseded_ = true;
  Wake();
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

void StepListener::WakeArrived() {
  MutexLock lock(&mu_);
  waking_ = false;
}

bool StepListener::superseded() {
  MutexLock lock(&mu_);
  return superseded_;
}

bool StepListener::Shut() {
  MutexLock lock(&mu_);
  shut_ = true;
  return waking_;
}

}  // namespace kvpool
