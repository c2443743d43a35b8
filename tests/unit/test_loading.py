"""The garbage collector is off while libraries load, and never looks at what they are made of."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from rlhpc.base.native import loading_libraries


@pytest.mark.starts  # in a process of its own: what is frozen stays so
@pytest.mark.parametrize(("words", "is_frozen"), [("import decimal", True), ("pass", False)])
def test_what_is_loaded_is_permanent_afterwards(words: str, is_frozen: bool) -> None:
    code = (
        "import gc\n"
        "from rlhpc.base.native import loading_libraries\n"
        "before = gc.get_freeze_count()\n"
        "with loading_libraries():\n"
        "    with loading_libraries():\n"
        f"        assert not gc.isenabled(); {words}\n"
        "    assert not gc.isenabled() and gc.get_freeze_count() == before\n"
        "assert gc.isenabled()\n"
        f"assert (gc.get_freeze_count() > before) is {is_frozen}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_import_that_fails_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ModuleNotFoundError), loading_libraries():
        raise ModuleNotFoundError
    assert gc.isenabled()


def test_whoever_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with loading_libraries():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.starts
def test_numba_is_loaded_by_the_first_call_of_what_it_compiles() -> None:
    """vLLM 0.32 looks for kernels in every module that is loaded and fails at llvmlite's (triton_utils/dispatcher.py):
    an engine's workers, which import the main module of whoever spawns them, did not start.
    """
    code = (
        "import sys\n"
        "import rlhpc.roles.controller.controller, rlhpc.transport.codec\n"
        "import rlhpc.weights.checksums, rlhpc.weights.deltas\n"
        "assert 'llvmlite' not in sys.modules\n"
        "import torch\n"
        "from rlhpc.weights.checksums import checksum64\n"
        "checksum64(torch.zeros(1 << 22, dtype=torch.uint8))\n"
        "assert 'llvmlite' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
