// Driver functions that kvpool itself does not call, for tests.
#ifndef KVPOOL_TESTS_DEVICE_DRIVER_FUNCTION_H_
#define KVPOOL_TESTS_DEVICE_DRIVER_FUNCTION_H_

#include <dlfcn.h>

#include <cstdlib>

namespace kvpool {

// A function of the driver that LoadDriver (cuda/driver/driver.h) has loaded; nullptr where the driver has
// none of this name.
inline void* FindDriverFunction(const char* name) {
  const char* const path = std::getenv("KVPOOL_LIBCUDA");
  return ::dlsym(::dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_DEVICE_DRIVER_FUNCTION_H_
