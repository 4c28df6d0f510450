"""Header resolution, the compiler's messages, and a cache that survives everything but costs a compilation."""

import dataclasses
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import venv
import warnings
from pathlib import Path

import cubins
import pytest

from strobe.cuda.runtime import cache as store, jit, ptxas_log

needs_nvrtc = pytest.mark.skipif(jit.nvrtc_status() is not None, reason=str(jit.nvrtc_status()))
SOURCE = 'extern "C" __global__ void kernel(float* p) { p[threadIdx.x] = 1.5f; }\n'
OTHER = SOURCE.replace("1.5f", "2.5f")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("STROBE_CACHE_DIR", str(directory))
    for name in ("STROBE_CUBIN_PATH", "STROBE_NO_COMPILE", "STROBE_VERBOSE"):
        monkeypatch.delenv(name, raising=False)
    forget(monkeypatch)
    store._warn_once.cache_clear()
    return directory


def forget(monkeypatch):
    """Forget the kernels in memory, as if the process had just started."""
    monkeypatch.setattr(jit, "in_memory", {})


@pytest.fixture
def headers(tmp_path, monkeypatch):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / "include" / "strobe" / (name.replace("__", "/") + ".cuh")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(jit, "_HEADERS", tmp_path / "include")
    return write


# ---- flatten -------------------------------------------------------------------------------------------------------
def test_each_header_comes_once_with_markers_that_name_it(headers):
    headers(
        ptx__base="#pragma once\nint base;\n",
        tile__a="#pragma once\n#include <strobe/ptx/base.cuh>\nint a;",
        tile__b="#include <strobe/ptx/base.cuh>\n#include <cmath>\nint b;\n",
    )
    text = "// top\n#include <strobe/tile/a.cuh>\n#include <strobe/tile/b.cuh>\nint end;\n"
    assert jit.flatten(text).splitlines() == [
        "// top",
        '#line 1 "strobe/tile/a.cuh"',
        "",
        '#line 1 "strobe/ptx/base.cuh"',
        "",
        "int base;",
        '#line 3 "strobe/tile/a.cuh"',
        "int a;",
        '#line 3 "kernel.cu"',
        '#line 1 "strobe/tile/b.cuh"',
        "",
        "#include <cmath>",
        "int b;",
        '#line 4 "kernel.cu"',
        "int end;",
    ]
    assert jit.flatten(jit.flatten(text)) == jit.flatten(text)


def test_the_emulator_gets_its_own_instructions(headers):
    headers(ptx__base="int real;\n", emu__base="int emulated;\n", tile__a="#include <strobe/ptx/base.cuh>\nint a;\n")
    text = "#include <strobe/tile/a.cuh>\n#include <strobe/ptx/base.cuh>\n#include <strobe/emu/base.cuh>\n"
    flat = jit.flatten(text, "emu")
    assert flat.count("int emulated;") == 1 and "real" not in flat and 'line 1 "strobe/emu/base.cuh"' in flat
    assert "int real;" in jit.flatten(text, "ptx")


def test_an_unknown_header_is_named_with_the_line_that_wants_it(headers):
    headers(tile__a="\n#include <strobe/tile/none.cuh>\n")
    with pytest.raises(FileNotFoundError, match=r"strobe/tile/a.cuh:2: #include <strobe/tile/none.cuh>"):
        jit.flatten("#include <strobe/tile/a.cuh>\n")
    with pytest.raises(ValueError, match="cpu"):
        jit.flatten("", "cpu")


def test_the_shipped_headers_resolve():
    flat = jit.flatten("#include <strobe/ptx/mma.cuh>\n#include <strobe/ptx/memory.cuh>\n")
    assert flat.count("typedef unsigned short u16;") == 1
    assert not re.search(r"^\s*#\s*(include|pragma once)", flat, re.M)


# ---- compile -------------------------------------------------------------------------------------------------------
@needs_nvrtc
def test_compile_gives_machine_code_and_the_assemblers_log():
    compiled = jit.compile(SOURCE, "sm_90a")
    assert set(cubins.inspect(compiled.cubin)) == {"kernel"}
    assert "registers" in compiled.log and ptxas_log.spills(compiled.log) == 0
    assert compiled.nvrtc == jit.nvrtc_version() and compiled.seconds > 0


@needs_nvrtc
def test_the_log_and_the_cubin_show_what_a_kernel_costs():
    source = """extern "C" __global__ void __launch_bounds__(256) kernel(const float* x, float* y) {
      __shared__ float s[64]; float r[64];
      for (int i = 0; i < 64; ++i) r[i] = x[i * 256 + threadIdx.x];
      s[threadIdx.x % 64] = r[3]; __syncthreads();
      for (int i = 0; i < 64; ++i) y[i * 256 + threadIdx.x] = r[i] * r[63 - i] + s[i];
    }"""
    roomy, tight = (jit.compile(source.replace("(256)", bounds), "sm_80") for bounds in ("(256)", "(256, 8)"))
    info = cubins.inspect(roomy.cubin)["kernel"]
    assert info.registers == int(re.search(r"Used (\d+) registers", roomy.log)[1])
    assert (info.static_smem, info.max_threads, info.stack_frame) == (256, 256, 0)
    assert [size for _, size in info.params] == [8, 8]
    assert ptxas_log.spills(roomy.log) == 0 < ptxas_log.spills(tight.log)
    assert cubins.inspect(tight.cubin)["kernel"].stack_frame > 0


@needs_nvrtc
def test_options_reach_the_compiler():
    source = SOURCE.replace("1.5f", "VALUE")
    assert jit.compile(source, "sm_80", options=["-DVALUE=1.5f"]).cubin == jit.compile(SOURCE, "sm_80").cubin
    with pytest.raises(jit.CompileError, match="VALUE"):
        jit.compile(source, "sm_80")


def test_warnings_are_found_in_a_log():
    log = "ptxas info : (C7512) wgmma.mma_async instructions are serialized due to x\nptxas info : Used 24 registers\n"
    log += "ptxas info : (C7508) Potential: 'setmaxnreg' ignored to maintain minimum register requirements.\n"
    assert [line[13:20] for line in ptxas_log.warnings(log)] == ["(C7512)", "(C7508)"]


@needs_nvrtc
def test_a_compile_error_names_the_header_the_line_and_the_saved_source(headers, cache):
    headers(tile__bad="#pragma once\n// fine\nint broken = nonsense;\n")
    source = "#include <strobe/tile/bad.cuh>\n" + SOURCE
    with pytest.raises(jit.CompileError) as caught:
        jit.get(source, "sm_80", name="forward[bf16]")
    message = str(caught.value)
    assert "forward[bf16] for sm_80" in message
    assert re.search(r"strobe/tile/bad\.cuh\(3\): error: .*nonsense", message)
    saved = Path(re.search(r"source: (\S+)", message)[1])
    assert saved.is_relative_to(cache) and saved.read_text() == jit.flatten(source)


@needs_nvrtc
def test_an_error_behind_an_include_has_the_line_of_the_kernel(headers):
    headers(tile__good="int a;\nint b;\nint c;\n")
    with pytest.raises(jit.CompileError, match=r"kernel\.cu\(3\): error"):
        jit.compile("// first\n#include <strobe/tile/good.cuh>\nnonsense;\n", "sm_80")


@needs_nvrtc
def test_without_a_cache_the_rejected_source_is_still_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "directory", lambda *parts: None)
    monkeypatch.setattr(jit.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(jit.CompileError) as caught:
        jit.compile("nonsense;", "sm_80")
    assert Path(re.search(r"source: (\S+)", str(caught.value))[1]).read_text() == "nonsense;\n"


@pytest.mark.parametrize("arch", ["90a", "compute_80", "sm_90x", ""])
def test_a_bad_architecture_is_named(arch):
    with pytest.raises(ValueError, match=repr(arch)):
        jit.compile(SOURCE, arch)


def test_a_missing_compiler_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert 'pip install "strobe-attention[cu13]"' in jit.nvrtc_status()
    with pytest.raises(RuntimeError, match=r"cannot compile forward for sm_80: .*strobe-attention\[cu13\]"):
        jit.get(SOURCE, "sm_80", name="forward")


# ---- the cache -----------------------------------------------------------------------------------------------------
@needs_nvrtc
def test_compiled_then_memory_then_disk(cache, monkeypatch):
    first = jit.get(SOURCE, "sm_80")
    assert first.origin == "compiled" and first.log
    assert first.path.is_relative_to(cache) and first.path.read_bytes() == first.cubin
    assert [path.read_text() for path in first.path.parent.glob("*.cu")] == [first.source]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700

    again = jit.get(SOURCE, "sm_80")
    assert (again.origin, again.cubin) == ("memory", first.cubin)

    forget(monkeypatch)
    monkeypatch.setattr(jit, "compile", None)  # a hit must not compile
    loaded = jit.get(SOURCE, "sm_80")
    assert (loaded.origin, loaded.cubin, loaded.path) == ("disk", first.cubin, first.path)


def test_a_key_depends_on_source_headers_arch_and_options(headers, tmp_path, monkeypatch):
    headers(tile__a="int a;\n")
    source = "#include <strobe/tile/a.cuh>\n" + SOURCE
    keys = {jit.key_of(source, "sm_80"), jit.key_of(source, "sm_90"), jit.key_of(source, "sm_80", ["-lineinfo"])}
    keys.add(jit.key_of(source + " ", "sm_80"))
    headers(tile__a="int changed;\n")
    jit._read_text.cache_clear()
    keys.add(jit.key_of(source, "sm_80"))
    assert len(keys) == 5
    assert jit.key_of(jit.flatten(source), "sm_80") in keys


def foreign(content):
    """A complete cubin, but of another kernel."""
    return jit.compile(OTHER, "sm_80").cubin


DAMAGES = {
    "empty": lambda content: b"",
    "garbage": lambda content: b"not an ELF" * 100,
    "half": lambda content: content[: len(content) // 2],
    "last byte": lambda content: content[:-1],
    "one bit": lambda content: content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
    "zeros": lambda content: content[:64] + bytes(len(content) - 64),
    "other kernel": foreign,
}


@needs_nvrtc
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_anew(damage, monkeypatch):
    good = jit.get(SOURCE, "sm_80")
    good.path.write_bytes(DAMAGES[damage](good.cubin))
    forget(monkeypatch)
    again = jit.get(SOURCE, "sm_80")
    assert (again.origin, again.cubin, again.path) == ("compiled", good.cubin, good.path)
    assert good.path.read_bytes() == good.cubin
    forget(monkeypatch)
    assert jit.get(SOURCE, "sm_80").origin == "disk"


def put_link(path):
    """Whoever owns the target could change it."""
    target = path.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def put_directory(path):
    path.unlink()
    path.mkdir()
    (path / "someone's").write_text("kept")


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def open_to_all(path):
    path.chmod(0o666)


@needs_nvrtc
@pytest.mark.parametrize("put", [put_link, put_directory, put_pipe, open_to_all])
def test_what_is_no_file_of_ours_is_replaced(put, cache, monkeypatch):
    good = jit.get(SOURCE, "sm_80")
    put(good.path)
    for origin in ("compiled", "disk"):
        forget(monkeypatch)
        again = jit.get(SOURCE, "sm_80")
        assert (again.origin, again.cubin, again.path) == (origin, good.cubin, good.path)
    assert stat.S_ISREG(good.path.lstat().st_mode)
    assert [path.read_text() for path in cache.rglob("someone's")] == (["kept"] if put is put_directory else [])


@needs_nvrtc
def test_no_directory_can_be_made(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert store.directory() is None
    artifact = jit.get(SOURCE, "sm_80")
    assert (artifact.origin, artifact.path) == ("compiled", None)


@needs_nvrtc
def test_an_unwritable_directory_is_survived(monkeypatch, cache):
    def refuse(*args, **kwargs):
        raise PermissionError("read-only file system")

    cache.mkdir(mode=0o700)
    monkeypatch.setattr(store.tempfile, "mkstemp", refuse)
    artifact = jit.get(SOURCE, "sm_80")
    assert (artifact.origin, artifact.path) == ("compiled", None)
    assert cubins.inspect(artifact.cubin)


def test_no_home_is_survived(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("STROBE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(store.Path, "home", homeless)
    assert store.directory() is None


def test_the_default_place_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("STROBE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.directory() == tmp_path / "xdg" / "strobe"


@needs_nvrtc
@pytest.mark.parametrize("inner", [False, True], ids=["top", "inner"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_is_ignored_with_one_warning(cache, monkeypatch, mode, inner):
    planted = jit.get(SOURCE, "sm_80")
    (planted.path.parent if inner else cache).chmod(mode)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            forget(monkeypatch)
            artifact = jit.get(SOURCE, "sm_80")
            assert (artifact.origin, artifact.path) == ("compiled", None) and planted.path.exists()
    assert len(warned) == 1 and "others may write to it" in str(warned[0].message)


@needs_nvrtc
def test_an_inner_directory_that_is_a_link_is_judged_by_its_target(cache, monkeypatch, tmp_path):
    made = jit.get(SOURCE, "sm_80")
    inner = made.path.parent
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    forget(monkeypatch)
    assert jit.get(SOURCE, "sm_80").origin == "disk"
    (tmp_path / "elsewhere").chmod(0o777)
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="others may write"):
        assert jit.get(SOURCE, "sm_80").origin == "compiled"


@pytest.mark.parametrize("parts", [(), ("emulator",)])
def test_a_directory_of_someone_else_is_ignored(cache, monkeypatch, parts):
    theirs = cache.joinpath(*parts)
    theirs.mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    real = Path.stat

    def owned_by_another(path, **options):
        fields = list(real(path, **options))
        fields[stat.ST_UID] += path == theirs
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned_by_another)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert store.directory(*parts) is None
    assert parts == () or store.directory() == cache


@needs_nvrtc
def test_a_file_of_someone_else_is_not_run(monkeypatch):
    made = jit.get(SOURCE, "sm_80")
    assert list(store.intact(made.path.parent, made.key, ".cubin")) == [(made.path, made.cubin)]
    monkeypatch.setattr(store.os, "getuid", lambda: made.path.stat().st_uid + 1)
    assert list(store.intact(made.path.parent, made.key, ".cubin")) == []
    assert list(store.intact(made.path.parent, made.key, ".cubin", private=False)) == [(made.path, made.cubin)]


@needs_nvrtc
def test_a_layer_serves_without_a_compiler(tmp_path, monkeypatch, cache):
    made = jit.get(SOURCE, "sm_80")
    layer = tmp_path / "layer"
    written = jit.write_layer(layer, made)
    assert {path.suffix for path in layer.iterdir()} == {".cubin", ".cu"} and written.read_bytes() == made.cubin
    assert (layer / f"{made.key}.cu").read_text() == made.source

    forget(monkeypatch)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("STROBE_CUBIN_PATH", os.pathsep.join([str(tmp_path / "absent"), str(layer)]))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert jit.layers() == [tmp_path / "absent", layer]
    artifact = jit.get(SOURCE, "sm_80")
    assert (artifact.origin, artifact.cubin, artifact.path) == ("layer", made.cubin, written)


@needs_nvrtc
def test_a_layer_holds_one_cubin_of_a_kernel(tmp_path):
    made = jit.get(SOURCE, "sm_80")
    former = jit.write_layer(tmp_path, dataclasses.replace(made, cubin=jit.compile(OTHER, "sm_80").cubin))
    assert jit.write_layer(tmp_path, made) != former
    assert [path.read_bytes() for path in tmp_path.glob("*.cubin")] == [made.cubin]


@needs_nvrtc
def test_files_of_a_cache_make_a_layer(tmp_path, monkeypatch):
    """One machine has compiled what serves on another, as docs/install.md says."""
    made = jit.get(SOURCE, "sm_80")
    (tmp_path / "layer").mkdir()
    copy = shutil.copy(made.path, tmp_path / "layer")
    forget(monkeypatch)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("STROBE_CUBIN_PATH", str(tmp_path / "layer"))
    monkeypatch.setattr(jit, "_toolchain", lambda: "nvrtc12-another")
    artifact = jit.get(SOURCE, "sm_80")
    assert (artifact.origin, artifact.cubin, artifact.path) == ("layer", made.cubin, Path(copy))


@needs_nvrtc
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_a_layer_is_checked_and_may_be_linked(tmp_path, monkeypatch, damage, link):
    made = jit.get(SOURCE, "sm_80")
    written = jit.write_layer(tmp_path / "layer", made)
    if link:
        written.rename(tmp_path / "target")
        written.symlink_to(tmp_path / "target")
    if damage is not None:
        written.write_bytes(DAMAGES[damage](made.cubin))
    forget(monkeypatch)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("STROBE_CUBIN_PATH", str(tmp_path / "layer"))
    monkeypatch.setenv("STROBE_NO_COMPILE", "1")
    if damage is None:
        artifact = jit.get(SOURCE, "sm_80")
        assert (artifact.origin, artifact.cubin, artifact.path) == ("layer", made.cubin, written)
    else:
        with pytest.raises(jit.CompileForbidden, match=f"damaged: {re.escape(str(written))}"):
            jit.get(SOURCE, "sm_80")


def test_compiling_can_be_forbidden(tmp_path, monkeypatch, cache):
    monkeypatch.setenv("STROBE_NO_COMPILE", "1")
    monkeypatch.setenv("STROBE_CUBIN_PATH", str(tmp_path / "layer"))
    with pytest.raises(jit.CompileForbidden) as caught:
        jit.get(SOURCE, "sm_80", name="forward")
    for said in ("forward", "sm_80", jit.key_of(SOURCE, "sm_80"), str(tmp_path / "layer"), str(cache)):
        assert said in str(caught.value)


@needs_nvrtc
def test_verbose_says_one_line_per_kernel(monkeypatch, capsys):
    monkeypatch.setenv("STROBE_VERBOSE", "1")
    artifact = jit.get(SOURCE, "sm_80", name="forward[bf16]")
    version = ".".join(map(str, jit.nvrtc_version()))
    said = capsys.readouterr()
    assert re.fullmatch(rf"strobe: compiled forward\[bf16\] for sm_80 in \d+\.\d\d s \(NVRTC {version}\)\n", said.err)
    assert said.out == ""
    jit.get(SOURCE, "sm_80", name="forward[bf16]")
    assert capsys.readouterr().err == ""
    forget(monkeypatch)
    jit.get(SOURCE, "sm_80", name="forward[bf16]")
    path = re.escape(str(artifact.path))
    assert re.fullmatch(
        rf"strobe: loaded forward\[bf16\] for sm_80 from {path} in \d+\.\d ms\n", capsys.readouterr().err
    )


@needs_nvrtc
def test_without_verbose_nothing_is_said(capsys):
    jit.get(SOURCE, "sm_80")
    assert capsys.readouterr().err == ""


@needs_nvrtc
def test_two_threads_compile_a_kernel_once(monkeypatch):
    made = jit.compile(SOURCE, "sm_80")
    calls = []
    together = threading.Barrier(4)

    def slow(source, arch, **kwargs):
        calls.append(source)
        threading.Event().wait(0.1)
        return made

    def ask(source):
        together.wait()
        origins.append(jit.get(source, "sm_80").origin)

    origins: list[str] = []
    monkeypatch.setattr(jit, "compile", slow)
    threads = [threading.Thread(target=ask, args=(source,)) for source in (SOURCE, OTHER) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == [SOURCE, OTHER]
    assert sorted(origins) == ["compiled", "compiled", "memory", "memory"]


RACE = """
import hashlib, sys, types
sys.modules["strobe"] = types.ModuleType("strobe")  # the CUDA layer alone: it needs no torch, which is slow to import
sys.modules["strobe"].__path__ = [sys.argv[1]]
from strobe.cuda.runtime import jit
artifact = jit.get(sys.argv[2], "sm_80")
assert "torch" not in sys.modules
print(artifact.key, hashlib.sha256(artifact.cubin).hexdigest())
"""


@needs_nvrtc
def test_six_processes_race_for_one_kernel(cache):
    command = [sys.executable, "-c", RACE, str(Path(jit.__file__).parents[2]), SOURCE]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    answers = {racer.communicate(timeout=600)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 6
    assert len(answers) == 1
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".cu", ".cubin"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_an_artifact_cannot_be_changed():
    artifact = jit.Artifact(b"", "key", "memory", None, 0.0, "", "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        artifact.key = "other"


@needs_nvrtc
def test_an_environment_that_builds_on_another_finds_its_compiler(tmp_path):
    """The environment is made as `make setup` makes it where python3 already has torch: packages are seen through a
    path file."""
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join([*seen, str(Path(jit.__file__).parents[3])]))
    compiles = "print(jit.nvrtc_status()); jit.compile('__global__ void kernel() {}', 'sm_80')"
    command = f"from strobe.cuda.runtime import jit; {compiles}"
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", command], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout.splitlines() == ["None"], done.stdout + done.stderr
