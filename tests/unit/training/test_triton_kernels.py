"""Where Triton is there and does not work, training goes on without its kernels."""

from __future__ import annotations

import sys

import pytest
import torch

from rlhpc.training.triton_kernels import compiled_kernels

KERNELS = "logit_kernels"
# Triton 3.6 where the linker's cache does not list the driver's library, which torch has found by itself.
WITHOUT_LIBCUDA = """
class jit:
    def __init__(self, function): ...
    def __getitem__(self, grid):
        raise AssertionError("libcuda.so cannot found!")
"""


@pytest.fixture
def triton_without_libcuda(tmp_path, monkeypatch):
    for name in ("triton", "triton.language", "triton.errors", f"rlhpc.training.{KERNELS}"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is put back
        del sys.modules[name]
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text(WITHOUT_LIBCUDA)
    (package / "language.py").touch()
    (package / "errors.py").write_text("class TritonError(Exception): ...\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("triton_without_libcuda")
def test_a_triton_that_does_not_find_the_driver_is_done_without(caplog):
    with caplog.at_level("WARNING", "rlhpc.training"):
        assert compiled_kernels.__wrapped__(KERNELS, torch.device("cpu"), torch.float32) is None
    assert "Triton does not work here: libcuda.so cannot found!" in caplog.text
