"""A fake of `cuda.bindings.driver` that is as strict as CUDA's documentation: what CUDA may refuse, it refuses.

`Board` is the device: it knows how much memory is left. `FakeCuda` is what one process has of it. Physical memory is a
memory file, so that handles are real descriptors, which may go to another process that has a board of its own.

Every call is counted, and one can be made to fail: before it does anything, after it has done all, or half way.
"""

import os
import threading
from enum import IntEnum
from types import SimpleNamespace

GRANULARITY = 4096
GARBAGE = 0xCD  # what new memory holds


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUstream_flags(IntEnum):
    CU_STREAM_DEFAULT = 0
    CU_STREAM_NON_BLOCKING = 1


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


class CUmemAllocationProp:
    def __init__(self):
        self.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
        self.requestedHandleTypes = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        self.location = SimpleNamespace(type=CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID, id=-1)


class CUmemAccessDesc:
    def __init__(self):
        self.location = SimpleNamespace(type=CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID, id=-1)
        self.flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


class Error(Exception):
    def __init__(self, code):
        self.code = code


def need(condition, code=CUresult.CUDA_ERROR_INVALID_VALUE):
    if not condition:
        raise Error(code)


class Memory:
    """Physical memory: alive while something refers to its file, in whatever process."""

    def __init__(self, fd, size, shareable):
        self.fd, self.size, self.shareable = fd, size, shareable
        self.inode = os.fstat(fd).st_ino

    def __del__(self):
        os.close(self.fd)


class Mapping:
    def __init__(self, size, memory, handle):
        self.size, self.memory, self.handle, self.accessible = size, memory, handle, False


class Board:
    """The device, as all fake processes of one real process share it."""

    def __init__(self, capacity_bytes=1 << 40):
        self.capacity_bytes, self.processes = capacity_bytes, []

    def memories(self):
        return {m.inode: m for p in self.processes for m in p.memories()}

    @property
    def used_bytes(self):
        return sum(m.size for m in self.memories().values())


class FakeCuda:
    """Stands in for the module `cuda.bindings.driver` in one process.

    Attributes:
        calls: names of all calls so far.
        fail_at: numbers of the calls that fail, from 1 on, or one number, or None.
        how: "before", "after" or "half" (of an unmapping).
        violations: what a real device would have ended the process for.
    """

    CUresult, CUmemAllocationType, CUmemLocationType = CUresult, CUmemAllocationType, CUmemLocationType
    CUmemAllocationHandleType, CUmemAccess_flags = CUmemAllocationHandleType, CUmemAccess_flags
    CUmemAllocationGranularity_flags, CUstream_flags = CUmemAllocationGranularity_flags, CUstream_flags
    CUdevice_attribute, CUmemAllocationProp = CUdevice_attribute, CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc

    def __init__(self, board=None, exports=True, handle_attribute=1):
        self.board = board or Board()
        self.board.processes.append(self)
        self.exports, self.handle_attribute = exports, handle_attribute
        self.calls, self.fail_at, self.how = [], None, "before"
        self.fail_code = CUresult.CUDA_ERROR_UNKNOWN
        self.violations = []
        self._initialised, self._thread = False, threading.local()
        self._handles, self._next_handle = {}, 100  # handle -> [memory, references]
        self._reservations, self._next_address = {}, 1 << 40
        self.mappings = {}  # address -> Mapping
        self.kernels = []  # (address, nbytes, byte to write or None), given to the device and not waited for
        self.streams, self._next_stream = {}, 7  # stream -> queued memsets

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = getattr(type(self), "_" + name)

        def call(*args):
            if name.startswith("cuGetError"):
                return (CUresult.CUDA_SUCCESS, function(self, *args))
            self.calls.append(name)
            numbers = self.fail_at if isinstance(self.fail_at, set) else {self.fail_at}
            failing = len(self.calls) in numbers
            if failing and self.how == "half" and name == "cuMemUnmap":
                self._half_unmap(*args)
                return (self.fail_code,)
            after = failing and self.how == "after" and name in ("cuMemMap", "cuMemUnmap", "cuMemSetAccess")
            if failing and not after:
                return (self.fail_code, None)
            if not self._initialised and name != "cuInit":
                return (CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
            try:
                value = function(self, *args)
            except Error as exc:
                return (exc.code, None)
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            return (self.fail_code if after else CUresult.CUDA_SUCCESS, *values)

        return call

    # ---- what tests look at

    def memories(self):
        return [m for m, _ in self._handles.values()] + [m.memory for m in self.mappings.values()]

    def nothing_left(self):
        return not (self._handles or self.mappings or self._reservations or self.streams)

    def launch(self, address, nbytes, byte=None):
        """A kernel that touches a range, and writes `byte` into it: it may run at any moment until it is waited for."""
        self.kernels.append((address, nbytes, byte))
        self._check_kernels()

    def finish_kernels(self):
        self._check_kernels()
        for address, nbytes, byte in self.kernels:
            if byte is not None:
                self.write(address, bytes([byte]) * nbytes)
        self.kernels = []

    def _check_kernels(self):
        for address, nbytes, _ in self.kernels:
            if not self._accessible(address, nbytes):
                self.violations.append(f"a kernel touches {nbytes} bytes at {address:#x}")

    def read(self, address, nbytes):
        return b"".join(os.pread(m.fd, n, at) for m, at, n in self._pieces(address, nbytes))

    def write(self, address, data):
        done = 0
        for memory, at, n in self._pieces(address, len(data)):
            assert os.pwrite(memory.fd, data[done : done + n], at) == n
            done += n

    def _pieces(self, address, nbytes):
        if not self._accessible(address, nbytes):
            raise AssertionError(f"an access to {nbytes} bytes at {address:#x} faults")
        while nbytes:
            base = next(b for b, m in self.mappings.items() if b <= address < b + m.size)
            n = min(nbytes, base + self.mappings[base].size - address)
            yield self.mappings[base].memory, address - base, n
            address, nbytes = address + n, nbytes - n

    def _accessible(self, address, nbytes):
        end = address + nbytes
        while address < end:
            hit = next(((b, m) for b, m in self.mappings.items() if b <= address < b + m.size), None)
            if hit is None or not hit[1].accessible:
                return False
            address = hit[0] + hit[1].size
        return True

    # ---- the API

    def _cuInit(self, flags):
        need(flags == 0)
        self._initialised = True

    def _cuGetErrorName(self, code):
        return CUresult(code).name.encode()

    def _cuGetErrorString(self, code):
        return b"as in the fake"

    def _cuDeviceGet(self, ordinal):
        need(ordinal == 0, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return "device"

    def _cuDeviceGetAttribute(self, attribute, device):
        need(device == "device", CUresult.CUDA_ERROR_INVALID_DEVICE)
        handle = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        return self.handle_attribute if attribute == handle else 1

    def _cuDevicePrimaryCtxRetain(self, device):
        need(device == "device", CUresult.CUDA_ERROR_INVALID_DEVICE)
        return "context"

    def _cuCtxSetCurrent(self, context):
        need(context == "context", CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._thread.context = context

    def _needs_context(self):
        need(getattr(self._thread, "context", None), CUresult.CUDA_ERROR_INVALID_CONTEXT)

    def _cuCtxSynchronize(self):
        self._needs_context()
        for stream in self.streams:
            self._drain(stream)
        self.finish_kernels()

    def _cuMemGetAllocationGranularity(self, prop, option):
        self._check_prop(prop)
        need(option == CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        return GRANULARITY

    def _check_prop(self, prop):
        need(prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        self._check_location(prop.location)

    def _check_location(self, location):
        need(location.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        need(location.id == 0, CUresult.CUDA_ERROR_INVALID_DEVICE)

    def _cuMemAddressReserve(self, size, alignment, address, flags):
        need(size > 0 and size % GRANULARITY == 0 and alignment == 0 and address == 0 and flags == 0)
        base, self._next_address = self._next_address, self._next_address + size + GRANULARITY
        self._reservations[base] = size
        return base

    def _cuMemAddressFree(self, address, size):
        need(self._reservations.get(address) == size)
        need(not any(address <= b < address + size for b in self.mappings))
        del self._reservations[address]

    def _cuMemCreate(self, size, prop, flags):
        self._check_prop(prop)
        need(size > 0 and size % GRANULARITY == 0 and flags == 0)
        need(self.board.used_bytes + size <= self.board.capacity_bytes, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        fd = os.memfd_create("fake-cuda")
        os.write(fd, bytes([GARBAGE]) * size)
        shareable = prop.requestedHandleTypes == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._new_handle(Memory(fd, size, shareable))

    def _new_handle(self, memory):
        self._next_handle += 1
        self._handles[self._next_handle] = [memory, 1]
        return self._next_handle

    def _cuMemRelease(self, handle):
        need(handle in self._handles)
        self._handles[handle][1] -= 1
        if not self._handles[handle][1]:
            del self._handles[handle]

    def _cuMemExportToShareableHandle(self, handle, kind, flags):
        need(handle in self._handles and self._handles[handle][0].shareable and flags == 0)
        need(kind == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        need(self.exports, CUresult.CUDA_ERROR_NOT_SUPPORTED)
        return os.dup(self._handles[handle][0].fd)

    def _cuMemImportFromShareableHandle(self, fd, kind):
        need(kind == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        status = os.fstat(fd)
        memory = self.board.memories().get(status.st_ino) or Memory(os.dup(fd), status.st_size, True)
        return self._new_handle(memory)

    def _cuMemMap(self, address, size, offset, handle, flags):
        need(address % GRANULARITY == 0 and size > 0 and size % GRANULARITY == 0 and offset == 0 and flags == 0)
        need(handle in self._handles and size <= self._handles[handle][0].size)
        need(any(b <= address and address + size <= b + s for b, s in self._reservations.items()))
        need(not any(b < address + size and address < b + m.size for b, m in self.mappings.items()))
        self.mappings[address] = Mapping(size, self._handles[handle][0], handle)

    def _run(self, address, size):
        """The mappings that a range consists of, none of them in part."""
        found, at = [], address
        while at < address + size:
            need(at in self.mappings)
            found.append(at)
            at += self.mappings[at].size
        need(at == address + size and found)
        return found

    def _cuMemSetAccess(self, address, size, access, count):
        need(len(access) == count == 1)
        self._check_location(access[0].location)
        for at in self._run(address, size):
            self.mappings[at].accessible = access[0].flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _cuMemUnmap(self, address, size):
        for at in self._run(address, size):
            del self.mappings[at]
        self._check_kernels()

    def _half_unmap(self, address, size):
        found = self._run(address, size)
        for at in found[: -(-len(found) // 2)]:
            del self.mappings[at]
        self._check_kernels()

    def _cuMemRetainAllocationHandle(self, address):
        hit = next((m for b, m in self.mappings.items() if b <= address < b + m.size), None)
        need(hit is not None)
        self._handles.setdefault(hit.handle, [hit.memory, 0])[1] += 1
        return hit.handle

    def _cuCtxGetStreamPriorityRange(self):
        self._needs_context()
        return (0, -5)

    def _cuStreamCreateWithPriority(self, flags, priority):
        self._needs_context()
        need(flags == CUstream_flags.CU_STREAM_NON_BLOCKING and priority == 0)
        self._next_stream += 1
        self.streams[self._next_stream] = []
        return self._next_stream

    def _cuStreamDestroy(self, stream):
        need(stream in self.streams)
        self._drain(stream)
        del self.streams[stream]

    def _cuMemsetD8Async(self, address, value, nbytes, stream):
        self._needs_context()
        need(stream in self.streams and 0 <= value < 256)
        need(self._accessible(address, nbytes), CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        self.streams[stream].append((address, value, nbytes))

    def _cuStreamSynchronize(self, stream):
        self._needs_context()
        need(stream in self.streams)
        self._drain(stream)

    def _drain(self, stream):
        queued, self.streams[stream] = self.streams[stream], []
        for address, value, nbytes in queued:
            self.write(address, bytes([value]) * nbytes)
