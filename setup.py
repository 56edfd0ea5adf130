"""The compiled half of cpu_kernels; everything else stands in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cpu_kernels._native",
            sources=["cpu_kernels/_native.pyx", *sorted(glob("cpu_kernels/src/*.cpp"))],
            depends=sorted(glob("cpu_kernels/src/*.hpp")),
            include_dirs=["cpu_kernels/src"],
            language="c++",
            # Baseline flags only: code for an instruction set carries its own target, so a build runs anywhere.
            extra_compile_args=["-std=c++17", "-O3", "-Wall", "-Wextra"],
        )
    ]
)
