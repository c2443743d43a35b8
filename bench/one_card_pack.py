"""Wheels and files for a machine with a card and no network, which takes them in pieces.

    python -m bench.one_card pack DIR         # here, where pip reaches its index
    python -m bench.one_card unpack DIR SITE  # there, once for each piece

For Linux on x86-64, Python 3.12, a Hopper card and the torch, transformers and triton that are there: what Megatron,
DeepSpeed, vLLM and the tests need beside them.  Of vLLM's wheel goes along what one dense model on a Hopper card
imports.  DIR/1 has all but the end of the largest library; DIR/2 has that.  Standard library only: unpacking comes
before anything else can be imported.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PYTHON = "3.12"
PIECE_BYTES = 52 << 20  # with the checkout beside it 64 MiB
VLLM = "vllm==0.26.0"  # the newest that was built for torch 2.11
ENGINE_WHEELS = (
    "msgspec", "pybase64", "pyzmq", "cachetools<8", "pydantic==2.14.3", "pydantic-core==2.50.4", "typing-inspection",
    "annotated-types", "cbor2", "openai-harmony", "openai<3", "sniffio", "jiter", "distro", "llguidance>=1.7,<1.8",
    "xgrammar==0.2.8", "apache-tvm-ffi==0.1.15.post2", "fastapi==0.136.3", "starlette<2", "partial-json-parser",
    "compressed-tensors==0.17.0", "loguru", "blake3", "setproctitle",
)  # fmt: skip
TRAINER_WHEELS = (
    "megatron-core==0.16.1", "hjson", "typing-extensions>=4.16", "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1", "referencing==0.37.0", "rpds-py", "submitit==1.5.4", "zlib-ng==1.1.0",
    "pytest-asyncio==1.5.0",
)  # fmt: skip
BUILT_HERE = ("deepspeed==0.19.8",)  # pure Python without its compiled parts
GLIBCS = (39, 36, 35, 34, 31, 28, 27, 26, 24, 17)
LIBRARY = "vllm/_C_stable_libtorch.abi3.so"  # over a hundred megabytes
ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"  # Hopper's
BASE = "vllm_base.tar.xz"
LEFT_OUT = ("vllm/vllm-rs", "/static/", ".jpg", "_vllm_fa2_C", "_vllm_fa3_C", "_moe_C", "_C_stable")
OTHER_PYTHONS = tuple(f"cpython-3{minor}" for minor in (10, 11, 13, 14))
PART = ".part"  # of a library: NAME.partI-of-N


def pack(directory: Path) -> list[str]:
    """Make DIR/1 and DIR/2; returns a line about each.  Raises CalledProcessError where pip fails."""
    first, second = directory / "1", directory / "2"
    for piece in (first, second):
        shutil.rmtree(piece, ignore_errors=True)
        piece.mkdir(parents=True)
    download((*ENGINE_WHEELS, *TRAINER_WHEELS), first)
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(first), *BUILT_HERE]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=environment)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        download((VLLM,), Path(scratch))
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as content:
            write_base(content, first / BASE)
            (first / f"{Path(ATTENTION).name}.xz").write_bytes(compressed(content.read(ATTENTION)))
            library = compressed(content.read(LIBRARY))
    room = PIECE_BYTES - sum(file.stat().st_size for file in first.iterdir())
    name = f"{Path(LIBRARY).name}.xz{PART}"
    (first / f"{name}1-of-2").write_bytes(library[: max(0, room)])
    (second / f"{name}2-of-2").write_bytes(library[max(0, room) :])
    return [check_size(piece) for piece in (first, second)]


def download(requirements: Sequence[str], directory: Path) -> None:
    """Fetch wheels for the other machine."""
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in GLIBCS] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    words = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    words += [word for platform in platforms for word in ("--platform", platform)]
    words += ["--dest", str(directory), *requirements]
    subprocess.run([sys.executable, "-m", "pip", "download", *words], check=True)


def write_base(wheel: zipfile.ZipFile, target: Path) -> None:
    """Write what an engine imports of vLLM's wheel, without its large libraries."""
    with tarfile.open(target, "w:xz") as archive:
        for member in members_of_base(wheel.namelist()):
            info = tarfile.TarInfo(member)
            info.size, info.mode = wheel.getinfo(member).file_size, 0o755
            with wheel.open(member) as content:
                archive.addfile(info, content)


def members_of_base(names: Sequence[str]) -> Iterator[str]:
    """Return the files of BASE among those of the wheel."""
    for name in names:
        if not name.endswith("/") and not any(word in name for word in (*LEFT_OUT, *OTHER_PYTHONS)):
            yield name


def compressed(content: bytes) -> bytes:
    """Return it as small as xz makes it; a hundred megabytes take minutes."""
    return lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)


def check_size(piece: Path) -> str:
    """Return what a piece holds.  Raises SystemExit if it is too large."""
    sizes = {file.name: file.stat().st_size for file in piece.iterdir()}
    told = f"{piece}: {len(sizes)} files, {sum(sizes.values()) / 2**20:.1f} MiB"
    if sum(sizes.values()) > PIECE_BYTES:
        largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])
        raise SystemExit(f"{told}; at most {PIECE_BYTES / 2**20:.0f} MiB travel at once; the largest: {largest}")
    return told


# ----------------------------------------------------------------------------------------------------------- there


def unpack(piece: Path, site: Path) -> list[str]:
    """Add one piece to a directory that goes on PYTHONPATH; returns a line about each kind of file.

    Parts of a library wait in SITE/.parts until all are there.
    """
    done, wheels = [], sorted(piece.glob("*.whl"))
    if wheels:
        words = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        command = [sys.executable, "-m", "pip", "install", *words, "--target", str(site), *map(str, wheels)]
        subprocess.run(command, check=True)
        done.append(f"{len(wheels)} wheels")
    for file in sorted(piece.glob("*.tar.xz")):
        with tarfile.open(file) as archive:
            archive.extractall(site, filter="data")
        done.append(file.name)
    places = {Path(name).name: name for name in (LIBRARY, ATTENTION)}
    for name, content in (*whole_files(piece), *joined(piece, site / ".parts")):
        target = site / places[name.removesuffix(".xz")]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(lzma.decompress(content))
        done.append(places[name.removesuffix(".xz")])
    return done


def whole_files(piece: Path) -> Iterator[tuple[str, bytes]]:
    """Return the libraries that came at once: (name, content)."""
    for file in sorted(piece.glob("*.so.xz")):
        yield file.name, file.read_bytes()


def joined(piece: Path, waiting: Path) -> Iterator[tuple[str, bytes]]:
    """Keep the parts of this piece; return the libraries of which all parts are there now."""
    waiting.mkdir(parents=True, exist_ok=True)
    for part in sorted(piece.glob(f"*{PART}*-of-*")):
        shutil.copy(part, waiting / part.name)
        name, _, number = part.name.partition(PART)
        parts = [waiting / f"{name}{PART}{index + 1}-of-{number[-1]}" for index in range(int(number[-1]))]
        if all(each.exists() for each in parts):
            yield name, b"".join(each.read_bytes() for each in parts)
