// Is part of programs that start no thread, which the thread sanitizer's build leaves out for that reason: what starts one all the
// same ends the program.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>

extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept {
  std::fputs("a thread, in a program that is left out of the thread sanitizer's build for having none\n",
             stderr);
  std::abort();
}
