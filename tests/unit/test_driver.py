"""The launch path against a stand-in driver that records what it is told: no GPU, the real bindings."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from strobe.cuda.runtime import driver, jit

STUB = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char log_text[1 << 16];
static void record(const char* format, ...) {
  va_list args;
  va_start(args, format);
  size_t n = strlen(log_text);
  vsnprintf(log_text + n, sizeof log_text - n, format, args);
  va_end(args);
}
const char* stub_log(void) { return log_text; }
void stub_clear(void) { log_text[0] = 0; }

/* A call whose name is in $STUB_FAIL fails with the code behind the colon. */
static int fails(const char* call) {
  const char* wanted = getenv("STUB_FAIL");
  size_t n = strlen(call);
  return wanted && !strncmp(wanted, call, n) && wanted[n] == ':' ? atoi(wanted + n + 1) : 0;
}

int cuInit(unsigned flags) { return fails("cuInit"); }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuGetErrorName(int error, const char** name) {
  *name = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : error == 100 ? "CUDA_ERROR_NO_DEVICE"
        : error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : 0;
  return *name ? 0 : 1;
}
int cuGetErrorString(int error, const char** text) { *text = "text of the driver"; return 0; }
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  record("load %.4s\n", (const char*)code + 1);
  *library = (void*)0x11;
  return fails("cuLibraryLoadData");
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  record("kernel %s of %p\n", name, library);
  *kernel = (void*)0x22;
  return fails("cuLibraryGetKernel");
}
int cuKernelGetFunction(void** function, void* kernel) {
  record("function of %p\n", kernel);
  *function = (void*)0x33;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  record("attribute %d = %d of %p\n", attribute, value, function);
  return fails("cuFuncSetAttribute");
}

typedef struct { int id; char pad[4]; char value[64]; } Attribute;
typedef struct { unsigned grid[3], block[3], smem; void* stream; Attribute* attributes; unsigned count; } Config;
int cuLaunchKernelEx(const Config* c, void* function, void** params, void** extra) {
  record("launch %p grid %u %u %u block %u %u %u smem %u stream %p param0 %d align %u", function, c->grid[0], c->grid[1],
         c->grid[2], c->block[0], c->block[1], c->block[2], c->smem, c->stream, *(int*)params[0],
         (unsigned)((uintptr_t)params[0] % 64));
  for (unsigned i = 0; i < c->count; ++i) {
    const int* v = (const int*)c->attributes[i].value;
    record(" attribute%d %d", c->attributes[i].id, v[0]);
  }
  record("\n");
  return fails("cuLaunchKernelEx");
}
int cuTensorMapEncodeTiled(uint64_t* map, int kind, unsigned rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int l2, int fill) {
  record("encode kind %d rank %u at %p swizzle %d interleave %d l2 %d fill %d dims", kind, rank, address, swizzle,
         interleave, l2, fill);
  for (unsigned i = 0; i < rank; ++i) record(" %lu/%u/%u", (unsigned long)dims[i], box[i], steps[i]);
  record(" strides");
  for (unsigned i = 0; i + 1 < rank; ++i) record(" %lu", (unsigned long)strides[i]);
  record("\n");
  memset(map, 0xAB, 128);
  map[0] = (uint64_t)address;
  return fails("cuTensorMapEncodeTiled");
}
int cuTensorMapReplaceAddress(uint64_t* map, void* address) { record("replace\n"); map[0] = (uint64_t)address; return 0; }

int cuStreamGetCaptureInfo_v3(void* stream, int* status, uint64_t* id, void** graph, void*** nodes, void** edges,
                              size_t* count) {
  if (status) *status = 1;
  if (id) *id = (uint64_t)stream + 7;
  if (count) *count = 0;
  return fails("cuStreamGetCaptureInfo");
}
int cuStreamGetCaptureInfo(void* stream, int* status, uint64_t* id, void** graph, void*** nodes, void** edges,
                           size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
}

int cuGetProcAddress_v2(const char* symbol, void** address, int version, uint64_t flags, int* status) {
  if (!strcmp(symbol, "cuGetProcAddress")) symbol = "cuGetProcAddress_v2";
  *address = dlsym(RTLD_DEFAULT, symbol);
  if (!*address) *address = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), symbol);
  if (status) *status = *address ? 0 : 1;
  return 0;
}
int cuGetProcAddress(const char* symbol, void** address, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, address, version, flags, 0);
}
"""

PRELUDE = f"""
import ctypes, json, struct, sys, types
sys.modules["strobe"] = types.ModuleType("strobe")  # the CUDA layer alone: it needs no torch, which is slow to import
sys.modules["strobe"].__path__ = [{str(Path(jit.__file__).parents[2])!r}]
from strobe.cuda.runtime import driver
stub = ctypes.CDLL("libcuda.so.1")
stub.stub_log.restype = ctypes.c_char_p
def log():
    text = stub.stub_log().decode().splitlines()
    stub.stub_clear()
    return text
result = None
"""


@pytest.fixture(scope="module")
def stub_directory(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in driver with")
    pytest.importorskip("cuda.bindings.driver")
    directory = tmp_path_factory.mktemp("stub")
    (directory / "stub.c").write_text(STUB)
    library = directory / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, directory / "stub.c", "-ldl"],
        check=True,
    )
    return directory


@pytest.fixture
def with_stub(stub_directory, monkeypatch):
    def run(body, fail=""):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(stub_directory), prepend=os.pathsep)
        monkeypatch.setenv("STUB_FAIL", fail)
        program = PRELUDE + textwrap.dedent(body) + "\nassert 'torch' not in sys.modules\nprint(json.dumps(result))\n"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_kernel_is_loaded_once_and_its_shared_memory_allowed_once_per_device(with_stub):
    lines = with_stub("""
        kernel = driver.Kernel(b"\\x7fELF.....", name="kernel", smem=100_000)
        for device in (0, 0, 1, 1, 0):
            kernel.function(device)
        result = log()
    """)
    per_device = ["function of 0x22", "attribute 8 = 100000 of 0x33"]
    assert lines == ["load ELF.", "kernel kernel of 0x11", *per_device, *per_device]


def test_little_shared_memory_needs_no_attribute(with_stub):
    lines = with_stub("""
        driver.Kernel(b"\\x7fELF.....", smem=48 * 1024).function(0)
        result = log()
    """)
    assert lines[-1] == "function of 0x22"


def test_a_launch_sends_the_configuration_and_the_current_parameters(with_stub):
    lines = with_stub("""
        function = driver.Kernel(b"\\x7fELF.....").function(0)
        log()
        launch = driver.Launch(function, grid=7, threads=128, smem=1024, params=struct.pack("<i", 41) + bytes(60))
        launch.launch(0)
        struct.pack_into("<i", launch.params, 0, 42)
        launch.launch(0xabc0)
        launch.set_grid(9)
        launch.launch(0xabc0)
        launch.launch(0)
        result = log()
    """)
    expected = "launch 0x33 grid {} 1 1 block 128 1 1 smem 1024 stream {} param0 {} align 0"
    cases = [(7, "(nil)", 41), (7, "0xabc0", 42), (9, "0xabc0", 42), (9, "(nil)", 42)]
    assert lines == [expected.format(*case) for case in cases]


def test_dependent_launch_is_an_attribute(with_stub):
    tails = with_stub("""
        function = driver.Kernel(b"\\x7fELF.....").function(0)
        log()
        for pdl in (False, True):
            driver.Launch(function, 8, 384, 0, bytearray(64), pdl=pdl).launch(0)
        result = [line.split("align 0")[1] for line in log()]
    """)
    assert tails == ["", " attribute6 1"]


def test_captures_are_told_apart(with_stub):
    assert with_stub("result = [driver.capture_id(stream) for stream in (0x100, 0x200)]") == [0x107, 0x207]


def test_a_grid_without_blocks_is_refused(with_stub):
    message = with_stub("""
        function = driver.Kernel(b"\\x7fELF.....").function(0)
        try:
            driver.Launch(function, 0, 128, 0, bytes(4))
        except ValueError as error:
            result = str(error)
    """)
    assert "0 blocks" in message


@pytest.mark.parametrize(
    ("fail", "name", "said"),
    [
        ("cuLibraryLoadData:209", "CUDA_ERROR_NO_BINARY_FOR_GPU", "another architecture"),
        ("cuFuncSetAttribute:1", "CUDA_ERROR_INVALID_VALUE", "200000 bytes"),
        ("cuLaunchKernelEx:1", "CUDA_ERROR_INVALID_VALUE", "text of the driver"),
        ("cuLaunchKernelEx:719", "error 719", "text of the driver"),
    ],
)
def test_errors_name_the_call_and_the_error(with_stub, fail, name, said):
    call, error_name, message = with_stub(
        """
        try:
            function = driver.Kernel(b"\\x7fELF.....", smem=200_000).function(0)
            driver.Launch(function, 1, 128, 200_000, bytes(4)).launch(0)
        except driver.CudaError as error:
            result = [error.call, error.name, str(error)]
        """,
        fail=fail,
    )
    assert call.startswith(fail.split(":")[0])
    assert error_name == name
    assert call in message and name in message and said in message


def test_availability(with_stub):
    assert with_stub("result = driver.available()") is None
    assert "CUDA_ERROR_NO_DEVICE" in with_stub("result = driver.available()", fail="cuInit:100")


def test_a_tensor_map_is_encoded_and_pointed_elsewhere(with_stub):
    lines, size, address, moved = with_stub("""
        spec = driver.TensorMapSpec(0x1000, 2, (64, 1000, 2), (256, 128), (64, 128, 1), 128, "bf16")
        encoded = spec.encode()
        driver.replace(spec, promotion=128).encode()
        function = driver.Kernel(b"\\x7fELF.....").function(0)
        launch = driver.Launch(function, 1, 128, 0, bytes(64) + encoded)
        driver.TensorMapSlot(launch.params, 64).point_to(0x2000)
        address, = struct.unpack_from("<Q", encoded)
        moved, = struct.unpack_from("<Q", launch.params, 64)
        assert bytes(launch.params[72:]) == b"\\xab" * 120
        result = [log(), len(encoded), address, moved]
    """)
    # In the driver's numbering: bfloat16 = 9, 128-byte swizzle = 3, 256-byte promotion = 3, out of bounds reads zero =
    # 0.
    assert lines[0] == (
        "encode kind 9 rank 3 at 0x1000 swizzle 3 interleave 0 l2 3 fill 0 dims 64/64/1 1000/128/1 2/1/1 strides 256 128"
    )
    assert lines[1] == lines[0].replace("l2 3", "l2 2")  # 128 bytes
    assert (size, address, moved) == (128, 0x1000, 0x2000)


def test_a_slot_calls_the_driver_only_for_a_new_address(with_stub):
    lines, address, message = with_stub("""
        driver.address_is_first_word = lambda: False
        buffer = bytearray(256)
        slot = driver.TensorMapSlot(buffer, 64)
        for address in (0x1000, 0x1000, 0x2000, 0x1000, 0x1000):
            slot.point_to(address)
        address, = struct.unpack_from("<Q", buffer, 64)
        try:
            slot.point_to(0x1008)
        except ValueError as error:
            result = [log(), address, str(error)]
    """)
    assert lines == ["replace"] * 3 and address == 0x1000 and "0x1008" in message


def test_a_slot_writes_the_address_itself_where_the_driver_keeps_it_plain(with_stub):
    lines, words = with_stub("""
        driver.address_is_first_word = lambda: True
        buffer = bytearray(256)
        slot = driver.TensorMapSlot(buffer, 64)
        words = []
        for address in (0x1000, 0x2000, 0x2000):
            slot.point_to(address)
            words.append(struct.unpack_from("<Q", buffer, 64)[0])
        result = [log(), words]
    """)
    assert lines == [] and words == [0x1000, 0x2000, 0x2000]


GOOD = driver.TensorMapSpec(0x1000, 2, (64, 1000), (256,), (64, 128), 128, "fp16")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"address": 0x1008}, "address: 0x1008"),
        ({"dims": (64,) * 6}, "dims"),
        ({"dims": (64, 0)}, r"dims\[1\]: 0"),
        ({"strides": ()}, "strides"),
        ({"strides": (200,)}, r"strides\[0\]: 200"),
        ({"strides": (2**40,)}, r"strides\[0\]"),
        ({"box": (64,)}, "box"),
        ({"box": (64, 257)}, r"box\[1\]: 257"),
        ({"box": (72, 128)}, r"box\[0\]: 72 elements are 144 bytes, more than the swizzle of 128"),
        ({"box": (4, 128)}, r"box\[0\]: 4 elements are 8 bytes"),
        ({"swizzle": 16}, "swizzle: 16"),
        ({"kind": "fp32"}, "element_bytes 2"),
        ({"promotion": 64}, "promotion: 64"),
    ],
)
def test_a_bad_tensor_map_is_named(change, named):
    GOOD.validate()
    with pytest.raises(ValueError, match=named):
        replace(GOOD, **change).validate()
