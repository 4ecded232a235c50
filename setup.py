"""The compiled kernel and its fixed flags; everything else is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# -ffp-contract=fast lets this one file use fused multiply-adds, which its proofs allow (rankcert/checker/PROOFS.md).
# Nothing here depends on the building machine: the kernel picks its instruction set when it runs.
FLAGS = ["/O2", "/fp:precise"] if sys.platform == "win32" else ["-O3", "-ffp-contract=fast"]

setup(
    ext_modules=[
        Extension(
            "rankcert.checker._kernel",
            ["rankcert/checker/_kernel.pyx"],
            depends=["rankcert/checker/kernel.h", "rankcert/checker/kernel_lanes.h"],
            extra_compile_args=FLAGS,
        )
    ]
)
