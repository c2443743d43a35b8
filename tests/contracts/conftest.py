"""What the tests of the trainer contract share: processes, and models on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.contracts.trainer_cluster import ClusterPool, TrainerCluster
from tests.contracts.trainer_layouts import (
    EVERYDAY,
    LAYOUTS,
    MORE_LAYOUTS,
    layout_keys,
    make_model,
    marks_of,
    num_layers,
    usual_model,
)

POOL = pytest.StashKey[ClusterPool]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring together the tests of one layout, within each file: its processes are then up."""
    order = [*LAYOUTS, *MORE_LAYOUTS]
    places = [index for index, item in enumerate(items) if _layout_of(item) in order]
    in_order = sorted((items[i] for i in places), key=lambda item: (str(item.path), order.index(_layout_of(item))))
    for place, item in zip(places, in_order, strict=True):
        items[place] = item


def _layout_of(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("cluster", "")) if callspec else ""


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do not keep processes while other tests run."""
    if POOL in item.session.stash and "start" not in getattr(nextitem, "fixturenames", ()):
        item.session.stash[POOL].close()


@pytest.fixture(scope="session")
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[str], TrainerCluster]]:
    """A cluster of the layout of this name; its processes may be up already."""
    pool = request.session.stash[POOL] = ClusterPool()
    yield lambda name: pool.cluster(name, layout_keys(name))
    pool.close()


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name in EVERYDAY)) for name in LAYOUTS])
def cluster(request: pytest.FixtureRequest, start: Callable[[str], TrainerCluster]) -> TrainerCluster:
    return start(request.param)


@pytest.fixture(scope="session")
def model_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """(name of a model, name of a layout) → checkpoint with as many layers as the layout needs."""

    @cache
    def make(model: str, layers: int) -> Path:
        return make_model(tmp_path_factory.mktemp("model"), model, layers)

    return lambda model, layout: make(model, num_layers(layout))


@pytest.fixture
def model(cluster: TrainerCluster, model_for: Callable[[str, str], Path]) -> Path:
    """The checkpoint for claims that one model is enough for."""
    return model_for(usual_model(cluster.name), cluster.name)
