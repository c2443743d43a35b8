"""Images on disk: every form becomes the same root, a damaged one none, and the cache holds whole roots only."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rlhpc.protocol.errors import ConfigError
from rlhpc.sandbox import images
from rlhpc.sandbox.images import ABOUT, RootCache, open_image
from tests.patience import PATIENCE_S

CONFIG = {
    "config": {"Env": ["PATH=/bin", "GREETING=a=b"], "WorkingDir": "/app"},
    "architecture": "amd64",
    "os": "linux",
}


def layer(*entries):
    """A tarball of (name, content): bytes of a file, "…" of a link, ("hard", name), or None for a directory."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in entries:
            about = tarfile.TarInfo(name)
            about.mode = 0o755
            if content is None:
                about.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                about.type, about.linkname = tarfile.SYMTYPE, content
            elif isinstance(content, tuple):
                about.type, about.linkname = tarfile.LNKTYPE, content[1]
            else:
                about.size = len(content)
            tar.addfile(about, io.BytesIO(content) if isinstance(content, bytes) else None)
    return made.getvalue()


LAYERS = (
    layer(("bin", None), ("bin/sh", b"shell"), ("etc", None), ("etc/old", b"old"), ("var/log/a", b"a"), ("lib", "bin")),
    layer(("etc/.wh.old", b""), ("var/log/.wh..wh..opq", b""), ("var/log/b", b"b"), ("lib/bash", ("hard", "bin/sh"))),
)
TREE = {"bin/bash": b"shell", "bin/sh": b"shell", "lib": "bin", "var/log/b": b"b"}


def digest(content):
    return hashlib.sha256(content).hexdigest()


def blobs():
    """Files of an OCI layout by name."""
    packed = [gzip.compress(each, mtime=0) for each in LAYERS]
    config = json.dumps({**CONFIG, "rootfs": {"diff_ids": [f"sha256:{digest(each)}" for each in LAYERS]}}).encode()
    manifest = json.dumps(
        {
            "config": {"digest": f"sha256:{digest(config)}"},
            "layers": [{"digest": f"sha256:{digest(each)}"} for each in packed],
        }
    ).encode()
    index = json.dumps({"manifests": [{"digest": f"sha256:{digest(manifest)}"}]}).encode()
    found = {f"blobs/sha256/{digest(each)}": each for each in (*packed, config, manifest)}
    return {"oci-layout": b"{}", "index.json": index, **found}


def saved():
    """Files of `docker save` by name."""
    config = json.dumps({**CONFIG, "rootfs": {"diff_ids": [f"sha256:{digest(each)}" for each in LAYERS]}}).encode()
    manifest = [{"Config": "c.json", "RepoTags": ["a:b"], "Layers": ["0/layer.tar", "1/layer.tar"]}]
    layers = {f"{number}/layer.tar": each for number, each in enumerate(LAYERS)}
    return {**layers, "c.json": config, "manifest.json": json.dumps(manifest).encode()}


def written(kind, place):
    """The same image in one of its forms."""
    if kind == "OCI layout":
        for name, content in blobs().items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        return place
    if kind == "directory":
        (place / "bin").mkdir(parents=True)
        (place / "bin/sh").write_bytes(b"shell")
        os.link(place / "bin/sh", place / "bin/bash")
        (place / "lib").symlink_to("bin")
        (place / "var/log").mkdir(parents=True)
        (place / "etc").mkdir()
        (place / "var/log/b").write_bytes(b"b")
        return place
    files = {"OCI tarball": blobs, "docker save": saved}
    content = layer(*files[kind]().items()) if kind in files else layer(*TREE.items(), ("etc", None))
    place.write_bytes(gzip.compress(content) if kind == "tarball.gz" else content)
    return place


def tree(root):
    found = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            if path.is_symlink():
                found[str(path.relative_to(root))] = str(path.readlink())
            elif path.is_file():
                found[str(path.relative_to(root))] = path.read_bytes()
    return found


@pytest.mark.parametrize("kind", ["OCI layout", "OCI tarball", "docker save", "tarball", "tarball.gz", "directory"])
def test_every_form_of_an_image_becomes_the_same_root(tmp_path, kind):
    image = open_image(written(kind, tmp_path / "image"))
    root = RootCache(tmp_path / "cache").root_of(image)
    assert tree(root.path) == TREE
    assert (root.path / "etc").is_dir()
    assert root.path.parent.name == image.digest
    has_configuration = kind in ("OCI layout", "OCI tarball", "docker save")
    assert root.working_directory == ("/app" if has_configuration else "/")
    assert root.environment == ({"PATH": "/bin", "GREETING": "a=b"} if has_configuration else {})
    assert root.num_bytes > 10
    assert root.num_files == 9


@pytest.mark.parametrize(
    "entries",
    [
        [("../../outside", b"x")],
        [("/../outside", b"x")],
        [("up", ".."), ("up/outside", b"x")],
        [("up", "../.."), ("up/outside", b"x")],
        [("away", "{place}"), ("away/outside", b"x")],
        [("a", None), ("a/b", "../../../"), ("a/b/outside", b"x")],
    ],
)
def test_no_entry_is_written_outside_of_the_root(tmp_path, entries):
    filled = [(n, c.replace("{place}", str(tmp_path)) if isinstance(c, str) else c) for n, c in entries]
    (tmp_path / "image.tar").write_bytes(layer(("bin", None), *filled))
    root = RootCache(tmp_path / "cache").root_of(open_image(tmp_path / "image.tar"))
    found = [path for path in tmp_path.rglob("outside") if not path.is_symlink()]
    assert found
    assert all(path.is_relative_to(root.path) for path in found)


def test_links_to_files_outside_are_not_followed_for_hard_links(tmp_path):
    (tmp_path / "secret").write_text("s")
    entries = [("bin", None), ("a", str(tmp_path)), ("b", ("hard", "a/secret"))]
    (tmp_path / "image.tar").write_bytes(layer(*entries))
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        RootCache(tmp_path / "cache").root_of(open_image(tmp_path / "image.tar"))
    assert [each.suffix for each in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda place: (place / "index.json").write_text("{"), "damaged"),
        (lambda place: (place / "index.json").write_text('{"manifests": []}'), "holds 0 images"),
        (lambda place: largest(place).unlink(), "is missing|cannot be unpacked"),
        (lambda place: largest(place).write_bytes(largest(place).read_bytes()[:-9]), "damaged|not have the digest"),
        (lambda place: largest(place).write_bytes(gzip.compress(layer(("x", b"y" * 999)))), "not have the digest"),
        (lambda place: largest(place).write_bytes(b"\x28\xb5\x2f\xfd" + b"x" * 99), "zstd.*skopeo copy"),
    ],
)
def test_a_damaged_image_is_refused_by_its_name_and_leaves_no_root(tmp_path, damage, why):
    place = written("OCI layout", tmp_path / "image")
    damage(place)
    with pytest.raises(ConfigError, match=why) as caught:
        RootCache(tmp_path / "cache").root_of(open_image(place))
    assert str(place) in str(caught.value)
    assert not [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]


def largest(place):
    """The first layer."""
    packed = gzip.compress(LAYERS[0], mtime=0)
    return place / "blobs/sha256" / digest(packed)


def test_what_is_no_image_is_refused_with_what_makes_one(tmp_path):
    (tmp_path / "image.sif").write_bytes(b"#!/usr/bin/env run-singularity\n" * 99)
    with pytest.raises(ConfigError, match="apptainer build --sandbox"):
        open_image(tmp_path / "image.sif")
    with pytest.raises(ConfigError, match=r"is missing; legal: .*docker save"):
        open_image(tmp_path / "none")


def test_a_root_that_was_half_unpacked_is_swept_and_never_used(tmp_path):
    image = open_image(written("tarball", tmp_path / "image.tar"))
    part = tmp_path / "cache" / f"{image.digest}.part"
    (part / "root/bin").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o711)
    cache = RootCache(tmp_path / "cache")
    assert not part.exists()
    assert tree(cache.root_of(image).path) == TREE


def test_a_root_that_is_being_unpacked_is_not_swept(tmp_path):
    image = open_image(written("tarball", tmp_path / "image.tar"))
    cache = RootCache(tmp_path / "cache")
    part = tmp_path / "cache" / f"{image.digest}.part"
    with cache._locked(image.digest):
        part.mkdir()
        RootCache(tmp_path / "cache")
        assert part.exists()


def test_a_root_of_before_the_node_s_last_start_is_unpacked_again(tmp_path):
    image = open_image(written("tarball", tmp_path / "image.tar"))
    cache = RootCache(tmp_path / "cache")
    root = cache.root_of(image)
    (root.path / "bin/sh").write_bytes(b"")  # as a file that was not synced
    about = root.path.parent / ABOUT
    assert tree(cache.root_of(image).path) != TREE
    about.write_text(about.read_text().replace(images._boot(), "an earlier one"))
    assert tree(cache.root_of(image).path) == TREE


def test_processes_at_once_unpack_a_root_once(tmp_path):
    written("docker save", tmp_path / "image.tar")
    words = [sys.executable, "-m", "rlhpc.sandbox.images", str(tmp_path / "cache"), str(tmp_path / "image.tar")]
    place = {**os.environ, "PYTHONPATH": str(Path(images.__file__).parents[2])}
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=place) for _ in range(4)]
    said = {each.communicate(timeout=PATIENCE_S)[0] for each in started}
    assert len(said) == 1
    assert "docker save" in said.pop()
    roots = [each for each in (tmp_path / "cache").iterdir() if each.is_dir()]
    assert [tree(each / "root") for each in roots] == [TREE]


def test_a_cache_that_others_can_write_is_refused(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ConfigError, match="another user can write there"):
        RootCache(tmp_path / "cache")
