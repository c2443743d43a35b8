"""Models of services are looked at before anything is started: their files, their addresses and their memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from launch.checks.memory_plan import GIB
from launch.checks.services import plan_services, refuse_unfit_services, service_memory_lines, unreachable
from launch.plan.gpu_map import GpuMap, VisibleGpus, map_gpus
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError
from tests import build
from tests.tiny_models import make_tiny_classifier
from tests.unit.data.checkpoints import CHATML
from tests.unit.launch.public_models import CONFIGS, make_model_directory
from tests.unit.launch.site_kit import site_of

SOURCE = Path("site.toml")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of a model of 7 billion parameters, with a chat template and without the weights themselves."""
    directory = make_model_directory(tmp_path / "model", CONFIGS["Qwen2.5-7B"])
    (directory / "chat_template.jinja").write_text(CHATML)
    return directory


def served(path: Path, engine: str = "vllm", **keys: Any) -> Config:
    service = {"name": "big", "kind": "teacher", "path": str(path)} | keys
    return build.config(model={"dtype": "bfloat16"}, generation={"engine": engine}, service=[service])


def change(directory: Path, **keys: Any) -> None:
    place = directory / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | keys))


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", ["teacher", "judge"])
def test_a_whole_checkpoint_of_its_kind_is_accepted(kind: str, model: Path) -> None:
    refuse_unfit_services(served(model, kind=kind, tensor_parallel=4))


@pytest.mark.parametrize("per_token", [False, True])
def test_a_reward_model_as_transformers_saves_it_is_accepted(per_token: bool, tmp_path: Path) -> None:
    refuse_unfit_services(served(make_tiny_classifier(tmp_path / "scores", per_token=per_token), kind="reward"))


@pytest.mark.parametrize("architecture", ["Qwen2ForSequenceClassification", "Qwen2ForProcessRewardModel"])
def test_a_reward_model_has_a_head_that_scores_and_a_teacher_has_none(architecture: str, model: Path) -> None:
    change(model, architectures=[architecture])
    refuse_unfit_services(served(model, kind="reward"))
    with pytest.raises(ConfigError, match=f"kind='judge' needs a language model, and .* has {architecture}"):
        refuse_unfit_services(served(model, kind="judge"))


def spoil(model: Path, what: str) -> None:
    match what:
        case "no directory":
            model.rename(model.with_name("elsewhere"))
        case "no weights":
            for file in model.glob("*.safetensors"):
                file.unlink()
        case "no template":
            (model / "chat_template.jinja").unlink()
            (model / "tokenizer_config.json").write_text("{}")
        case "small vocabulary":
            change(model, vocab_size=2)


@pytest.mark.parametrize(
    ("what", "keys", "words"),
    [
        ("no directory", {}, "service.path='{model}': no such directory; legal: an HF checkpoint directory"),
        ("no weights", {}, "service.path='{model}': not a complete HF checkpoint: *.safetensors missing"),
        ("no template", {"kind": "judge"}, "chat template"),
        ("small vocabulary", {}, "they belong to different models"),
        ("", {"kind": "reward"}, "service.kind='reward' needs a head that scores, and {model}/config.json has "
                                 "Qwen2ForCausalLM; legal: one that ends in ForSequenceClassification"),
        ("", {"tensor_parallel": 3}, "service.tensor_parallel=3 does not divide num_attention_heads=28"),
        ("", {"kv_cache_bytes": 1000}, "service.kv_cache_bytes=1000 cannot hold one sequence of max_tokens"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_cannot_serve_is_refused(what: str, keys: dict[str, Any], words: str, model: Path) -> None:
    spoil(model, what)
    with pytest.raises(ConfigError) as refused:
        refuse_unfit_services(served(model, **keys))
    assert words.format(model=model) in str(refused.value)


# ----------------------------------------------------------------------------------------------------------- addresses


class _Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    """A server that wants a key."""
    with HTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_url_at_which_nothing_answers_is_a_warning(address: str, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    urls = {"there": address, "gone": gone, "nowhere": "http://no-such-host.invalid/v1"}
    services = [{"name": name, "kind": "judge", "url": url} for name, url in urls.items()]
    services.append({"name": "own", "kind": "judge", "path": str(model)})
    first, second = unreachable(build.config(service=services).service)
    assert first == f"[[service]] gone: url={gone!r} does not answer here: [Errno 111] Connection refused"
    assert "[[service]] nowhere: url='http://no-such-host.invalid/v1' does not answer here: " in second


# -------------------------------------------------------------------------------------------------------------- memory


def lines(config: Config, gpus: GpuMap | None = None, memory: float = 0.0, **sections: dict[str, Any]) -> list[str]:
    site = site_of(**sections) if sections else None
    sizes = dict.fromkeys("0123456789", memory)
    return [*service_memory_lines(config, gpus or GpuMap(), sizes, site, SOURCE if site else None)]


def test_weights_and_cache_of_a_service_are_divided_by_its_gpus_and_have_its_own_type(model: Path) -> None:
    (alone,), (four,) = plan_services(served(model)), plan_services(served(model, tensor_parallel=4))
    (wide,) = plan_services(served(model, dtype="float32", kv_cache_bytes=8 * GIB))
    assert alone.weights == pytest.approx(14.2 * GIB, rel=0.01)
    assert four.weights == alone.weights // 4
    assert (wide.weights, wide.kv_cache) == (2 * alone.weights, 8 * GIB)
    assert "staging" not in alone.describe(), "nothing sends it weights"
    (line,) = lines(served(model, replicas=2, tensor_parallel=4))
    assert line.startswith(
        "service     estimate, GiB a GPU: big 5.5 (weights 3.5, KV cache 0.0, CUDA, activations 2.0)"
    )
    assert line.endswith("2 replicas × 4")
    assert lines(served(model, engine="scripted")) == []


def test_a_service_that_does_not_fit_its_gpu_is_refused_here_and_on_a_site(model: Path) -> None:
    config = served(model)
    gpus = map_gpus(config, VisibleGpus(("0", "1", "2")))
    assert gpus.devices["service-0"] == ("2",)
    assert len(lines(config, gpus, 24.0)) == 1
    with pytest.raises(ConfigError) as refused:
        lines(config, gpus, 16.0)
    assert "[[service]] big: tensor_parallel=1: its engine needs at least big 16." in str(refused.value)
    assert "of GPU 2, service-0's own; legal: a larger tensor_parallel or GPU" in str(refused.value)
    small = {"big": {"gpu": "v100-16", "gpus_per_node": 4}}
    with pytest.raises(ConfigError, match=r"of service\.big\.gpu='v100-16' \(15\.7 GiB\) in site\.toml"):
        lines(config, service=small)
    assert len(lines(config, service={"big": {"gpu": "h100", "gpus_per_node": 4}})) == 1
    unknown = lines(config, service={"big": {"gpus_per_node": 4}})
    assert unknown[-1].startswith("fits        not judged: site.toml lacks service.big.gpu")


def test_services_that_exceed_the_memory_of_this_machine_are_warned_of(model: Path) -> None:
    assert lines(served(model, replicas=1000))[-1].startswith("warning     services need 14")
