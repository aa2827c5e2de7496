"""A model of uneven blocks and a Trainer's run of it, whose balance is found; and a model for `poise train`."""

import poise
import torch
from torch import nn

VOCABULARY, LENGTH, WIDTH, BLOCKS = 50, 64, 32, 4


class Block(nn.Module):
    def __init__(self, width, inner=4, dropout=0.0):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, inner * width), nn.Linear(inner * width, width)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Uneven blocks; says what its loss is a mean over unless `says_count` is off."""

    def __init__(self, dropout=0.0, says_count=True, norm=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH) if norm else nn.Identity()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 2 + 2 * i, dropout) for i in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.says_count = says_count

    def forward(self, ids, labels):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten())
        return (loss, labels.numel()) if self.says_count else loss


def samples(count=32):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, VOCABULARY, (count, 2, LENGTH), generator=generator)
    return [{"ids": row[0], "labels": row[1]} for row in rows]


def batch_of(size):
    rows = samples(1) * size
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def engine_of(model, **sections):
    return poise.Engine(model, {"batch": {"accumulation": 16}, **sections})


def call(model):
    return lambda batch: poise.loss.as_loss(model(**batch))


def held(model, **sections):
    return sum(engine_of(model, **sections).memory()["current"].values())


def train(directory, model=None, trainer=None, **arguments):
    torch.manual_seed(1)
    given = dict(trainer or {})
    trainer = given.pop("kind", poise.Trainer)(
        Net() if model is None else model,
        poise.TrainingArguments(
            str(directory),
            **{
                "global_batch_size": 16,
                "max_steps": 3,
                "logging_steps": 1,
                "learning_rate": 1e-2,
                "use_cpu": True,
                "disable_tqdm": True,
                **arguments,
            },
        ),
        train_dataset=samples(),
        **given,
    )
    return trainer, trainer.train().training_loss


def with_and_without_a_plan(folder, kind):
    """Models that a Trainer trained in micro-batches it found, and in the same that were given."""
    models, given = [], {"memory_budget": "1GiB", "separable_loss": True}
    for name in ("found", "given"):
        torch.manual_seed(0)
        models.append(kind())
        trainer, _ = train(folder / name, models[-1], **given)
        given = {"per_device_train_batch_size": trainer.args.per_device_train_batch_size}
    return models


# Of a file beside run.json.
FUNCTION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x, labels):
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = nn.functional.cross_entropy(x, labels)
        return {"loss": loss, "count": torch.tensor(len(x))}

def build():
    torch.manual_seed(0)
    rows = [{"x": torch.randn(64), "labels": torch.tensor(i % 3)} for i in range(32)]
    return Net(), rows
"""
