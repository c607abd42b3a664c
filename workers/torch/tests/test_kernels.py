"""Kernels of attention that run on no processor, by what stands in for them: their arguments mean what they should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig

from pipeline_torch_worker import attention
from pipeline_torch_worker.attention import Documents, Kernel, attend, choose
from pipeline_torch_worker.device import NPU_MODULE, Device, npu_module
from pipeline_torch_worker.failure import JobFailure
from pipeline_torch_worker.job import DType

LENGTHS = [13, 1, 21, 6]
CPU = torch.device("cpu")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    monkeypatch.setattr(attention, "_flash_varlen", lambda: flash_by_hand)
    # Only its function: the device that it registers would stay for all tests.
    monkeypatch.setattr("pipeline_torch_worker.device.npu_module", lambda: _FusedAttention)
    npu_module.cache_clear()
    monkeypatch.delenv(NPU_MODULE, raising=False)
    yield
    npu_module.cache_clear()


class _FusedAttention:
    """`torch_npu` with its fused attention alone; see `fake_npu.py`."""

    @staticmethod
    def npu_fusion_attention(*args: torch.Tensor, **settings: object) -> tuple[torch.Tensor, ...]:
        from fused_attention import npu_fusion_attention

        return npu_fusion_attention(*args, **settings)  # type: ignore[arg-type]


def flash_by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Flash attention's contract: `[tokens, heads, head_dim]`, documents between `ends`, a window that counts the token itself."""
    assert ends.dtype == torch.int32
    assert longest == max(LENGTHS)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    found = []
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        place = torch.arange(end - start)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or end))
        scores = torch.einsum("ihd,jhd->hij", q[start:end], k[start:end]) * scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        found.append(torch.einsum("hij,jhd->ihd", weights, v[start:end]))
    return torch.cat(found)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    query = torch.randn(1, 4, tokens, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, tokens, 16, generator=generator)
    return query, key, value


def compute(kernel: Kernel, window: int | None, softcap: float | None, dtype: torch.dtype) -> torch.Tensor:
    query, key, value = (x.to(dtype) for x in inputs())
    documents = Documents(LENGTHS, kernel, CPU)
    module = torch.nn.Module()
    found, _ = attend(module, query, key, value, None, 0.3, documents, sliding_window=window, softcap=softcap)
    return found.float()


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_over_documents_is_that_of_one_mask(window: int | None, softcap: float | None) -> None:
    query, key, value = inputs()
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = query @ key.transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(len(document))
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or 10**6)) & (document[:, None] == document)
    expected = (scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value).transpose(1, 2)
    assert torch.allclose(compute("sdpa", window, softcap, torch.float32), expected, atol=1e-6)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("kernel", "window", "softcap"),
    [
        ("flex", None, None),
        ("flex", 5, None),
        ("flex", 5, 2.0),
        ("flash", None, None),
        ("flash", 5, None),
        ("npu", None, None),
        ("npu", 5, None),
    ],
)
def test_kernels_of_devices_are_given_the_same_attention(
    kernel: Kernel, window: int | None, softcap: float | None
) -> None:
    # The fused attention of an NPU has no f32.
    dtype = torch.bfloat16 if kernel == "npu" else torch.float32
    expected = compute("sdpa", window, softcap, dtype)
    assert torch.allclose(compute(kernel, window, softcap, dtype), expected, atol=2e-2 if kernel == "npu" else 1e-5)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("dtype", "kernel"), [("bf16", "flash"), ("f16", "flash"), ("f32", "sdpa")])
def test_a_gpu_takes_flash_attention_where_it_can_and_flex_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, kernel: Kernel
) -> None:
    monkeypatch.setattr(attention, "_has", lambda _module: True)
    gpu = Device("cuda", CPU, "a stand-in")
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert choose("auto", gpu, dtype, config) == kernel
    assert choose("flex", gpu, dtype, config) == "flex"
    with pytest.raises(JobFailure, match="heads of 16 or wider"):
        choose("flex", gpu, dtype, LlamaConfig(hidden_size=32, num_attention_heads=4))
