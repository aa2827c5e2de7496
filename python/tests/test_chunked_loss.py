"""poise.chunked_cross_entropy against torch.nn.functional.cross_entropy on whole logits."""

import poise
import pytest
import torch
from torch.nn import functional


def problem(dtype=torch.float64, shape=(3, 7), width=5, classes=11):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(classes, dtype=dtype, requires_grad=True)
    targets = torch.randint(classes, shape)
    targets[0, :2] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, 100])
def test_gradcheck(chunk_tokens):
    hidden, weight, bias, targets = problem()

    def loss(hidden, weight, bias):
        return poise.chunked_cross_entropy(hidden, weight, bias, targets, chunk_tokens)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h, w: loss(h, w, None), (hidden, weight))


@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_whole_logits(with_bias):
    hidden, weight, bias, targets = problem()
    bias = bias if with_bias else None
    logits = functional.linear(hidden, weight, bias).flatten(0, -2)
    whole = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    chunked, counted = poise.chunked_cross_entropy(hidden, weight, bias, targets, 4)
    assert counted.item() == 19
    torch.testing.assert_close(chunked, whole, rtol=1e-14, atol=0)
    inputs = [hidden, weight] + ([bias] if with_bias else [])
    for a, b in zip(
        torch.autograd.grad(chunked, inputs), torch.autograd.grad(whole, inputs), strict=False
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_autocast_inside_recompute():
    hidden, weight, bias, targets = problem(torch.float32)

    def loss(hidden):
        return poise.chunked_cross_entropy(hidden, weight, bias, targets, 4)[0]

    def gradients(fn):
        with torch.autocast("cpu", torch.bfloat16):
            value = fn(hidden)
        assert value.dtype == torch.float32
        return torch.autograd.grad(value, [hidden, weight, bias])

    for a, b in zip(
        gradients(loss), gradients(lambda h: poise.checkpointing.recompute(loss, h)), strict=False
    ):
        assert torch.equal(a, b)


def test_bad_label_is_named():
    hidden, weight, bias, targets = problem(torch.float32)
    targets[2, 3] = 11
    with pytest.raises(poise.Error, match="target 11, classes are 0 to 10"):
        poise.chunked_cross_entropy(hidden, weight, bias, targets)


def test_the_peak_is_two_chunks_and_the_gradients():
    tokens, width, classes, chunk = 512, 8, 1024, 32
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    targets = torch.randint(classes, (tokens,))

    def peak(loss):
        with poise.memory.Ledger() as ledger:
            loss().backward()
            return ledger.snapshot().peak_bytes

    def whole():
        return functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")

    def chunked():
        return poise.chunked_cross_entropy(hidden, weight, None, targets, chunk)[0]

    logits, gradients = 4 * tokens * classes, 4 * (tokens + classes) * width
    vectors = 2 * 8 * tokens  # the mask and copies of the targets
    assert peak(whole) >= 2 * logits
    hidden.grad = weight.grad = None
    assert peak(chunked) <= 2 * 4 * chunk * classes + gradients + vectors < logits / 2
