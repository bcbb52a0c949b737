// Whether a file is still the one that was read: what replaces it, as Kubernetes does it with a Secret and operators with a
// rename, is another file, and what is written over it has another time.
#ifndef KVPOOL_SERVER_TIERS_FILE_MARK_H_
#define KVPOOL_SERVER_TIERS_FILE_MARK_H_

#include <sys/stat.h>

#include <string>

namespace kvpool {

class FileMark {
 public:
  // The file as it is now. It is marked before it is read: one that changes meanwhile is another one afterwards.
  void Set(const std::string& path) {
    struct stat facts {};
    if (stat(path.c_str(), &facts) == 0) facts_ = facts;
  }
  bool Holds(const std::string& path) const {
    struct stat facts {};
    return stat(path.c_str(), &facts) == 0 && facts.st_dev == facts_.st_dev &&
           facts.st_ino == facts_.st_ino && facts.st_size == facts_.st_size &&
           Same(facts.st_mtim, facts_.st_mtim) && Same(facts.st_ctim, facts_.st_ctim);
  }

 private:
  static bool Same(const timespec& a, const timespec& b) {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
  }
  struct stat facts_ {};
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_TIERS_FILE_MARK_H_
