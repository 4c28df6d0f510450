"""Load cubins, encode tensor maps, launch kernels: the few driver calls that strobe makes. Knows nothing of torch.

Callers of `Kernel.function` and of launches have made the device's context current: torch makes the primary context
current on the first use of a device, and `torch.cuda.device(...)` switches it. A thread that has not used a device yet,
such as one of autograd's, has none: `have_context` gives it one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGN = 64  # also the alignment of a parameter block, which may hold tensor maps
_SMEM_WITHOUT_OPT_IN = 48 * 1024

_HINTS = {
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin was compiled for another architecture than this GPU's",
    "CUDA_ERROR_INVALID_IMAGE": "the cubin is damaged, or newer than this driver (CUDA 13 needs driver 580 or later)",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the driver is older than the compiler; update it or install an older NVRTC",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU is full; torch.cuda.empty_cache() gives back what torch keeps in reserve",
    "CUDA_ERROR_INVALID_CONTEXT": "no context is current; use the device through torch first",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the block needs more registers or shared memory than the GPU has",
    "CUDA_ERROR_INVALID_VALUE": "out of range: grid, threads, shared memory or the shape of a tensor map",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel left its tensors; this process cannot use the GPU any more",
    "CUDA_ERROR_NO_DEVICE": "the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?)",
}


class CudaError(RuntimeError):
    """A driver call failed. `call` names it, `name` is the driver's name of the error."""

    def __init__(self, call: str, name: str, explanation: str = "") -> None:
        self.call, self.name = call, name
        details = "; ".join(part for part in (explanation, _HINTS.get(name, "")) if part)
        super().__init__(f"{call}: {name}" + (f": {details}" if details else ""))


@functools.cache
def bindings() -> Any:
    """The initialised driver bindings."""
    from cuda.bindings import driver

    check("cuInit", driver.cuInit(0), driver)
    return driver


def available() -> str | None:
    """None if the driver can be used, else the reason."""
    try:
        bindings()
    except ImportError as error:
        return f'cuda-bindings cannot be imported ({error}); install it with `pip install "strobe-attention[cu13]"`'
    except CudaError as error:
        return str(error)
    except Exception as error:  # the bindings' loader has exception types of its own
        return f"libcuda, the library of the NVIDIA driver, cannot be loaded ({error})"
    return None


def check(call: str, result: tuple, cuda: Any = None) -> Any:
    """Return the result of a driver's function without its error code. An error is raised; `call` names it there."""
    error, *values = result
    if error:
        cuda = cuda or bindings()
        name, text = (get(error)[1] for get in (cuda.cuGetErrorName, cuda.cuGetErrorString))
        raise CudaError(call, name.decode() if name else f"error {int(error)}", text.decode() if text else "")
    return values[0] if values else None


def have_context(device: int) -> None:
    """Make the device's primary context current, which is torch's, if no context is current in this thread."""
    cuda = bindings()
    if int(check("cuCtxGetCurrent", cuda.cuCtxGetCurrent())):
        return
    of_device = check("cuDeviceGet", cuda.cuDeviceGet(device))
    context = check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(of_device))
    check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))


def allocate(size: int) -> int:
    """The address of memory on the current device that is never given back."""
    return int(check("cuMemAlloc", bindings().cuMemAlloc(size)))


def zero(address: int, size: int, stream: int) -> None:
    """Set bytes of the current device to 0, in the order of the stream."""
    check("cuMemsetD8Async", bindings().cuMemsetD8Async(address, 0, size, stream))


def capture_id(stream: int) -> int:
    """A number that the graph now being captured from this stream shares with no other."""
    error, *values = bindings().cuStreamGetCaptureInfo(stream)
    check("cuStreamGetCaptureInfo", (error,))
    return int(values[1])  # after the status


# ---- kernels ---------------------------------------------------------------------------------------------------------
class Kernel:
    """One kernel of a cubin, on every device that asks for it. Stays loaded as long as the process lives."""

    def __init__(self, cubin: bytes, name: str = "kernel", smem: int = 0) -> None:
        cuda = bindings()
        self.name, self.smem = name, smem
        self._library = check("cuLibraryLoadData", cuda.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        self._kernel = check(f"cuLibraryGetKernel({name})", cuda.cuLibraryGetKernel(self._library, name.encode()))
        self._functions: dict[int, Any] = {}

    def function(self, device: int) -> Any:
        """The kernel on this device, whose context is current; allowed `smem` bytes of dynamic shared memory."""
        function = self._functions.get(device)
        if function is None:
            cuda = bindings()
            function = check("cuKernelGetFunction", cuda.cuKernelGetFunction(self._kernel))
            if self.smem > _SMEM_WITHOUT_OPT_IN:
                limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                set_limit = cuda.cuFuncSetAttribute(function, limit, self.smem)
                check(f"cuFuncSetAttribute(dynamic shared memory = {self.smem} bytes)", set_limit)
            self._functions[device] = function
        return function

    def local_bytes(self, device: int) -> int:
        """Local memory of a thread: our kernels use it for spilled registers alone."""
        cuda = bindings()
        size = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        return check("cuFuncGetAttribute", cuda.cuFuncGetAttribute(size, self.function(device)))


@functools.cache
def _launch_kernel() -> Any:
    """cuLaunchKernelEx by its address: the bindings' own function takes more time than ctypes needs for addresses."""
    address = check("cuGetProcAddress", bindings().cuGetProcAddress(b"cuLaunchKernelEx", 12000, 0))
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(address)


class Launch:
    """A prepared launch: owns the configuration, its attributes and the parameters; a call costs one driver call.

    `params` is the kernel's one argument, a writable view that may be patched between launches: the driver copies it
    when the kernel is launched or captured. Not to be shared between threads.
    """

    def __init__(
        self,
        function: Any,
        grid: int,
        threads: int,
        smem: int,
        params: bytes | bytearray,
        pdl: bool = False,
    ) -> None:
        cuda = bindings()
        self._config = config = cuda.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = threads
        config.sharedMemBytes = smem
        self.set_grid(grid)

        attributes = []
        if pdl:  # may start before its predecessor in the stream has ended; it waits where its code says so
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)

        self._memory, self.params = _aligned(params)
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory) + _padding(self._memory))
        self.stream = 0
        addresses = (config.getPtr(), int(function), ctypes.addressof(self._arguments), 0)
        # One call of the driver; 0, or the number of an error.
        self.enqueue: Callable[[], int] = functools.partial(_launch_kernel(), *map(ctypes.c_void_p, addresses))

    def set_grid(self, blocks: int) -> None:
        if blocks < 1 or blocks >= 2**31:
            raise ValueError(f"grid: {blocks} blocks; allowed are 1 to 2**31 - 1")
        self._config.gridDimX = blocks

    def launch(self, stream: int) -> None:
        """Enqueue the kernel on a stream, given by its handle (0: the default stream)."""
        if stream != self.stream:
            self.move_to(stream)
        if error := self.enqueue():
            self.failed(error)

    def move_to(self, stream: int) -> None:
        """Send what `enqueue` launches from now on to this stream."""
        self._config.hStream = self.stream = stream

    @staticmethod
    def failed(error: int) -> None:
        """Raise the error that `enqueue` has returned."""
        check("cuLaunchKernelEx", (bindings().CUresult(error),))


def _padding(memory: ctypes.Array) -> int:
    return -ctypes.addressof(memory) % _TENSOR_MAP_ALIGN


def _aligned(content: bytes | bytearray) -> tuple[ctypes.Array, memoryview]:
    """A copy of the content, aligned as a tensor map wants it: the owner of the memory, and a view of the copy."""
    memory = (ctypes.c_ubyte * (len(content) + _TENSOR_MAP_ALIGN))()
    start = _padding(memory)
    view = memoryview(memory).cast("B")[start : start + len(content)]
    view[:] = content
    return memory, view


# ---- tensor maps -----------------------------------------------------------------------------------------------------
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class TensorMapSpec:
    """The facts of a tensor that a bulk tensor copy needs: sizes innermost first, the innermost dimension
    contiguous."""

    address: int
    element_bytes: int
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of dimensions 1 and up
    box: tuple[int, ...]  # elements of one copy
    swizzle: Literal[0, 32, 64, 128] = 128
    kind: Literal["bf16", "fp16", "fp32"] = "bf16"
    promotion: Literal[128, 256] = 256  # bytes that the L2 cache fetches at a time

    def validate(self) -> None:
        """Raises ValueError for what the hardware cannot do, naming it."""
        rank = len(self.dims)
        if not 1 <= rank <= 5:
            raise ValueError(f"dims: {self.dims} has {rank} dimensions; a tensor map has 1 to 5")
        if len(self.strides) != rank - 1:
            raise ValueError(f"strides: {self.strides} should have {rank - 1} entries, none for the innermost one")
        if len(self.box) != rank:
            raise ValueError(f"box: {self.box} should have {rank} entries, as many as dims {self.dims}")
        if _ELEMENT_BYTES.get(self.kind) != self.element_bytes:
            raise ValueError(f"kind: {self.kind!r} with element_bytes {self.element_bytes}; known are {_ELEMENT_BYTES}")
        if self.swizzle not in (0, 32, 64, 128):
            raise ValueError(f"swizzle: {self.swizzle} is not 0, 32, 64 or 128")
        if self.promotion not in (128, 256):
            raise ValueError(f"promotion: {self.promotion} is not 128 or 256")
        if self.address % 16:
            raise ValueError(f"address: {self.address:#x} is not a multiple of 16 bytes")
        for i, size in enumerate(self.dims):
            if not 1 <= size <= 2**32:
                raise ValueError(f"dims[{i}]: {size} is not in 1 to 2**32")
        for i, stride in enumerate(self.strides):
            if stride % 16 or not 0 <= stride < 2**40:
                raise ValueError(f"strides[{i}]: {stride} bytes is not a multiple of 16 below 2**40")
        for i, size in enumerate(self.box):
            if not 1 <= size <= 256:
                raise ValueError(f"box[{i}]: {size} is not in 1 to 256")
        row = self.box[0] * self.element_bytes
        if row % 16:
            raise ValueError(f"box[0]: {self.box[0]} elements are {row} bytes, not a multiple of 16")
        if self.swizzle and row > self.swizzle:
            raise ValueError(f"box[0]: {self.box[0]} elements are {row} bytes, more than the swizzle of {self.swizzle}")

    def encode(self) -> bytes:
        """The 128 bytes that a kernel takes as its `TensorMap`. Elements outside the tensor read as zero."""
        self.validate()
        cuda = bindings()
        kinds = cuda.CUtensorMapDataType
        swizzles, promotions = cuda.CUtensorMapSwizzle, cuda.CUtensorMapL2promotion
        encoded = cuda.cuTensorMapEncodeTiled(
            {
                "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                "fp16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                "fp32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            }[self.kind],
            len(self.dims),
            self.address,
            [cuda.cuuint64_t(size) for size in self.dims],
            [cuda.cuuint64_t(stride) for stride in self.strides],
            [cuda.cuuint32_t(size) for size in self.box],
            [cuda.cuuint32_t(1)] * len(self.dims),
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            {
                0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
                32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
                64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
                128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
            }[self.swizzle],
            {128: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_128B, 256: promotions.CU_TENSOR_MAP_L2_PROMOTION_L2_256B}[
                self.promotion
            ],
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(check(f"cuTensorMapEncodeTiled({self})", encoded).getPtr(), TENSOR_MAP_BYTES)


@functools.cache
def address_is_first_word() -> bool:
    """Return whether this driver keeps a tensor map's address, as it is, in the first eight bytes: not documented, so
    tried out."""
    spec = TensorMapSpec(0, 2, (64, 64), (128,), (64, 64), 128)
    maps = {address: replace(spec, address=address).encode() for address in (0x7F0012345670, 1 << 30)}
    first, second = maps.values()
    return first[8:] == second[8:] and all(int.from_bytes(m[:8], "little") == address for address, m in maps.items())


class TensorMapSlot:
    """An encoded tensor map inside a writable buffer (`Launch.params`), which follows its tensor from call to call."""

    def __init__(self, buffer: bytearray | memoryview, offset: int = 0) -> None:
        self._memory = (ctypes.c_ubyte * TENSOR_MAP_BYTES).from_buffer(buffer, offset)
        self._map = bindings().CUtensorMap(ctypes.addressof(self._memory))
        self._replace = bindings().cuTensorMapReplaceAddress
        self._word = ctypes.c_uint64.from_buffer(buffer, offset) if address_is_first_word() else None
        self._address: int | None = None

    def point_to(self, address: int) -> None:
        """Move the map to other memory of the same shape and strides; costs nothing if it is there already."""
        if address == self._address:
            return
        if address % 16:
            raise ValueError(f"address: {address:#x} is not a multiple of 16 bytes")
        if self._word is not None:
            self._word.value = address
        else:
            (error,) = self._replace(self._map, address)
            if error:
                check("cuTensorMapReplaceAddress", (error,))
        self._address = address
