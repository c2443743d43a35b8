"""vLLM with a LoRA adapter samples as the model that it is merged into, and keeps nothing of versions but the last."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoEWithLoRA

from rlhpc.generation.adapter_slot import AdapterSlot, FourBitLoader, PlainProducts
from rlhpc.generation.vllm_engine import VllmEngine
from rlhpc.models.adapter import PEFT_PREFIX, PEFT_WEIGHTS, A, B
from rlhpc.protocol.errors import EngineError, GroupFailed, TornWeights
from rlhpc.protocol.types import AdapterForm, Rollout, TensorSpec, WeightManifest
from rlhpc.training.factory import open_backend
from rlhpc.training.lora import LayerAdapter, Switch, load_policy
from rlhpc.training.ranks import RankContext
from rlhpc.weights.buckets import make_manifest
from tests.contracts.engine_subjects import AdapterSubject, VllmSubject, request_of, tiny_config
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import clipped_loss, draw_samples, num_loss_tokens, pack_row
from tests.unit.training.packed_rows import tiny_config as trainer_config

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
TOLERANCE = 1e-4
ROW = np.arange(4, 40, dtype=np.int32)
LONG = pytest.mark.long
EVERY_LAYER = ("attention", "mlp", "output")
ARRANGEMENTS = [  # family, tied, rank, targets
    pytest.param("qwen2", False, 64, EVERY_LAYER, marks=LONG),
    pytest.param("qwen3", True, 1, EVERY_LAYER),
    pytest.param("qwen3", False, 8, ("q_proj", "v_proj", "down_proj"), marks=LONG),
    pytest.param("llama", False, 64, EVERY_LAYER),
    pytest.param("llama", True, 8, ("k_proj", "up_proj", "output"), marks=LONG),
]
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


class PaddedSubject(AdapterSubject):
    """Of a rank for which vLLM has no room of its own; version 1,000 changes nothing, and 1,001 makes it worse."""

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        tensors = super().weights(version % 1000)
        if version == 1000:
            return [(name, torch.zeros_like(each) if name.endswith(B) else each) for name, each in tensors]
        return tensors


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PaddedSubject]:
    lora = {"rank": 3, "alpha": 6.0, "targets": EVERY_LAYER}
    made = await PaddedSubject.start(tmp_path_factory.mktemp("engine"), family="qwen2", tied=True, lora=lora)
    await made.join()
    yield made
    await made.engine.close()
    made.publisher.dissolve()


def slot_of(subject: VllmSubject) -> AdapterSlot:
    """Of the engine, which runs on a thread of this process."""
    found = subject.worker._rlhpc_slot
    assert isinstance(found, AdapterSlot)
    return found


def parameters_of(subject: VllmSubject) -> list[torch.Tensor]:
    """Copies of what the engine's model has besides the slot."""
    return [parameter.detach().clone() for parameter in subject.worker.model_runner.get_model().parameters()]


async def scored(subject: VllmSubject) -> Any:
    return (await subject.engine.score(ROW)).logprobs


async def assert_samples_as_merged(subject: AdapterSubject, version: int) -> None:
    requests = [request_of(index, max_tokens=40) for index in range(8)]
    rollouts = await asyncio.gather(*map(subject.engine.generate, requests))
    for rollout in rollouts:
        expected = subject.expected_logprobs(version, rollout)
        np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=TOLERANCE)
    np.testing.assert_allclose((await scored(subject))[1:], subject.expected_score(version, ROW), atol=TOLERANCE)


async def test_before_the_first_version_the_engine_is_the_base(subject: PaddedSubject) -> None:
    """First: it has received none."""
    assert subject.engine.policy_version == -1
    assert not any(bool(tensor.any()) for tensor in slot_of(subject).tensors())
    await assert_samples_as_merged(subject, -1)


async def test_the_base_is_the_same_to_the_bit_after_two_hundred_versions(subject: PaddedSubject) -> None:
    before, parameters = await scored(subject), parameters_of(subject)
    for version in range(200):
        await subject.update(version)
    assert not np.array_equal(await scored(subject), before)
    await subject.update(1000)
    assert np.array_equal(await scored(subject), before)
    for held, then in zip(parameters_of(subject), parameters, strict=True):
        assert torch.equal(held, then)


async def test_nothing_of_the_version_before_is_left(subject: PaddedSubject) -> None:
    """Not even where a version has nothing: the rank is 3, and the slot has room for 8."""
    await subject.update(1)
    first, held = await scored(subject), [tensor.clone() for tensor in slot_of(subject).tensors()]
    for tensor in slot_of(subject).tensors():
        tensor.fill_(7.0)
    await subject.update(1)
    assert np.array_equal(await scored(subject), first)
    assert all(map(torch.equal, slot_of(subject).tensors(), held))
    await assert_samples_as_merged(subject, 1)


async def test_the_checksum_is_of_the_slot_too(subject: PaddedSubject) -> None:
    held = (await subject.update(2)).held
    assert (await subject.update(2)).held == held
    next(iter(slot_of(subject).tensors())).view(torch.int32).view(-1)[5] ^= 1
    (part,) = await subject.engine._core.collective_rpc("rlhpc_held_checksum")  # type: ignore[attr-defined]
    assert held is not None
    assert part[0] != held.value


def changed(**form: Any) -> Callable[[WeightManifest], WeightManifest]:
    """A manifest whose adapters are said to be others."""

    def change(manifest: WeightManifest) -> WeightManifest:
        assert manifest.adapter is not None
        return replace(manifest, adapter=replace(manifest.adapter, **form))

    return change


def with_tensors(change: Callable[[list[TensorSpec]], list[TensorSpec]]) -> Callable[[WeightManifest], WeightManifest]:
    """A manifest with other tensors."""

    def of(manifest: WeightManifest) -> WeightManifest:
        tensors = change(list(manifest.tensors))
        return make_manifest(manifest.policy_version, manifest.epoch, tensors, 1 << 20, manifest.adapter)

    return of


def renamed(old: str, new: str) -> Callable[[WeightManifest], WeightManifest]:
    return with_tensors(lambda specs: [replace(each, name=each.name.replace(old, new)) for each in specs])


def without(*names: str) -> Callable[[WeightManifest], WeightManifest]:
    return with_tensors(lambda specs: [each for each in specs if each.name not in names])


def widened(name: str) -> Callable[[WeightManifest], WeightManifest]:
    return with_tensors(
        lambda specs: [
            replace(each, shape=(each.shape[0], each.shape[1] + 1)) if each.name == name else each for each in specs
        ]
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (changed(base="0123456789abcdef"), "is for the base 0123456789abcdef, and this engine holds"),
        (changed(rank=4), "is of rank 4, and this engine holds adapters of rank 3"),
        (without(Q + A, Q + B), f"has no adapter of {Q}"),
        (without(Q + B), f"has no B of {Q}"),
        (without(Q + A), f"has no A of {Q}"),
        (renamed(Q, "model.layers.1.self_attn.other"), "a module that is none here: model.layers.1.self_attn.other"),
        (renamed(Q + A, Q + ".lora_C.weight"), f"{Q}.lora_C.weight is no A or B"),
        (widened(Q + A), f"A and B of {Q} are .* room for its share"),
        (widened(K + B), f"A and B of {K} are .* room for its share"),
        (lambda manifest: replace(manifest, adapter=None), "of whole weights, and this engine holds adapters"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    subject: PaddedSubject,
    change: Callable[[WeightManifest], WeightManifest],
    complaint: str,
) -> None:
    await subject.update(3)
    before, manifest = await scored(subject), change(subject.manifest(4))
    slot = [tensor.clone() for tensor in slot_of(subject).tensors()]
    tensors = [(spec.name, torch.ones(spec.shape)) for spec in manifest.tensors]
    publishing = asyncio.create_task(asyncio.to_thread(subject.publisher.publish, manifest, iter(tensors)))
    outcomes = await asyncio.gather(subject.engine.receive_weights(manifest), publishing, return_exceptions=True)
    assert [type(each) for each in outcomes] == [TornWeights, GroupFailed]
    assert re.search(complaint, str(outcomes[0])), outcomes[0]
    assert "cannot take it" in str(outcomes[1])
    assert subject.engine.policy_version == 3
    assert np.array_equal(await scored(subject), before)
    assert all(map(torch.equal, slot_of(subject).tensors(), slot))
    await subject.join()
    await subject.update(4)
    assert not np.array_equal(await scored(subject), before)


async def test_a_base_that_is_not_known_is_taken(subject: PaddedSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    form = replace(subject.form(), base="")
    monkeypatch.setattr(subject, "form", lambda: form)
    await subject.update(5)
    await assert_samples_as_merged(subject, 5)


async def assert_two_versions_are_sampled(made: AdapterSubject) -> None:
    """Closes the engine."""
    try:
        await made.join()
        for version in (1, 2):
            await made.update(version)
            await assert_samples_as_merged(made, version)
    finally:
        await made.engine.close()
        made.publisher.dissolve()


@pytest.mark.parametrize(("family", "tied", "rank", "targets"), ARRANGEMENTS)
async def test_log_probabilities_are_those_of_a_merge_in_float64(
    tmp_path: Path, family: str, tied: bool, rank: int, targets: tuple[str, ...]
) -> None:
    lora = {"rank": rank, "alpha": 2.0 * rank**0.5, "targets": targets}
    made = await AdapterSubject.start(tmp_path, family=family, tied=tied, lora=lora)
    await assert_two_versions_are_sampled(made)


async def test_in_bfloat16_the_scale_is_multiplied_before_b_is_rounded(tmp_path: Path) -> None:
    lora = {"rank": 8, "alpha": 5.0, "targets": ["o_proj"]}
    made = await AdapterSubject.start(tmp_path, family="qwen2", tied=True, dtype="bfloat16", lora=lora)
    try:
        await made.join()
        await made.update(1)
        given = dict(made.weights(1))
        for held in slot_of(made).tensors():
            assert held.dtype == torch.bfloat16
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn.o_proj"
            a, b = list(slot_of(made).tensors())[2 * layer : 2 * layer + 2]
            assert torch.equal(a[0], given[name + A].bfloat16())
            assert torch.equal(b[0], (given[name + B] * (5.0 / 8)).bfloat16())
    finally:
        await made.engine.close()
        made.publisher.dissolve()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_on_a_cpu_the_engine_adds_an_adapter_as_the_trainer_does(dtype: torch.dtype) -> None:
    """To the bit where the scale is a power of two, which rounds nothing of B: A x, then W x + B A x."""
    draw, scale = torch.Generator().manual_seed(3), 4.0
    a, b, x, y = (torch.randn(shape, generator=draw) for shape in ((8, 96), (80, 8), (7, 96), (7, 80)))
    expected = LayerAdapter(a, b, scale, Switch())(x.to(dtype), y.to(dtype))
    found = y.to(dtype)
    stacks = [a.to(dtype)[None, None]], [(scale * b).to(dtype)[None, None]]
    PlainProducts((0,)).add_lora_linear(found, x.to(dtype), *stacks, 1.0, [80])
    assert torch.equal(found, expected)


@pytest.mark.long
async def test_two_ranks_of_an_engine_have_their_shares(tmp_path: Path) -> None:
    made = await SharedOut.start(tmp_path, family="qwen3", tied=False, lora=AdapterSubject.LORA, tensor_parallel=2)
    await assert_two_versions_are_sampled(made)


class SharedOut(AdapterSubject):
    num_workers = 2


class FourBitSubject(AdapterSubject):
    """Whose trainer has packed the matrices of attention and MLP."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        functional = pytest.importorskip("bitsandbytes.functional")
        for name, tensor in self._base.items():
            if name.endswith("_proj.weight"):
                packed, scales = functional.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
                self._base[name] = functional.dequantize_4bit(packed, scales)

    def form(self) -> AdapterForm:
        form = super().form()
        return replace(form, base=f"{form.base}-nf4")


class SharedFourBits(FourBitSubject):
    num_workers = 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_base_in_four_bits_has_the_bits_of_the_trainers(tmp_path: Path, dtype: str) -> None:
    model = make_tiny_checkpoint(tmp_path)
    config = tiny_config(model, dtype=dtype, lora=AdapterSubject.LORA | {"quantization": "nf4"})
    policy, lora = load_policy(config, torch.device("cpu"))
    assert lora is not None
    assert lora.quantised
    settings = SimpleNamespace(model=str(model), revision=None, dtype=policy.head_weight.dtype)
    read = dict(FourBitLoader(LoadConfig()).get_all_weights(settings, policy.module))
    for name, tensor in lora.whole_base():
        assert torch.equal(read[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=LONG)])
async def test_beside_a_base_in_four_bits_it_samples_by_what_that_unpacks_to(tmp_path: Path, workers: int) -> None:
    lora = AdapterSubject.LORA | {"quantization": "nf4"}
    made = await (FourBitSubject if workers == 1 else SharedFourBits).start(
        tmp_path, family="qwen2", tied=True, lora=lora, tensor_parallel=workers
    )
    try:
        await made.join()
        await assert_samples_as_merged(made, -1)
        await made.update(1)
        await assert_samples_as_merged(made, 1)
        manifest = changed(base=made.form().base.removesuffix("-nf4"))(made.manifest(2))
        publishing = asyncio.create_task(asyncio.to_thread(made.publisher.publish, manifest, iter(made.weights(2))))
        with pytest.raises(TornWeights, match=r"is for the base \w+, and this engine holds \w+-nf4"):
            await made.engine.receive_weights(manifest)
        with pytest.raises(GroupFailed):
            await publishing
    finally:
        await made.engine.close()
        made.publisher.dissolve()


@pytest.mark.parametrize("is_apart", [False, pytest.param(True, marks=LONG)])
async def test_adapters_side_by_side_are_each_sampled_as_if_alone(tmp_path: Path, is_apart: bool) -> None:
    lora = AdapterSubject.LORA | {"rank": 3}
    how: dict[str, Any] = {"family": "qwen3", "tied": True, "lora": lora, "seeded_samples": True, "is_apart": is_apart}
    made = await AdapterSubject.start(tmp_path, num_adapters=2, **how)
    scale, base = made.config.lora.scale, made.form().base

    def peft(version: int, *, cut: int = 0, without: str = "-") -> Path:
        directory = tmp_path / f"{version}-{cut}-{without}"
        directory.mkdir()
        tensors = {PEFT_PREFIX + name: each for name, each in made.weights(version) if without not in name}
        save_file(tensors, file := directory / PEFT_WEIGHTS)
        os.truncate(file, file.stat().st_size - cut)
        return directory

    async def sampled(*numbers: int) -> list[list[Rollout]]:
        # Of several blocks of the KV cache, which another adapter's would fit.
        prompts = [(np.arange(70, dtype=np.int32) + index) % 80 + 4 for index in range(6)]
        asked = [request_of(index, prompt=each) for index, each in enumerate(prompts)]
        requests = [[replace(each, adapter=number) for each in asked] for number in numbers]
        alike = [request for pair in zip(*requests, strict=True) for request in pair]
        found = await asyncio.gather(*map(made.engine.generate, alike))
        return [found[place :: len(numbers)] for place in range(len(numbers))]

    def assert_of(version: int, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            expected = made.expected_logprobs(version, rollout)
            np.testing.assert_allclose(rollout.behaviour_logprobs, expected, atol=TOLERANCE)

    try:
        engine: Any = made.engine
        await engine.load_adapter(1, peft(1), scale, base)
        await engine.load_adapter(2, peft(2), scale, base)
        both, (alone,) = await sampled(1, 2), await sampled(2)
        assert_of(1, both[0])
        assert_of(2, both[1])
        for beside, by_itself in zip(both[1], alone, strict=True):
            assert np.array_equal(beside.token_ids, by_itself.token_ids)
        for directory, of in (
            (peft(3, cut=100), base),
            (peft(3), "0123456789abcdef"),
            (peft(3, without="q_proj"), base),
        ):
            with pytest.raises(GroupFailed, match=f"^{re.escape(str(directory))}: .*(bytes|is for the base|q_proj)"):
                await engine.load_adapter(2, directory, scale, of)
        assert_of(2, (await sampled(2))[0])
        await engine.load_adapter(1, peft(4), scale, base)
        both = await sampled(1, 2)
        assert_of(4, both[0])
        assert_of(2, both[1])
    finally:
        await made.engine.close()
        made.publisher.dissolve()


async def test_an_engine_of_whole_weights_takes_no_adapters(tmp_path: Path) -> None:
    made = await VllmSubject.start(tmp_path, family="qwen2", tied=True)
    try:
        await made.join()
        manifest = replace(made.manifest(1), adapter=AdapterForm(8, 1.0, ""))
        publishing = asyncio.create_task(asyncio.to_thread(made.publisher.publish, manifest, iter(made.weights(1))))
        with pytest.raises(TornWeights, match="is an adapter, and this engine holds whole weights"):
            await made.engine.receive_weights(manifest)
        with pytest.raises(GroupFailed):
            await publishing
    finally:
        await made.engine.close()
        made.publisher.dissolve()


async def test_a_mixture_on_a_cpu_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, family="qwen3_moe")
    config = tiny_config(model, lora={"rank": 8, "targets": ["attention"]})
    with pytest.raises(EngineError, match="no kernel for a mixture of experts on a CPU; legal: a GPU, or"):
        await VllmEngine.start(config, seed=0)


# ------------------------------------------------------------------------------------------------------------- experts
#
# vLLM multiplies adapters of experts on a GPU alone.  Its layer itself keeps them anywhere, here without a kernel.

HIDDEN, WIDTH, EXPERTS = 8, 6, 3
MIXTURE = "model.layers.0.mlp.experts"
SHAPES = {"gate_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH), "up_proj": (WIDTH, HIDDEN)}


def slot_of_experts(tp_rank: int, tp_size: int, modules: list[str]) -> tuple[AdapterSlot, Any]:
    """A slot whose only layer is vLLM's of experts, of one of its ranks, and that layer."""
    layer: Any = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    parallel = SimpleNamespace(use_ep=False, ep_rank=0)
    sizes = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "hidden_dim": HIDDEN}
    layer.moe_config = SimpleNamespace(
        **sizes, intermediate_size_per_partition=WIDTH // tp_size, moe_parallel_config=parallel
    )
    layer.tp_rank, layer.tp_size, layer.device, layer._w13_slices = tp_rank, tp_size, torch.device("cpu"), 2
    layer.create_lora_weights(1, LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32))
    packed = [f"{MIXTURE}.{expert}.{last}" for expert in range(EXPERTS) for last in SHAPES]
    manager = SimpleNamespace(lora_index_to_id=[1], modules={MIXTURE: layer}, packed_modules={MIXTURE: packed})
    registry = SimpleNamespace(add_dummy_lora=lambda *_, **__: None, add_adapter=lambda _: None)
    runner = SimpleNamespace(lora_manager=registry, get_model=lambda: SimpleNamespace(lora_manager=manager))
    return AdapterSlot(runner, rank=2, modules=modules, base=""), layer


def version_of_experts(lasts: list[str]) -> tuple[dict[str, torch.Tensor], WeightManifest]:
    draw = torch.Generator().manual_seed(5)
    tensors = {
        f"{MIXTURE}.{expert}.{last}{part}": torch.randn(shape, generator=draw)
        for expert in range(EXPERTS)
        for last in lasts
        for part, shape in ((A, (2, SHAPES[last][1])), (B, (SHAPES[last][0], 2)))
    }
    specs = [TensorSpec(name, "float32", tuple(each.shape)) for name, each in tensors.items()]
    return tensors, make_manifest(3, 1, specs, 1 << 20, AdapterForm(rank=2, scale=1.5, base=""))


@pytest.mark.parametrize("lasts", [list(SHAPES), ["down_proj"]])
@pytest.mark.parametrize(("tp_rank", "tp_size"), [(0, 1), (0, 2), (1, 2)])
async def test_adapters_of_experts_lie_where_vllms_kernels_read_them(
    tp_rank: int, tp_size: int, lasts: list[str]
) -> None:
    tensors, manifest = version_of_experts(lasts)
    slot, layer = slot_of_experts(tp_rank, tp_size, sorted({name.rsplit(".", 2)[0] for name in tensors}))
    for tensor in slot.tensors():
        tensor.fill_(7.0)
    slot.load(tensors.items(), manifest)
    share = slice(tp_rank * WIDTH // tp_size, (tp_rank + 1) * WIDTH // tp_size)
    held = {
        "gate_proj": (layer.w13_lora_a_stacked[0], layer.w13_lora_b_stacked[0], slice(None), share),
        "up_proj": (layer.w13_lora_a_stacked[1], layer.w13_lora_b_stacked[1], slice(None), share),
        "down_proj": (layer.w2_lora_a_stacked[0], layer.w2_lora_b_stacked[0], share, slice(None)),
    }
    assert len(list(slot.tensors())) == 6
    for last, (of_a, of_b, columns, rows) in held.items():
        for expert in range(EXPERTS):
            a, b = of_a[0, expert], of_b[0, expert]
            assert not a[2:].any()
            assert not b[:, 2:].any()
            if last in lasts:
                assert torch.equal(a[:2], tensors[f"{MIXTURE}.{expert}.{last}{A}"][:, columns])
                assert torch.equal(b[:, :2], 1.5 * tensors[f"{MIXTURE}.{expert}.{last}{B}"][rows])
            else:
                assert not a.any()
                assert not b.any()


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_adapters_of_experts_of_other_sizes_are_refused_by_name(tp_size: int) -> None:
    tensors, manifest = version_of_experts(list(SHAPES))
    slot, _ = slot_of_experts(0, tp_size, sorted({name.rsplit(".", 2)[0] for name in tensors}))
    wrong = f"{MIXTURE}.1.up_proj{A}"
    specs = [replace(each, shape=(2, 5)) if each.name == wrong else each for each in manifest.tensors]
    with pytest.raises(GroupFailed, match=re.escape(f"version 3: A and B of {MIXTURE}.1.up_proj are [2, 5] and")):
        slot.refuse_unfit(replace(manifest, tensors=tuple(specs)))


# --------------------------------------------------------------------------------------------------------------- merged


class MergedSubject(VllmSubject):
    """An engine of whole weights, which a trainer of adapters merges for each version."""

    trainer: Any

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return list(self.trainer.weights())

    def held(self, layer: str) -> torch.Tensor:
        """A matrix [out, in] of the engine, whose kernels keep it repacked: what it makes of unit vectors is exact."""
        module = self.worker.model_runner.get_model().get_submodule(layer)
        return torch.as_tensor(module(torch.eye(module.input_size, dtype=module.params_dtype))[0]).T


def rounding(made: MergedSubject, dtype: torch.dtype) -> torch.Tensor:
    """Errors of the engine's matrices against a merge in float64, over what rounding once from float32 may make."""
    given = {name: tensor.double() for name, tensor in made.trainer._lora.parameters.items()}
    scale, shares = made.trainer._lora.settings.scale, []
    joined = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for layer, parts in (*joined.items(), ("self_attn.o_proj", ("o_proj",)), ("mlp.down_proj", ("down_proj",))):
        place = f"model.layers.1.{layer}"
        names = [f"{place.rpartition('.')[0]}.{part}" for part in parts]
        base = torch.cat([made._base[f"{name}.weight"].to(dtype) for name in names]).double()
        update = torch.cat([given[name + B] @ given[name + A] for name in names])
        sizes = torch.cat([given[name + B].abs() @ given[name + A].abs() for name in names])
        expected = base + scale * update
        in_float32 = 2**-24 * (LORA["rank"] + 2) * (base.abs() + scale * sizes)
        allowed = torch.finfo(dtype).eps / 2 * expected.abs() + in_float32
        shares.append(((made.held(place).double() - expected).abs() / allowed).flatten())
    return torch.cat(shares)


LORA: dict[str, Any] = {"rank": 8, "alpha": 20.0, "targets": ("attention", "mlp")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_hundredth_merged_version_is_as_exact_in_the_engine_as_the_first(tmp_path: Path, dtype: str) -> None:
    made = await MergedSubject.start(tmp_path, family="qwen3", tied=True, dtype=dtype)
    settings = trainer_config(made.config.model.path, dtype=dtype, lora=LORA, form="merged")
    made.trainer, rows = open_backend(settings, RankContext()), [pack_row(draw_samples((12, 9)))]
    found = {}
    try:
        await made.join()
        for version in range(1, 101):
            made.trainer.step(
                rows, clipped_loss, proximal=None, num_loss_tokens=num_loss_tokens(rows), learning_rate=5e-3,
                weight_decay=0.0, max_grad_norm=1.0,
            )  # fmt: skip
            await made.update(version)
            if version in (1, 100):
                found[version] = rounding(made, getattr(torch, dtype))
        for shares in found.values():
            assert shares.max() <= 1
        assert found[100].square().mean().sqrt() <= 1.05 * found[1].square().mean().sqrt()
    finally:
        await made.engine.close()
        made.publisher.dissolve()
        made.trainer.close()
