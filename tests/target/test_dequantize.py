"""Quantized heads come out as the formats' own code or definition says, whole and by rows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import InputError
from eyas.target.info import TargetInfo
from eyas.target.resolve import resolve_target
from eyas.target.weights import load_head
from target import fixtures
from target.fixtures import HIDDEN, VOCAB, Config, Random, Weights
from target.tiny_kimi import int4_config, pack_int4

ROWS = torch.tensor([0, 5, 319, 5, 64])


def with_head(path: Path, head: Weights, quantization: Config) -> TargetInfo:
    config = fixtures.dense_config("llama", "LlamaForCausalLM", quantization_config=quantization)
    weights = fixtures.dense_weights(head=None).weights
    fixtures.write_checkpoint(path, config, {**weights, **{f"lm_head.{k}": v for k, v in head.items()}})
    return resolve_target(str(path))


def check(info: TargetInfo, expected: torch.Tensor) -> None:
    assert info.head.shape == (VOCAB, HIDDEN)
    assert not info.tied
    assert torch.allclose(load_head(info), expected, atol=1e-6)
    assert torch.allclose(load_head(info, ROWS), expected[ROWS], atol=1e-6)


def values() -> torch.Tensor:
    return Random(seed=3).normal(VOCAB, HIDDEN)


@pytest.mark.parametrize("kind", ["tensor", "row", "row_flat", "block"])
def test_fp8(tmp_path: Path, kind: str) -> None:
    weight = (values() * 100).to(torch.float8_e4m3fn)
    shape = {"tensor": (1,), "row": (VOCAB, 1), "row_flat": (VOCAB,), "block": (10, 2)}[kind]
    scale = Random(seed=4).normal(*shape).abs()
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    info = with_head(tmp_path, {"weight": weight, name: scale}, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    blocks = scale.repeat_interleave(32, 0).repeat_interleave(32, 1) if kind == "block" else None
    full = scale.reshape(-1, 1) if blocks is None else blocks
    check(info, weight.float() * full)


def test_fp8_of_another_block_size(tmp_path: Path) -> None:
    head = {"weight": values().to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(10, 2)}
    info = with_head(tmp_path, head, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(InputError, match=r"weight_scale_inv has shape \[10, 2\], which is no scale"):
        load_head(info)


def test_partial_blocks(tmp_path: Path) -> None:
    scale = Random(seed=4).normal(4, 2).abs()  # 320 rows in blocks of 96, 64 columns in blocks of 48
    weight = values().to(torch.float8_e4m3fn)
    info = with_head(
        tmp_path, {"weight": weight, "weight_scale_inv": scale}, {"quant_method": "fp8", "weight_block_size": [96, 48]}
    )
    full = scale.repeat_interleave(96, 0)[:VOCAB].repeat_interleave(48, 1)[:, :HIDDEN]
    check(info, weight.float() * full)


def test_int4_by_its_definition(tmp_path: Path) -> None:
    r = Random()
    pack_int4(r, "lm_head", VOCAB, HIDDEN)
    head = {name.removeprefix("lm_head."): tensor for name, tensor in r.weights.items()}
    words = head["weight_packed"].long()
    expected = torch.empty(VOCAB, HIDDEN)
    for k in range(HIDDEN):
        nibble = (words[:, k // 8] >> (4 * (k % 8))) & 15
        expected[:, k] = (nibble - 8).float() * head["weight_scale"][:, k // 32].float()
    info = with_head(tmp_path, head, int4_config())
    assert info.quantization == "compressed-tensors int4"
    check(info, expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_by_the_library(tmp_path: Path, bits: int, symmetric: bool) -> None:
    """Packed by compressed-tensors' own functions."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    generator = torch.Generator().manual_seed(0)
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (VOCAB, HIDDEN), generator=generator, dtype=torch.int8)
    scale = torch.rand(VOCAB, HIDDEN // 32, generator=generator) + 0.1
    zero = torch.randint(-half, half, (VOCAB, HIDDEN // 32), generator=generator, dtype=torch.int8)
    head = {"weight_packed": helpers.pack_to_int32(q, bits), "weight_scale": scale}
    if not symmetric:
        head["weight_zero_point"] = helpers.pack_to_int32(zero, bits, packed_dim=0).contiguous()
    config = int4_config()
    config["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    shift = 0 if symmetric else zero.float().repeat_interleave(32, 1)
    check(with_head(tmp_path, head, config), (q.float() - shift) * scale.repeat_interleave(32, 1))


@pytest.mark.parametrize("modelopt", [True, False])
def test_nvfp4(tmp_path: Path, modelopt: bool) -> None:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (VOCAB, HIDDEN), generator=generator)
    value = levels[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    scale = (torch.rand(VOCAB, HIDDEN // 16, generator=generator) * 100 + 1).to(torch.float8_e4m3fn)
    fine = scale.float().repeat_interleave(16, 1)
    if modelopt:
        head = {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(0.01)}
        info = with_head(tmp_path, head, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
        assert info.quantization == "nvfp4"
        check(info, value * fine * 0.01)
    else:
        head = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.tensor([100.0])}
        config = int4_config() | {"format": "nvfp4-pack-quantized"}
        info = with_head(tmp_path, head, config)
        assert info.quantization == "compressed-tensors nvfp4"
        check(info, value * fine / 100)


def signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_awq(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (HIDDEN, VOCAB), generator=generator)
    zero = torch.randint(0, 16, (2, VOCAB), generator=generator)
    scale = torch.rand(2, VOCAB, generator=generator)

    def pack(x: torch.Tensor) -> torch.Tensor:  # nibble i of a word holds output order[i]
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        words = torch.zeros(x.shape[0], x.shape[1] // 8, dtype=torch.int64)
        for i, column in enumerate(order):
            words |= x[:, column::8] << (4 * i)
        return signed(words)

    head = {"qweight": pack(q), "qzeros": pack(zero), "scales": scale.half()}
    info = with_head(tmp_path, head, {"quant_method": "awq", "bits": 4, "group_size": 32})
    assert info.quantization == "awq int4"
    group = torch.arange(HIDDEN) // 32
    check(info, ((q - zero[group]).float() * scale.half().float()[group]).t())


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq(tmp_path: Path, form: str, reordered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (HIDDEN, VOCAB), generator=generator)
    zero = torch.randint(1, 15, (2, VOCAB), generator=generator)
    scale = torch.rand(2, VOCAB, generator=generator)
    group = torch.arange(HIDDEN) // 32
    if reordered:
        group = group[torch.randperm(HIDDEN, generator=generator)]
    stored = zero - (1 if form == "gptq" else 0)
    shifts = torch.arange(0, 32, 4)
    head = {
        "qweight": signed((q.view(HIDDEN // 8, 8, VOCAB) << shifts.view(1, 8, 1)).sum(1)),
        "qzeros": signed((stored.view(2, VOCAB // 8, 8) << shifts).sum(-1)),
        "scales": scale,
        "g_idx": group.to(torch.int32),
    }
    info = with_head(tmp_path, head, {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": form})
    check(info, ((q - zero[group]).float() * scale[group]).t())


def test_deepseek_with_an_fp8_head(tmp_path: Path) -> None:
    info = resolve_target(str(fixtures.deepseek_v3(tmp_path, fp8_head=True)))
    stored = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    scale = stored["lm_head.weight_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    check(info, stored["lm_head.weight"].float() * scale)
