// kvpool._core: the C++ client in Python. People import kvpool/__init__.py.
#include <nanobind/nanobind.h>

#include "client/python/src/bind.h"
#include "client/python/src/view.h"
#include "kvpool/version.h"

NB_MODULE(_core, module) {
  using namespace kvpool::python;
  module.def("version", &kvpool::Version, "kvpool's, \"0.1.0\": `kvpool.__version__`.");
  RegisterErrors();
  BindLayout(module);
  BindView(module);
  BindBlocks(module);
  BindCopies(module);
  BindSession(module);
  BindScoring(module);
  BindSequence(module);
  BindSharing(module);
  BindDevice(module);
  BindEpisodes(module);
}
