"""Copies between buffers with the GIL released: the loop goes on while a thread moves megabytes.

What a store sends is read-only, and ctypes' own from_buffer takes writable memory only: hence the buffer protocol by
hand.
"""

from __future__ import annotations

import ctypes


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


_WRITABLE = 1  # PyBUF_WRITABLE
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy all of `source`, which is as long as `destination`; both are contiguous."""
    assert destination.nbytes == source.nbytes, "a copy between lengths that differ"
    target, origin = _Buffer(), _Buffer()
    _get_buffer(destination, ctypes.byref(target), _WRITABLE)
    try:
        _get_buffer(source, ctypes.byref(origin), 0)
        try:
            _memmove(target.buf, origin.buf, source.nbytes)
        finally:
            _release_buffer(ctypes.byref(origin))
    finally:
        _release_buffer(ctypes.byref(target))
