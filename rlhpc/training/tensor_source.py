"""Tensors in safetensors files, of which only the requested parts are read.

Input: the directory of an HF checkpoint, or files that hold named tensors.  Output: rows and columns of them.
Guarantees: files are mapped, not read; few are open at once; errors of the disk or of the format are raised as our own
errors, naming the file.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhpc.errors import ConfigError, RlhpcError
from rlhpc.safetensors_header import REAL_DTYPES

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_OPEN_FILES = 4  # pages of a mapped file count as this process's memory until it is closed


class TensorSource:
    """Names, shapes and parts of tensors.  For one thread; a pickled or copied one does not work."""

    def __init__(self, files: Mapping[str, Path], *, origin: str, error: Callable[[str], RlhpcError]) -> None:
        """files: tensor name → the file that holds it.  origin: begins every message.  Opens nothing yet."""
        self._files, self._origin, self._error = dict(files), origin, error
        self._open: OrderedDict[Path, Any] = OrderedDict()  # least recently used first

    @classmethod
    def of_files(cls, files: Mapping[str, Path], *, error: Callable[[str], RlhpcError] = ConfigError) -> TensorSource:
        """The caller states which file holds which tensor.  error: the class that is raised for a bad file."""
        return cls(files, origin="", error=error)

    @classmethod
    def of_model(cls, directory: Path) -> TensorSource:
        """Take an HF checkpoint: one safetensors file, several with an index, or several without.

        model.safetensors is all of it where it is there, as for transformers: the rest is another save's.
        Raises ConfigError naming model.path and the file, also for a file that the index names and that is not there.
        """
        origin = f"model.path={directory}: "
        is_one_file = (directory / ONE_FILE).is_file()
        if not is_one_file and (directory / INDEX_FILE).is_file():
            files = _files_of_index(directory, origin)
            for path in sorted(set(files.values())):
                if not path.is_file():
                    raise ConfigError(f"{origin}{path.name} is missing, though {INDEX_FILE} names it")
            return cls(files, origin=origin, error=ConfigError)
        paths = [directory / ONE_FILE] if is_one_file else sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ConfigError(f"{origin}no *.safetensors file in this directory")
        with cls({}, origin=origin, error=ConfigError) as source:
            files = {name: path for path in paths for name in source._names_in(path)}
        return cls(files, origin=origin, error=ConfigError)

    def __enter__(self) -> TensorSource:
        """No action: files are opened when something is read."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the header of its file.  Raises `error` for a name that is not there."""
        with self._mapped(name):
            return tuple(self._file_of(name).get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype | None = None, index: tuple[slice, ...] | None = None) -> Tensor:
        """Return tensor[index] on the CPU, all of it without `index`, in its own dtype without `dtype`.

        May be a view of the mapped file, which is read from disk on access: copy it, neither keep it nor write to it.
        Raises `error` for a name that is not there, or a file that is damaged or cannot be read.
        """
        with self._mapped(name):
            part: Tensor = self._file_of(name).get_slice(name)[index or ...]
        return part if dtype is None else part.to(dtype)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `error` naming the tensor if it is not there, of another shape, or of integers."""
        found = self.shape(name)
        with self._mapped(name):
            dtype = self._file_of(name).get_slice(name).get_dtype()
        if dtype not in REAL_DTYPES:
            raise self._error(
                f"{self._origin}{self._files[name]}: {name} is stored as {dtype}: quantised weights are not trained; "
                f"legal: {', '.join(REAL_DTYPES)}"
            )
        if found != shape:
            raise self._error(
                f"{self._origin}{self._files[name]}: {name} is {found}, not {shape} as config.json has it"
            )

    def close(self) -> None:
        """Close what is open; reading opens it again."""
        self._open.clear()

    @contextmanager
    def _mapped(self, name: str) -> Iterator[None]:
        """Map foreign errors to our own."""
        if name not in self._files:
            raise self._error(f"{self._origin}there is no tensor {name}")
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise self._error(f"{self._origin}{self._files[name]}: cannot read {name}: {error}") from error

    def _file_of(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            while len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)
            self._open[path] = safe_open(path, framework="pt")
        self._open.move_to_end(path)
        return self._open[path]

    def _names_in(self, path: Path) -> list[str]:
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except (OSError, SafetensorError) as error:
            raise self._error(f"{self._origin}{path.name}: is no safetensors file: {error}") from error


def _files_of_index(directory: Path, origin: str) -> dict[str, Path]:
    try:
        content = json.loads((directory / INDEX_FILE).read_bytes())
        return {str(name): directory / str(file) for name, file in content["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{origin}{INDEX_FILE} cannot be read: {error!r}") from error
