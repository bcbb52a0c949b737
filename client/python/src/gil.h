// Python's lock, released for a while.
#ifndef KVPOOL_CLIENT_PYTHON_SRC_GIL_H_
#define KVPOOL_CLIENT_PYTHON_SRC_GIL_H_

#include <nanobind/nanobind.h>

namespace kvpool::python {

// Use this and not nanobind's: it also knows whether a thread has the lock, which the stable ABI can't say.
class GilRelease {
 public:
  GilRelease() { released_here_ = true; }
  ~GilRelease() { released_here_ = false; }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

  // Does this thread have the lock?
  static bool Held() { return !released_here_ && PyGILState_GetThisThreadState() != nullptr; }

 private:
  static inline thread_local bool released_here_ = false;
  const nanobind::gil_scoped_release released_;
};

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_GIL_H_
