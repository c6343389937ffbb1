"""CUDA C++ without a compiler on the machine: sources next to their wrappers, compiled by the NVRTC of torch.

A kernel is compiled for the current device at its first use, and its machine code is cached on disk in the user's cache
folder, by a hash of its inputs. Kernels run on torch's current stream, with programmatic dependent launch, so they must all
wait for their predecessors (common.cuh). Independent of ops."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("oneloop.ops")

_COMMON = Path(__file__).with_name("common.cuh")
_COMPILERS = 8  # parallel compilations; each needs some tens of MiB
_programs: list[Program] = []
_compiling: dict[str, threading.Lock] = {}  # locks by hash of the inputs
_choosing = threading.Lock()
_DTYPE_FLAGS = {torch.bfloat16: (), torch.float16: ("-DFLOAT16",)}


@functools.cache
def missing() -> str | None:
    """Return why CUDA C++ cannot be compiled here, or None if it can."""
    try:
        import cuda.bindings.driver
        import cuda.bindings.nvrtc  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error})"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it requires compute capability 9.0 or more"
    return None


@functools.cache
def missing_for_hopper() -> str | None:
    """Return what is missing for kernels with Hopper's matrix instructions, or None; see `missing`."""
    if (reason := missing()) is not None:
        return reason
    return None if torch.cuda.get_device_capability() == (9, 0) else "its matrix instructions are Hopper's"


class CompiledKernel:
    """A compiled function of one device. Arguments: tensors and None are passed by address, ints as int, floats as float,
    structures by value."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def allow_shared_bytes(self, num_bytes: int) -> None:
        """Set the limit of dynamic shared memory per block, in bytes. Raises RuntimeError if the device has less."""
        from cuda.bindings import driver

        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(self._function, limit, num_bytes))

    def blocks_per_multiprocessor(self, num_threads: int, shared_bytes: int) -> int:
        from cuda.bindings import driver

        (blocks,) = _check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, num_threads, shared_bytes)
        )
        return int(blocks)

    def launch(
        self, grid: tuple[int, int, int], num_threads: int, shared_bytes: int, *arguments: Any, cluster: int = 1,
        early: bool = True,
    ) -> None:  # fmt: skip
        """Launch the kernel. `cluster` blocks along x share a barrier and their shared memory. `early`: it may start while
        the kernels before it still run."""
        from cuda.bindings import driver

        config = _launch_config(cluster, early, threading.get_ident())
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX = num_threads
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        values, types = zip(*map(_as_argument, arguments), strict=True)
        _check(driver.cuLaunchKernelEx(config, self._function, (values, types), 0))


class Program:
    """Kernels from the same source files, which follow common.cuh. `instances`: source line that instantiates each kernel's
    template; each is compiled separately, in parallel. `prelude`: text before all instances. `listed`: compiled at every start.

    `architecture`: the only supported one, None for any."""

    def __init__(
        self, sources: Sequence[Path], instances: Mapping[str, str], prelude: str = "", architecture: str | None = None,
        *, listed: bool = True,
    ) -> None:  # fmt: skip
        self._sources = sources
        self._prelude = prelude
        self._architecture = architecture
        self.instances = instances
        self._modules: dict[tuple[str, torch.dtype, int], Future[Any]] = {}
        self._choosing = threading.Lock()
        if listed:
            _programs.append(self)

    def runs_on(self, device: torch.device) -> bool:
        return self._architecture in (None, _architecture(device), _architecture(device) + "a")

    def kernel(self, name: str, dtype: torch.dtype, device: torch.device) -> CompiledKernel:
        """Return a kernel, compiled at the first call. Raises RuntimeError with the compiler's message."""
        from cuda.bindings import driver

        (function,) = _check(driver.cuModuleGetFunction(self.module(name, dtype, device), name.encode()))
        return CompiledKernel(function)

    def module(self, name: str, dtype: torch.dtype, device: torch.device) -> Any:
        """Return the kernel's loaded machine code; concurrent callers wait for the first one. Raises as `kernel` does."""
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        key = name, dtype, device.index
        with self._choosing:
            mine = key not in self._modules
            module = self._modules.setdefault(key, Future())
        if mine:
            try:
                module.set_result(self._load(name, dtype, device))
            except BaseException as error:
                module.set_exception(error)
        return module.result()

    def compile_ahead(self, names: Iterable[str], dtype: torch.dtype, device: torch.device) -> None:
        """Start compiling these kernels in the background; `kernel` waits for one that is not ready."""
        _compile_ahead([(self, name) for name in names], dtype, device)

    def _load(self, name: str, dtype: torch.dtype, device: torch.device) -> Any:
        from cuda.bindings import driver

        code = self._machine_code(name, dtype, device)
        torch.cuda.init()
        torch.cuda.set_device(device)  # makes the context current on this thread
        (module,) = _check(driver.cuModuleLoadData(code))
        return module

    def source(self, name: str) -> str:
        """Return the source that is compiled for kernel `name`."""
        sources = (path.read_text() for path in (_COMMON, *self._sources))
        return "\n".join([*sources, self._prelude, self.instances[name]])

    def _machine_code(self, name: str, dtype: torch.dtype, device: torch.device) -> bytes:
        from cuda.bindings import nvrtc

        text = self.source(name)
        architecture = self._architecture or _architecture(device)
        version = _check(nvrtc.nvrtcVersion())
        digest = hashlib.sha256(repr((text, _options(dtype, architecture), version)).encode()).hexdigest()
        cached = _cache_folder() / f"{digest[:32]}.cubin"
        with _choosing:
            lock = _compiling.setdefault(digest, threading.Lock())
        with lock:  # another device of the same kind may compile the same kernel
            if cached.is_file():
                return cached.read_bytes()
            code = machine_code(text, dtype, architecture)
            _keep(cached, code)
            return code


def compile_ahead(dtype: torch.dtype, device: torch.device) -> None:
    """Start compiling all kernels of every listed program in parallel; `kernel` waits for one that is not ready."""
    if missing() is not None or dtype not in _DTYPE_FLAGS:
        return
    here = [program for program in _programs if program.runs_on(device)]
    _compile_ahead([(program, name) for program in here for name in program.instances], dtype, device)


def _compile_ahead(instances: Sequence[tuple[Program, str]], dtype: torch.dtype, device: torch.device) -> None:
    threads = ThreadPoolExecutor(min(_COMPILERS, len(os.sched_getaffinity(0))), "oneloop-nvrtc")
    for program, name in instances:
        threads.submit(program.module, name, dtype, device)
    threads.shutdown(wait=False)


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def machine_code(source: str, dtype: torch.dtype, architecture: str) -> bytes:
    """Compile a kernel for `architecture` (`sm_90a`); no device is needed. Raises RuntimeError with the compiler's message."""
    return _compile(source, _options(dtype, architecture))


def _options(dtype: torch.dtype, architecture: str) -> list[str]:
    return ["--std=c++17", f"--gpu-architecture={architecture}", *_DTYPE_FLAGS[dtype]]


def _compile(text: str, options: Sequence[str]) -> bytes:
    from cuda.bindings import nvrtc

    (program,) = _check(nvrtc.nvrtcCreateProgram(text.encode(), b"oneloop.cu", 0, [], []))
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
        said = b" " * size
        nvrtc.nvrtcGetProgramLog(program, said)
        raise RuntimeError(f"NVRTC refused a kernel of ours: {said.decode(errors='replace')}")
    (size,) = _check(nvrtc.nvrtcGetCUBINSize(program))
    code = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return code


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oneloop" / "kernels"


def _keep(path: Path, code: bytes) -> None:
    """Write a cache file atomically; if the disk refuses, the next start compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)


@functools.cache
def _launch_config(cluster: int, early: bool, thread: int) -> Any:
    from cuda.bindings import driver

    overlaps = driver.CUlaunchAttribute()
    overlaps.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlaps.value.programmaticStreamSerializationAllowed = int(early)
    together = driver.CUlaunchAttribute()
    together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.blockDimY = config.blockDimZ = 1
    config.attrs = [overlaps, together] if cluster > 1 else [overlaps]
    config.numAttrs = len(config.attrs)
    return config


def _as_argument(value: Any) -> tuple[Any, Any]:
    match value:
        case Tensor():
            return value.data_ptr(), ctypes.c_void_p
        case None:
            return 0, ctypes.c_void_p
        case ctypes.Structure():
            return value, None
        case int():
            return value, ctypes.c_int
        case float():
            return value, ctypes.c_float
    raise TypeError(f"{type(value).__name__} is not a kernel argument")


def _check(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return tuple(values)


# Tensor maps: describe to Hopper's copy engine a tile of a matrix of bytes or 16-bit floats, and its swizzled layout in
# shared memory. Created by the driver, on the host, for one address; kernels receive them by value.
_BYTES = _ALIGNMENT = 128
_DATA_TYPES = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3

_Ints = tuple[int, ...]


class TensorMap(ctypes.Structure):
    """CUtensorMap of the driver: 128 opaque bytes, passed to a kernel by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * (_BYTES // 8))]


def tensor_map(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Return a tensor map: it describes tiles of shape `box` (at most 256 each way) in the memory of `tensor`, for bulk copies.
    `sizes` and `strides` (in elements) begin with the fastest dimension, whose stride is 1 and which is a row of 128 bytes in
    shared memory. Elements outside `sizes` are read as zero. Raises ValueError if the driver refuses it, usually because an address
    or stride is not a multiple of 16 bytes."""
    return _made(
        _DATA_TYPES[tensor.dtype], tensor.itemsize, tensor.data_ptr(), tuple(sizes), tuple(strides), tuple(box)
    )


@functools.lru_cache(4096)  # a map contains addresses and strides, no data
def _made(data_type: int, size: int, address: int, sizes: _Ints, strides: _Ints, box: _Ints) -> TensorMap:
    room = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    found = TensorMap.from_buffer(room, -ctypes.addressof(room) % _ALIGNMENT)
    rank, words64, words32 = len(sizes), ctypes.c_uint64 * len(sizes), ctypes.c_uint32 * len(sizes)
    status = _encode()(
        ctypes.byref(found), data_type, rank, ctypes.c_void_p(address), words64(*sizes),
        words64(*(stride * size for stride in strides[1:])), words32(*box), words32(*[1] * rank),
        0, _SWIZZLE_128B, _L2_PROMOTION_256B, 0,
    )  # fmt: skip
    if status != 0:
        raise ValueError(f"no tensor map for {sizes} by {strides} in boxes of {box}: CUDA error {status}")
    return found


@functools.cache
def _encode() -> ctypes._NamedFuncPointer:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
