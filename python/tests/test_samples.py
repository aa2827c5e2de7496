"""poise.Samples: what the model says on the way, and the training as it would be without."""

import json

import poise
import pytest
import torch
import transformers
from hf_models import causal_rows, made
from poise import report
from test_hf_trainer import arguments
from test_trainer import Rows, lines_of
from test_trainer import arguments as tiny_arguments
from tiny_models import same_bits, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


class Letters:
    """A tokenizer: a to z are 2 to 27."""

    def __call__(self, text, return_tensors):
        ids = torch.tensor([[ord(letter) - ord("a") + 2 for letter in text]])
        return transformers.BatchEncoding({"input_ids": ids})

    def decode(self, ids):
        return "".join(chr(int(i) - 2 + ord("a")) if 2 <= i < 28 else "." for i in ids)


def test_prompts_are_continued_as_by_generate(tmp_path, capsys):
    said = []

    class Asks(poise.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **details):
            if state.global_step % 2 == 0:
                model.eval()
                ids = Letters()("ab", "pt")
                tokens = model.generate(**ids, max_new_tokens=4, do_sample=False)
                said.append(Letters().decode(tokens[0]))
                model.train()

    samples = poise.Samples(["ab"], every=2, generate_with={"max_new_tokens": 4})
    args = arguments(tmp_path, gradient_accumulation_steps=2, disable_tqdm=None)
    trainer = poise.Trainer(
        made("gpt2"), args, train_dataset=causal_rows(16), callbacks=[Asks(), samples],
        processing_class=Letters(),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in lines_of(tmp_path) if "samples" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert [line["samples"] for line in lines] == [[text] for text in said]
    assert all(len(text) == 6 and text.startswith("ab") for text in said)
    assert f"update 4/4  sample: {said[1]}" in capsys.readouterr().err
    assert said[1] in report.page(report.read(tmp_path), "mine")


def test_a_function_serves_any_model_and_changes_no_bit_of_the_training(tmp_path):
    seen, models = [], []

    def say(model):
        assert not model.training and not torch.is_grad_enabled()
        seen.append(float(torch.rand(())))
        model(**{name: value[None] for name, value in Rows(1)[0].items()})
        return f"<said> {len(seen)}"

    for callbacks in ([], [poise.Samples(say)]):
        model = tiny(dropout=0.2)
        args = tiny_arguments(tmp_path / str(len(models)), eval_strategy="steps", eval_steps=2)
        trainer = poise.Trainer(
            model, args, train_dataset=Rows(), eval_dataset=Rows(2), callbacks=callbacks
        )
        trainer.train()
        models.append(model)
    assert same_bits(*models) and model.training
    text = (tmp_path / "1" / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text]
    told = [line["samples"] for line in lines if "samples" in line]
    assert told == [["<said> 1"], ["<said> 2"], ["<said> 3"]]
    page = report.page(report.read(tmp_path / "1"), "mine")
    assert "&lt;said&gt; 3" in page and page.index("&lt;said&gt; 3") < page.index("&lt;said&gt; 1")
    trainer.evaluate()  # outside of a run there is nobody to tell
    assert len(seen) == 3


def test_what_cannot_be_asked_is_an_error(tmp_path):
    with pytest.raises(poise.Error, match="every 0 updates"):
        poise.Samples("a", every=0)
    for model, words, lacking in (
        (made("gpt2"), None, "processing_class"),
        (tiny(), Letters(), "gen"),
    ):
        trainer = poise.Trainer(
            model, tiny_arguments(tmp_path), train_dataset=Rows(), callbacks=[poise.Samples("a", 1)],
            processing_class=words, data_collator=torch.utils.data.default_collate,
        )  # fmt: skip
        with pytest.raises(poise.Error, match=f"there is no {lacking}"):
            trainer.train()
