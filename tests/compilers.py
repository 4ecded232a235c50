"""The C compiler of the tests that build something. Without one they fail and say so, rather than be skipped."""

import os
import shutil
import sysconfig

import pytest


def find_compiler() -> list[str]:
    """The compiler Python was built with, or another one on the path."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        if command and shutil.which(command.split()[0]):
            return command.split()
    pytest.fail("these tests need a C compiler (cc, gcc or clang); none was found")
