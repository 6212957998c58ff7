"""The program that compiles SGLang's modules beforehand says what it could not compile, and fails for no server."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_without_a_compiler_it_says_so_and_lets_the_servers_start(tmp_path):
    hidden = {"CUDA_HOME": "/none", "CUDA_VISIBLE_DEVICES": "", "TVM_FFI_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.server.prewarm"], capture_output=True, text=True,
        env={**os.environ, **hidden, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    without_modules = "nothing done: No module named 'sglang.jit_kernel'"  # SGLang 0.5.23
    assert without_modules in said or "0 modules found, 0 built, 10 failed" in said
