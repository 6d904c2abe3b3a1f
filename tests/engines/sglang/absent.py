"""Packages that SGLang imports at its top and a machine without a GPU has no use for: they can be imported, not used.

Triton's kernels and torchvision's operators are named at import time by modules beside those under test. What stands in
for them does nothing: as a decorator it returns the function, which can't be launched as a kernel. So none of what the
tests see is made up here; all of hicache_storage.py, of the backend factory, of the host pools and of the cache
controller is SGLang's own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

PACKAGES = ("triton", "torchvision", "sgl_kernel")


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        return _named(cls.__name__, name)


class _Class(metaclass=_Kind):
    """What a class of an absent package is derived from: anything makes one, and nothing is one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass


class _Nothing:
    """Any other name of an absent package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name == "active":
            raise RuntimeError("no driver")  # as triton.runtime.driver says where there is no GPU
        return _named(self._name, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and not named and isinstance(arguments[0], (types.FunctionType, type)):
            return arguments[0]  # @jit
        return _Nothing(f"{self._name}()")  # @jit(...), or what a decorator is given


def _named(package: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (_Class,), {}) if name[:1].isupper() else _Nothing(f"{package}.{name}")


class _Package(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "3.0.0"
        return _named(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in() -> None:
    """Let the absent packages be imported from now on, where they are not installed."""
    importlib.import_module("torch.utils.flop_counter")
    is_there = importlib.import_module("transformers.utils").is_torchvision_available
    assert not is_there()  # what asks first gets the true answer, and remembers it
    sys.meta_path.append(_Finder())
