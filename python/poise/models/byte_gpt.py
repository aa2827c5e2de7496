"""The demo's model: a decoder-only transformer over bytes, on plain torch.nn.

Its twin in C++ is src/cli/byte_gpt.cpp: same names, operations and, from the same seed, numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    """Pre-LN block: x + attention(ln1(x)), then x + mlp(ln2(x))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = (
            self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(
            qkv[0], qkv[1], qkv[2], dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.ln1(x)), self.dropout, self.training)
        mlp = self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        return x + F.dropout(mlp, self.dropout, self.training)


class ByteGPT(nn.Module):
    """A GPT whose tokens are bytes.

    Args:
      layers, width, heads, sequence_length, dropout, loss_chunk_tokens: as in the section `model`
        of docs/config.md.
      seed: of the parameters, which are drawn from a generator of their own.
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        sequence_length: int = 128,
        dropout: float = 0.0,
        loss_chunk_tokens: int = 0,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.dropout = dropout
        self.loss_chunk_tokens = loss_chunk_tokens
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Embedding(sequence_length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """GPT-2's numbers (Radford et al. 2019), parameters in order of registration."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2.0 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1)
            else:
                onto_residual = name.endswith(("proj.weight", "out.weight"))
                parameter.normal_(0, residual if onto_residual else 0.02, generator=generator)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tok(tokens) + self.pos(positions), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.ln(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> fp32 logits [B, T, 256]."""
        return self.head(self.hidden(tokens)).float()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over the B x T targets."""
        targets = targets.reshape(-1)
        if self.loss_chunk_tokens > 0:
            from poise.checkpointing import chunked_cross_entropy

            hidden = self.hidden(inputs).reshape(targets.numel(), -1)
            total, counted = chunked_cross_entropy(
                hidden, self.head.weight, None, targets, self.loss_chunk_tokens
            )
            return total / counted
        return F.cross_entropy(self(inputs).reshape(-1, VOCABULARY), targets)

    @torch.no_grad()
    def generate(
        self, prompt: bytes, count: int, temperature: float = 0.0, seed: int = 42
    ) -> bytes:
        """`count` bytes that follow `prompt`; temperature 0 takes the likeliest byte each time."""
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        text = bytearray(prompt or b"\n")
        start = len(text)
        for _ in range(count):
            window = list(text[-self.sequence_length :])
            tokens = torch.tensor([window], device=self.head.weight.device)
            last = self(tokens)[0, -1].cpu()
            if temperature > 0:
                chances = (last / temperature).softmax(0)
                text.append(int(torch.multinomial(chances, 1, generator=generator)))
            else:
                text.append(int(last.argmax()))
        self.train(was_training)
        return bytes(text[start:])
