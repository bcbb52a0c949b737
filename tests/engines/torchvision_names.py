"""SGLang imports torchvision on the way to its HiCache, and there is none for this torch: what it takes of it are names.

Imported before SGLang.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

from transformers.utils import import_utils


class _Members(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision, in which every name is a class."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        def name(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return types.new_class(name, (), {"metaclass": _Members})
        module = types.ModuleType(spec.name)
        module.__getattr__ = name
        return module

    def exec_module(self, module):
        pass


if importlib.util.find_spec("torchvision") is None:
    # Transformers has looked for it by then, and found none.
    import_utils.is_torchvision_available()
    sys.meta_path.insert(0, _Names())
