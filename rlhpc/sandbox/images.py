"""Images on disk, unpacked once for each node into a cache of root directories.

    OCI layout (directory or tarball), `docker save`, `podman save`, tarball of a root, directory  ──▶  Root

Nothing is pulled, and nothing is built.  The cache is on a node's own disk, by the digest of the image:
BASE/DIGEST/root, and about.json beside it.  A root appears there whole, by a rename, under a lock; one that was being
unpacked when its process ended is never used, and swept by the next process; one from before the node's last start is
unpacked again, since files that were not synced may have been lost.

    python -m rlhpc.sandbox.images CACHE IMAGE...      unpacks images ahead
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rlhpc.protocol.errors import ConfigError
from rlhpc.sandbox.container import Root
from rlhpc.sandbox.container_init import OWNER, copy_tree

_READ_BYTES = 1 << 20
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_OF_MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_LINKS = 40
ABOUT = "about.json"
_HOW_TO_SAVE = (
    "legal: an OCI layout (skopeo copy docker://NAME oci:DIRECTORY), the file of `docker save` or `podman save`, a "
    "tarball of a root directory, or a directory (apptainer build --sandbox DIRECTORY docker://NAME)"
)

# --------------------------------------------------------------------------------------------------------------- images


class _Files(Protocol):
    """The files of an image by name: of a directory, or of a tarball."""

    def names(self) -> set[str]:
        """Names at the top."""

    def open(self, name: str) -> IO[bytes]:
        """Raises KeyError or FileNotFoundError."""


@dataclass(frozen=True, slots=True)
class _Directory:
    path: Path

    def names(self) -> set[str]:
        return {each.name for each in self.path.iterdir()}

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")


@dataclass(frozen=True, slots=True)
class _Tarball:
    tar: tarfile.TarFile

    def names(self) -> set[str]:
        return {_plain(name) for name in self.tar.getnames()}

    def open(self, name: str) -> IO[bytes]:
        members = {_plain(each.name): each for each in self.tar.getmembers()}
        member = members[name]
        while member.issym():  # as older versions of docker write layers that are there twice
            member = members[os.path.normpath(os.path.join(os.path.dirname(_plain(member.name)), member.linkname))]
        found = self.tar.extractfile(member)
        if found is None:
            raise KeyError(name)
        return found


@dataclass(frozen=True, slots=True)
class Image:
    """An image on disk."""

    path: Path
    kind: str  # "OCI layout", "docker save", "tarball", "directory"
    digest: str  # sha256 of what it holds, in hexadecimal
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = "/"
    layers: tuple[tuple[str, str], ...] = ()  # (name in the image, digest of its content or "")


def open_image(path: Path) -> Image:
    """Look at an image.  Raises ConfigError: none, damaged, or of another kind."""
    try:
        if path.is_dir():
            if (path / "oci-layout").is_file() and (path / "index.json").is_file():
                return _of_oci(path, _Directory(path))
            return Image(path, "directory", _digest_of_tree(path))
        with tarfile.open(path, "r:*") as tar:
            first = tar.next()
            if first is not None and _plain(first.name) in _names_of_archives(first, tar):
                names = {_plain(name) for name in tar.getnames()}
                if {"oci-layout", "index.json"} <= names:
                    return _of_oci(path, _Tarball(tar))
                if "manifest.json" in names:
                    return _of_docker(path, _Tarball(tar))
        return Image(path, "tarball", _digest_of_file(path))
    except FileNotFoundError as error:
        raise ConfigError(f"image {path}: {error.filename or error} is missing; {_HOW_TO_SAVE}") from error
    except (tarfile.TarError, OSError, EOFError) as error:
        is_sif = path.suffix in (".sif", ".sqsh", ".squashfs")
        made = f"; `apptainer build --sandbox DIRECTORY {path}` makes a directory of it" if is_sif else ""
        raise ConfigError(f"image {path}: {error}{made}; {_HOW_TO_SAVE}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"image {path} is damaged: {type(error).__name__}: {error}; {_HOW_TO_SAVE}") from error


def _names_of_archives(first: tarfile.TarInfo, tar: tarfile.TarFile) -> set[str]:
    """Names with which an archive of an image may begin; that of a root, which may be large, is not listed."""
    is_root = _plain(first.name).split("/")[0] in ("", "bin", "usr", "etc", "lib", "dev", "root", "home", "var", "opt")
    if is_root and _plain(first.name):
        return set()
    return {_plain(first.name)}


def _of_oci(path: Path, files: _Files) -> Image:
    index = json.load(files.open("index.json"))
    for _ in range(3):  # an index may be of indexes
        digest = _of_this_machine(index["manifests"], path)
        manifest = json.loads(_checked(files, digest))
        if "layers" in manifest:
            break
        index = manifest
    config = json.loads(_checked(files, manifest["config"]["digest"]))
    layers = tuple((_blob(each["digest"]), each["digest"]) for each in manifest["layers"])
    return Image(path, "OCI layout", digest.partition(":")[2], *_said_of_commands(config), layers)


def _of_docker(path: Path, files: _Files) -> Image:
    listed = json.load(files.open("manifest.json"))
    if len(listed) != 1:
        raise ConfigError(f"image {path} holds {len(listed)} images; legal: one (docker save NAME:TAG -o FILE)")
    told = files.open(listed[0]["Config"]).read()
    config = json.loads(told)
    contents = config["rootfs"]["diff_ids"]
    if len(contents) != len(listed[0]["Layers"]):
        raise ConfigError(f"image {path} has {len(listed[0]['Layers'])} layers, and its configuration {len(contents)}")
    layers = tuple(zip(listed[0]["Layers"], contents, strict=True))
    return Image(path, "docker save", hashlib.sha256(told).hexdigest(), *_said_of_commands(config), layers)


def _of_this_machine(manifests: Sequence[Mapping[str, Any]], path: Path) -> str:
    """Digest of the manifest for this machine's processor."""
    wanted = _OF_MACHINE.get(platform.machine(), platform.machine())
    fitting = [each for each in manifests if each.get("platform", {}).get("architecture", wanted) == wanted]
    if len(fitting) != 1:
        raise ConfigError(f"image {path} holds {len(fitting)} images for {wanted}; legal: one")
    return str(fitting[0]["digest"])


def _blob(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or not value.isalnum():
        raise ValueError(f"digest {digest!r}")
    return f"blobs/{kind}/{value}"


def _checked(files: _Files, digest: str) -> bytes:
    content = files.open(_blob(digest)).read()
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise ValueError(f"{_blob(digest)} does not have the digest of its name")
    return content


def _said_of_commands(config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """(environment variables, working directory) of an image's configuration."""
    said = config.get("config") or {}
    pairs = (str(each).partition("=") for each in said.get("Env") or ())
    return {name: value for name, _, value in pairs}, str(said.get("WorkingDir") or "/")


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_tree(path: Path) -> str:
    """Digest of names, modes, links, sizes and times of a directory; files are not read."""
    digest = hashlib.sha256(b"directory\0")
    for directory, names, files in os.walk(path):
        names.sort()
        for name in sorted([*names, *files]):
            whole = os.path.join(directory, name)
            about = os.lstat(whole)
            link = os.readlink(whole) if stat.S_ISLNK(about.st_mode) else ""
            size = (about.st_size, about.st_mtime_ns) if stat.S_ISREG(about.st_mode) else ()
            digest.update(repr((os.path.relpath(whole, path), about.st_mode, size, link)).encode())
    return digest.hexdigest()


def _plain(name: str) -> str:
    return os.path.normpath("/" + name)[1:]


# -------------------------------------------------------------------------------------------------------------- unpack


def unpack(image: Image, target: Path) -> None:
    """Unpack an image into an empty directory.  Raises ConfigError if it is damaged, OSError if there is no room."""
    try:
        if image.kind == "directory":
            copy_tree(str(image.path), str(target))
        elif image.kind == "tarball":
            with image.path.open("rb") as file:
                _apply(_decompressed(file, image.path), target)
        else:
            with contextlib.ExitStack() as stack:
                files: _Files = _Directory(image.path)
                if not image.path.is_dir():
                    files = _Tarball(stack.enter_context(tarfile.open(image.path, "r:*")))
                for name, digest in image.layers:
                    _apply_layer(files, name, digest, image, target)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, KeyError) as error:
        raise ConfigError(f"image {image.path} is damaged: {error}; save it again") from error


def _apply_layer(files: _Files, name: str, digest: str, image: Image, target: Path) -> None:
    """Apply a layer, whose bytes have this digest: compressed in an OCI layout, uncompressed otherwise."""
    is_oci = image.kind == "OCI layout"
    with files.open(name) as file:
        raw = _Hashed(file) if is_oci else file
        stream = _decompressed(raw, image.path)
        hashed = raw if isinstance(raw, _Hashed) else _Hashed(stream)
        _apply(stream if is_oci else hashed, target)
        hashed.read_all()
    if f"sha256:{hashed.digest.hexdigest()}" != digest:
        raise ConfigError(f"image {image.path}: {name} does not have the digest {digest}; save the image again")


class _Hashed(io.RawIOBase):
    """A stream, and the digest of what was read of it."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream, self.digest = stream, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece: bytes = self._stream.read(len(buffer))
        self.digest.update(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    def read_all(self) -> None:
        """Read the rest, as what follows the end of an archive."""
        while self.read(_READ_BYTES):
            pass


def _decompressed(stream: Any, path: Path) -> Any:
    buffered = io.BufferedReader(stream, _READ_BYTES) if isinstance(stream, io.RawIOBase) else stream
    start = buffered.peek(4)[:4] if hasattr(buffered, "peek") else _peeked(buffered)
    if start.startswith(_ZSTANDARD):
        raise ConfigError(
            f"image {path} is compressed by zstd, which is not read; legal: gzip, or none (skopeo copy "
            "--dest-compress-format gzip oci:OLD oci:NEW)"
        )
    return gzip.GzipFile(fileobj=buffered) if start.startswith(_GZIP) else buffered


def _peeked(stream: Any) -> bytes:
    start: bytes = stream.read(4)
    stream.seek(0)
    return start


def _apply(stream: Any, root: Path) -> None:
    """Apply the entries of an archive to a root, as a layer; no entry is written outside, whatever links there are."""
    directories: list[tuple[str, int, float]] = []
    with tarfile.open(fileobj=stream, mode="r|", errorlevel=1) as tar:
        for member in tar:
            name = _plain(member.name)
            if not name:
                continue
            parent = _inside(root, os.path.dirname(name))
            os.makedirs(parent, exist_ok=True)
            new = os.path.join(parent, os.path.basename(name))
            if os.path.basename(name) == _OPAQUE:
                for each in os.listdir(parent):
                    _remove(os.path.join(parent, each))
            elif os.path.basename(name).startswith(_WHITEOUT):
                _remove(os.path.join(parent, os.path.basename(name).removeprefix(_WHITEOUT)))
            else:
                _extract(tar, member, new, root)
                if member.isdir():
                    directories.append((new, member.mode, member.mtime))
    for path, mode, mtime in reversed(directories):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a later entry may have replaced it
            os.chmod(path, mode & 0o1777 | 0o700)
            os.utime(path, (mtime, mtime))


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, new: str, root: Path) -> None:
    if member.isdir():
        if not os.path.isdir(new) or os.path.islink(new):
            _remove(new)
            os.mkdir(new)
        return
    _remove(new)
    if member.issym():
        os.symlink(member.linkname, new)
    elif member.islnk():
        old = _inside(root, os.path.dirname(_plain(member.linkname)))
        os.link(os.path.join(old, os.path.basename(_plain(member.linkname))), new, follow_symlinks=False)
    elif member.isfile():
        content = tar.extractfile(member)
        assert content is not None
        with open(new, "xb") as file:
            shutil.copyfileobj(content, file, _READ_BYTES)
        os.chmod(new, member.mode & 0o1777 | 0o600)
        os.utime(new, (member.mtime, member.mtime))
    elif member.isfifo():
        os.mkfifo(new)


def _inside(root: Path, path: str) -> str:
    """The directory that a path names if `root` is "/": links lead to within."""
    pending, done, num_links = path.split("/")[::-1], list[str](), 0
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done[:-1]
            continue
        here = os.path.join(root, *done, part)
        if not os.path.islink(here):
            done.append(part)
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise tarfile.ExtractError(f"{path}: its links are a circle")
        target = os.readlink(here)
        done = [] if target.startswith("/") else done
        pending += target.split("/")[::-1]
    return os.path.join(root, *done)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


# --------------------------------------------------------------------------------------------------------------- cache


class RootCache:
    """Unpacked roots of this node, shared by all its processes of one user."""

    def __init__(self, base: Path) -> None:
        """Create the directory if it is missing, and sweep it.  Raises ConfigError if it is not this user's own."""
        self.base = base
        try:
            base.mkdir(parents=True, mode=0o711, exist_ok=True)
            about = base.lstat()
        except OSError as error:
            raise ConfigError(f"{_KEY}={base}: {error.strerror}; legal: a directory on each node's own disk") from error
        if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o022:
            raise ConfigError(f"{_KEY}={base}: another user can write there; legal: a directory of your own")
        self.sweep()

    def root_of(self, image: Image) -> Root:
        """The unpacked root of an image, unpacked now if it is not there.  Raises ConfigError."""
        place = self.base / image.digest
        if (found := self._found(place)) is None:
            with self._locked(image.digest):
                if (found := self._found(place)) is None:
                    found = self._made(image, place)
        environment, directory = found["environment"], found["working_directory"]
        return Root(place / "root", found["num_bytes"], found["num_files"], environment, directory)

    def sweep(self) -> None:
        """Remove what processes that have ended were unpacking."""
        for part in self.base.glob("*.part"):
            with contextlib.suppress(BlockingIOError), self._locked(part.stem, waits=False):
                shutil.rmtree(part, ignore_errors=True)

    def _found(self, place: Path) -> dict[str, Any] | None:
        """Contents of about.json, if the root was unpacked since the node's last start."""
        try:
            about: dict[str, Any] = json.loads((place / ABOUT).read_bytes())
        except (OSError, ValueError):
            return None
        return about if about.get("boot") == _boot() else None

    def _made(self, image: Image, place: Path) -> dict[str, Any]:
        part = place.with_name(f"{image.digest}.part")
        shutil.rmtree(part, ignore_errors=True)
        if place.exists():
            place.rename(part)
            shutil.rmtree(part)
        try:
            (part / "root").mkdir(parents=True)
            unpack(image, part / "root")
            num_bytes, num_files = _given_to_containers(part / "root")
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise ConfigError(f"image {image.path} cannot be unpacked in {_KEY}={self.base}: {error}") from error
        about = {
            "image": str(image.path),
            "boot": _boot(),
            "num_bytes": num_bytes,
            "num_files": num_files,
            "environment": dict(image.environment),
            "working_directory": image.working_directory,
        }
        (part / ABOUT).write_text(json.dumps(about))
        part.rename(place)
        return about

    @contextlib.contextmanager
    def _locked(self, digest: str, *, waits: bool = True) -> Iterator[None]:
        """Hold the lock of a digest; the kernel frees it with its process.  Raises BlockingIOError unless it waits."""
        descriptor = os.open(self.base / f"{digest}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            yield
        finally:
            os.close(descriptor)


_KEY = "container.root_cache"


def default_base() -> Path:
    """The cache on this node's own disk, for this user."""
    return Path("/tmp", f"rlhpc-roots-{os.geteuid()}")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _given_to_containers(root: Path) -> tuple[int, int]:
    """Count (bytes, files) of a root; as real root, give all to the user that containers run as."""
    num_bytes, num_files, is_root = 0, 1, os.geteuid() == 0
    root.chmod(root.stat().st_mode & 0o1777 | 0o711)
    if is_root:
        os.lchown(root, OWNER, OWNER)
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            num_bytes, num_files = num_bytes + os.lstat(path).st_size, num_files + 1
            if is_root:
                os.lchown(path, OWNER, OWNER)
    return num_bytes, num_files


# --------------------------------------------------------------------------------------------------- programs of a node


def copy_programs(names: Sequence[str], target: Path) -> None:
    """Make a root directory of programs of this node and their libraries.  Raises ConfigError: one is missing."""
    for name in ("bin", "tmp", "etc", "root"):
        (target / name).mkdir(parents=True, exist_ok=True)
    for name in names:
        program = shutil.which(name)
        if program is None:
            raise ConfigError(f"there is no {name} on PATH")
        shutil.copy(program, target / "bin" / name)
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        for word in said.split():
            if word.startswith("/") and not (library := target / word[1:]).exists():
                library.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, library)


def main(words: Sequence[str]) -> int:
    """Unpack images ahead of a run, on the node where it will be.  Returns the exit status."""
    if len(words) < 2:
        sys.stderr.write("usage: python -m rlhpc.sandbox.images CACHE IMAGE...\n")
        return 2
    try:
        cache = RootCache(Path(words[0]))
        for word in words[1:]:
            image = open_image(Path(word))
            root = cache.root_of(image)
            sys.stdout.write(f"{image.kind} {word}: {root.path}, {root.num_bytes} bytes in {root.num_files} files\n")
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
