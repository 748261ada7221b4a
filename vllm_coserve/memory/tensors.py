"""A torch tensor over an address range, without a copy and without a look at what is mapped there.

By DLPack: torch's other ways to take device memory ask CUDA what lies at the address, and nothing does yet.
"""

from __future__ import annotations

import ctypes
from typing import Any

_CPU, _CUDA = 1, 2  # DLDeviceType
_INT = 0  # DLDataTypeCode
_alive: list[Any] = []  # descriptions of tensors, some bytes each: torch may look at them for as long as it runs


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def int8_over(address: int, nbytes: int, device_type: str, index: int = 0) -> Any:
    """A tensor int8[nbytes] whose memory is `address` on a device; whoever owns the range keeps it for as long.

    Args:
        address: first byte; nothing needs to be mapped there yet.
        nbytes: size of the tensor.
        device_type: "cpu" or "cuda".
        index: of the device.
    """
    import torch

    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _DLManagedTensor()
    tensor = managed.dl_tensor
    tensor.data, tensor.ndim, tensor.shape = address, 1, shape
    tensor.device_type, tensor.device_id = {"cpu": _CPU, "cuda": _CUDA}[device_type], index
    tensor.code, tensor.bits, tensor.lanes = _INT, 8, 1
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    _alive.append((managed, shape))  # no deleter: nothing is to be done when the tensor goes
    return torch.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
