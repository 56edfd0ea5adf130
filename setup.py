"""The compiled parts of cpu_kernels; everything else stands in pyproject.toml."""

from glob import glob
from os.path import exists

from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup

SRC = "cpu_kernels/src"
# Threads and hand-off know nothing of attention and are a module of their own.
WORKER_SOURCES = sorted(f"{SRC}/{name}.cpp" for name in ("worker_pool", "handoff", "fake_device"))
PROBE_SOURCES = [f"{SRC}/probe.cpp"]  # measures memory, for the tools
KERNEL_SOURCES = sorted({*glob(f"{SRC}/*.cpp"), *glob(f"{SRC}/*/kernels.cpp")} - {*WORKER_SOURCES, *PROBE_SOURCES})
# Baseline flags only: code for an instruction set carries its own target, so a build runs anywhere. -O2: the kernels
# are written in vectors and unrolled by hand; -O3 makes the build half as long again. -g0: Python's own flags ask for
# debug information, which takes a quarter of the build.
FLAGS = ["-std=c++17", "-O2", "-g0", "-Wall", "-Wextra", "-pthread"]


def extension(name: str, sources: list[str]) -> Extension:
    return Extension(
        f"cpu_kernels.{name}",
        sources=[f"cpu_kernels/{name}.pyx", *sources],
        depends=sorted([*glob(f"{SRC}/*.hpp"), *glob(f"{SRC}/*/*.hpp")]),
        include_dirs=[SRC],
        language="c++",
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
    )


ParallelCompile("NPY_NUM_BUILD_JOBS").install()  # the kernels of each instruction set take a while: use all cores
setup(
    ext_modules=[
        extension(name, sources)
        for name, sources in (
            ("_native", KERNEL_SOURCES),
            ("_workers", WORKER_SOURCES),
            ("_probe", PROBE_SOURCES),
        )
        if exists(f"cpu_kernels/{name}.pyx")
    ]
)
