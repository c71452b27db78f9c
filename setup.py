"""Build hook of spare_megatron: the native libraries. Metadata and tool settings are in pyproject.toml.

Those for the CPU are built by the C++ compiler ($CXX, else c++), the CUDA one by nvcc ($NVCC, or on the path) where
there is one. None is required: what cannot be built is said once, and torch's operations or Python do its work, slower.
The libraries have a plain C interface; nothing of Python or torch is compiled in.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels")
# No contraction: a product and a sum are two roundings on every machine. No -ffast-math, for the same reason.
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
X86_FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mprefer-vector-width=512"],
}
CUDA_TARGETS = ("80", "90", "100")
CUDA_FLAGS = ["-O3", "-std=c++17", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-cudart", "static"]


class NativeLibrary(Extension):
    """A shared library that Python loads with ctypes."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[], depends=sorted(map(str, SOURCES.glob("*"))), optional=True)


class BuildLibraries(build_ext):
    """Compiles without Python's own flags. A failure leaves the library out and says why in one message."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp) / ext.name
        for folder in (target.parent, objects):
            folder.mkdir(parents=True, exist_ok=True)
        build, tool, stand_in = LIBRARIES[ext.name]
        try:
            build(target, objects)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            if self.inplace or self.editable_mode:
                stale = Path(*ext.name.split(".")[:-1]).glob(f"{ext.name.split('.')[-1]}.*so")
                for library in stale:
                    library.unlink()
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            print(
                f"spare_megatron: {ext.name} was not built ({reason[0] if reason else error}); {stand_in}. "
                f"Install {tool}, and run pip install -e . again.",
                file=sys.stderr,
            )


class LibraryWheel(bdist_wheel):
    """A wheel for every Python 3 on this platform, since its libraries call nothing of Python; for every platform where
    no library was built."""

    def get_tag(self) -> tuple[str, str, str]:
        built = any(Path(self.bdist_dir).rglob("*.so"))
        return "py3", "none", super().get_tag()[2] if built else "any"


def build_cpu(target: Path, objects: Path) -> None:
    """One object for each instruction set and one that picks among them, linked to ``target``."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sets = X86_FLAGS if x86 else {"plain": []}
    sources = {f"cpu_{name}": flags for name, flags in sets.items()}
    compile_and_link(target, objects, {"cpu": ["-DSPARE_X86"] if x86 else [], **sources}, ["-pthread"])


def build_of(source: str) -> Callable[[Path, Path], None]:
    """What builds a library of one source that has no loops for which instruction sets matter."""
    return lambda target, objects: compile_and_link(target, objects, {source: []})


def compile_and_link(
    target: Path, objects: Path, sources: Mapping[str, Sequence[str]], link: Sequence[str] = ()
) -> None:
    """Link ``target`` from one object for each of ``sources``: name without its ending -> its own flags."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    made = [str(objects / f"{name}.o") for name in sources]
    commands = [
        [*compiler, *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", to]
        for (name, flags), to in zip(sources.items(), made, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    run([*compiler, "-shared", *link, *made, "-o", str(target)])


def build_cuda(target: Path, objects: Path) -> None:
    """One library with code for each GPU in CUDA_TARGETS, and PTX of the last for those that come."""
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in CUDA_TARGETS]
    codes.append(f"-gencode=arch=compute_{CUDA_TARGETS[-1]},code=compute_{CUDA_TARGETS[-1]}")
    run([nvcc() or "nvcc", *CUDA_FLAGS, *codes, "-shared", str(SOURCES / "cuda.cu"), "-o", str(target)])


def nvcc() -> str | None:
    """The CUDA compiler, if there is one."""
    return os.environ.get("NVCC") or shutil.which("nvcc")


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


COMPILER = "a C++ compiler, or set CXX"
IN_TORCH, IN_PYTHON = "torch's operations do its work", "Python does its work"
SLOW = "several times slower"
CUDA_LIBRARY = "spare_megatron.kernels._native_cuda"
LIBRARIES = {
    "spare_megatron.kernels._native": (build_cpu, COMPILER, f"{IN_TORCH}, {SLOW}"),
    "spare_megatron.protocol._chains": (build_of("chains"), COMPILER, f"{IN_PYTHON}, {SLOW}"),
    "spare_megatron.collectives._ring": (
        build_of("ring"),
        COMPILER,
        f"{IN_PYTHON}, with a fifth to a half more CPU time",
    ),
    CUDA_LIBRARY: (build_cuda, "nvcc, or set NVCC", f"{IN_TORCH}, {SLOW}"),
}
"""Name -> what builds it, with what, and what stands in for it."""

if __name__ == "__main__":
    cuda = bool(nvcc()) and (SOURCES / "cuda.cu").exists()
    setup(
        ext_modules=[NativeLibrary(name) for name in LIBRARIES if cuda or name != CUDA_LIBRARY],
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": LibraryWheel},
    )
