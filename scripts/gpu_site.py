#!/usr/bin/env python3
"""Pack the Python packages that an SGLang server needs beside those of a CUDA image, without a network.

    .venv/bin/python scripts/gpu_site.py [--target 3.12] OUT.tar.xz -- PIP

PIP is a command that is pip, as "python3 -m pip"; an environment that uv made has none.

Which: START, and what the imports of a server still lack. The imports are tried here, in the environment of
scripts/setup.sh, once as on the CPU and once as on a CUDA device (torch is told that there is one), in a
Python that sees only what is packed and what the image has (scripts/gpu_image_packages.txt). Versions are
those of the environment. Nothing is a stub. Left out is what DROP names: kernels for other devices and of
attention backends that are not used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "scripts" / "gpu_image_packages.txt"

# The image's transformers and tokenizers are newer than SGLang's. Behind these six: what was found to be
# missing, to save tries.
START = """sglang sglang-kernel flashinfer-python transformers tokenizers pytest-timeout
    annotated-types apache-tvm-ffi cffi compressed-tensors dill distro fastapi gguf ipython
    jsonschema jsonschema-specifications loguru msgspec openai opentelemetry-api orjson
    partial-json-parser pybase64 pydantic pydantic-core python-multipart pyzmq referencing rpds-py
    setproctitle sniffio soundfile starlette traitlets typing-inspection uvicorn watchfiles""".split()

DROP = re.compile(
    r"""
    (^|/)__pycache__/ | ^bin/ | /direct_url\.json$
    | ^sgl_kernel/(flash_ops|flashmla_ops|spatial_ops)\. # FlashAttention-3 alone has 1.7 GB
    | ^sgl_kernel/sm100/                                 # Blackwell; Hopper loads sm90
    | ^sglang/multimodal_gen/                            # image and video generation, another server
    | ^sglang/test/
    """,
    re.VERBOSE,
)

MODULES = """sglang.launch_server sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler
    sglang.srt.managers.detokenizer_manager sglang.srt.model_executor.model_runner
    sglang.srt.layers.attention.triton_backend sglang.srt.models.qwen3
    sglang.srt.disaggregation.fake.conn""".split()

PROBE = """
import os, sys, types
if os.environ.get("PROBE_CUDA"):
    sys.setdlopenflags(os.RTLD_LAZY)  # the stub of libcuda has no symbols
    import torch
    about = types.SimpleNamespace(major=9, minor=0, total_memory=80 << 30, multi_processor_count=132,
                                  name="H100", shared_memory_per_block_optin=232448)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: "H100"
    torch.cuda.get_device_properties = lambda *_: about
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def top_level(distribution: importlib.metadata.Distribution) -> set[str]:
    """Entries of site-packages that belong to it."""
    return {
        file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "bin")
    }


def link(names: set[str], folder: Path) -> None:
    """Fill ``folder`` with what of this environment belongs to ``names``."""
    for distribution in importlib.metadata.distributions():
        if canonical(distribution.name) in names:
            for entry in top_level(distribution):
                if not (folder / entry).is_symlink() and entry != "__pycache__":
                    (folder / entry).symlink_to(str(distribution.locate_file(entry)))


def missing_module(names: set[str], cuda: bool) -> str | None:
    """Name of a top-level module that the imports lack, if only ``names`` are there.

    Raises:
        SystemExit: they fail for another reason.
    """
    with tempfile.TemporaryDirectory() as scratch:
        view = Path(scratch) / "site"
        view.mkdir()
        link(names, view)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
        environment |= {"PYTHONPATH": str(view), "HF_HUB_OFFLINE": "1"}
        if cuda:
            subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", f"{scratch}/libcuda.so.1"],
                           input=b"", check=True)  # fmt: skip
            environment |= {"PROBE_CUDA": "1", "LD_LIBRARY_PATH": scratch}
        else:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        done = subprocess.run([sys.executable, "-S", "-c", PROBE, *MODULES], env=environment,
                              capture_output=True, text=True)  # fmt: skip
    if done.returncode == 0:
        return None
    found = re.findall(
        r"^ModuleNotFoundError: No module named '([^'.]+)", done.stderr, re.MULTILINE
    )
    if not found:
        sys.exit(f"gpu_site: the imports fail, cuda={cuda}:\n{done.stderr[-3000:]}")
    return found[-1]


def needed(image: set[str]) -> set[str]:
    """Names of the packages to pack."""
    chosen = {canonical(name) for name in START}
    owners = importlib.metadata.packages_distributions()
    for cuda in (False, True):
        while module := missing_module(chosen | image, cuda):
            names = {canonical(name) for name in owners.get(module, [])} - chosen - image
            if not names:
                sys.exit(f"gpu_site: no package of this environment has the module {module}")
            print(f"gpu_site: {module}: adding {', '.join(sorted(names))}", flush=True)
            chosen |= names
    return chosen


def install(names: set[str], target: str, folder: Path, pip: Sequence[str]) -> None:
    """Unpack the wheels of ``names`` for Python ``target``.

    Raises:
        SystemExit: pip fails, after it has said why.
    """
    pins = [f"{name}=={importlib.metadata.version(name)}" for name in sorted(names)]
    # pip tries the first platform first, and knows no order among those of glibc's versions.
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)]
    command = [*pip, "install", "--quiet", "--no-compile", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", target, "--target", str(folder)]
    for platform in [*platforms, "manylinux2014_x86_64"]:
        command += ["--platform", platform]
    if subprocess.run([*command, *pins]).returncode:
        sys.exit(f"gpu_site: {' '.join(pip)} could not install the wheels for Python {target}")


def pack(folder: Path, out: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for path in files:
            name = path.relative_to(folder).as_posix()
            if not DROP.search(name):
                archive.add(path, arcname=name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="3.12", help="Python version of the image")
    parser.add_argument("pip", nargs="+", metavar="PIP", help="behind --: a command that is pip")
    options = parser.parse_args()
    lines = IMAGE.read_text().splitlines()
    image = {canonical(line) for line in lines if line and not line.startswith("#")}
    names = needed(image - {canonical(name) for name in START})
    with tempfile.TemporaryDirectory(dir=options.out.resolve().parent) as scratch:
        install(names, options.target, Path(scratch) / "site", options.pip)
        pack(Path(scratch) / "site", options.out)
    print(f"gpu_site: {len(names)} packages, {options.out.stat().st_size / 2**20:.1f} MiB: "
          f"{' '.join(sorted(names))}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
