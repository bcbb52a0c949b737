"""A GPU that the fake driver imitates, and an engine's stream on it, by the driver's functions."""

import ctypes
import os
import threading

import numpy as np

FAKE = os.environ.get("KVPOOL_FAKE_CUDA")


class FakeGpu:
    def __init__(self):
        self._driver = ctypes.CDLL(FAKE)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuStreamCreate", ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING
        self.stream = stream.value
        self._gates = []

    def call(self, name, *arguments):
        assert getattr(self._driver, name)(*arguments) == 0, name

    def alloc(self, count):
        """The address of so many bytes."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address.value

    def read(self, address, count):
        """They are read once the engine's stream is done."""
        array = np.empty(count, np.uint8)
        self.call("cuMemcpyDtoHAsync_v2", array.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(address), ctypes.c_size_t(count),
                  ctypes.c_void_p(self.stream))
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))
        return array

    def fill(self, address, value, count):
        """What the engine computes, on its stream."""
        self.call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(count), ctypes.c_void_p(self.stream))

    def hold_up(self):
        """The engine's stream stands still until the event that is answered is set."""
        gate = threading.Event()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait() and None)
        self._gates.append(function)  # The driver calls it later.
        self.call("cuLaunchHostFunc", ctypes.c_void_p(self.stream), function, None)
        return gate

    def is_page_locked(self, address):
        """The driver takes no memory twice."""
        address = ctypes.c_void_p(address)
        if self._driver.cuMemHostRegister_v2(address, ctypes.c_size_t(1), 0) != 0:
            return True
        self.call("cuMemHostUnregister", address)
        return False
