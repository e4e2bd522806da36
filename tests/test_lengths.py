# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Texts of unequal length: what is known is not noised and not scored, padding is not attended to."""

import itertools
import math
import shutil
from pathlib import Path

import families
import pytest
import reference as ref
import torch
import toy
from safetensors.torch import load_file
from test_training import assert_same, launch
from training_run import LENGTH, SETTINGS, make_pipeline, texts

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
)
from d3pm_hf.data import DataCollatorForD3PM
from d3pm_hf.data.batches import condition_of
from d3pm_hf.likelihood import evaluate_bound
from d3pm_hf.losses import d3pm_loss
from d3pm_hf.models import Denoiser
from d3pm_hf.training import D3PMTrainingArguments, loop, read_log, train
from d3pm_hf.training.objective import average, diffusion_loss, noise_generators


# Few steps do not end near the prior, of which the scheduler warns.
pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
FAMILIES = ("absorbing", "uniform", "absorbing_uniform", "gaussian", "band_diagonal")


# The bound


@pytest.mark.parametrize("transition", FAMILIES)
def test_a_text_scores_the_same_alone_and_padded(transition):
    torch.manual_seed(0)
    scheduler = D3PMScheduler(28, 20, transition, beta_schedule="cosine")
    pipeline = D3PMTextPipeline(create_text_model("tiny", 28).eval(), scheduler, sequence_length=LENGTH)
    examples = list(texts(6))
    collate = DataCollatorForD3PM(padding="max_length", max_length=LENGTH + 5)
    together = evaluate_bound(scheduler, pipeline.denoiser, [collate(examples)], seed=7, progress_bar=False)
    batches = ([example] for example in examples)
    apart = evaluate_bound(
        scheduler, pipeline.denoiser, map(DataCollatorForD3PM(), batches), seed=7, progress_bar=False
    )
    torch.testing.assert_close(apart.nats_per_example, together.nats_per_example, rtol=1e-6, atol=1e-6)
    assert apart.num_elements == together.num_elements == sum(len(example["input_ids"]) - 1 for example in examples)
    assert apart.num_known == together.num_known == len(examples)
    assert "scored given 6 known ones" in together.protocol


def weighted_rows(name, joints):
    """x_0, classes and x_t of every timestep such that a plain average over them is the exact expectation.

    Each class has the same number of rows; within it each x_0 as often as its probability is a multiple of the smallest
    one; and of each x_0 all x_1, equally likely by the choice of the noise.
    """
    x_0, labels = [], []
    for label, joint in enumerate(joints):
        counts = (joint * 16).round().long()
        assert torch.equal(counts.double() / 16, joint) and counts.sum() == 16
        for state in itertools.product(range(joint.shape[0]), repeat=joint.ndim):
            for _ in range(int(counts[state])):
                x_0.append(state)
                labels.append(label)
    x_0, labels = torch.tensor(x_0), torch.tensor(labels)
    K, outcomes = joints[0].shape[0], []
    if name == "absorbing":  # beta_1 = 1/2: kept or masked
        kept = torch.tensor(list(itertools.product([True, False], repeat=2)))
        outcomes = [torch.where(keep, x_0, K - 1) for keep in kept]
    else:  # uniform over K = 2 with beta_1 = 1/2: three in four stay
        stays = torch.tensor(list(itertools.product([0, 0, 0, 1], repeat=2)))
        outcomes = [(x_0 + move) % K for move in stays]
    x_1 = torch.cat(outcomes)
    return x_0.repeat(len(outcomes), 1), labels.repeat(len(outcomes)), x_1


@pytest.mark.parametrize("name", ["absorbing", "uniform"])
def test_a_conditional_bound_is_the_enumerated_one(name, monkeypatch):
    """Two classes, two positions, two steps, all noise enumerated: what `evaluate_bound` gives is the expectation itself."""
    K = 3 if name == "absorbing" else 2
    joints = []
    for counts in ([[5, 1], [3, 7]], [[1, 9], [4, 2]]):
        joint = torch.zeros(K, K, dtype=torch.float64)
        joint[:2, :2] = torch.tensor(counts, dtype=torch.float64) / 16
        joints.append(joint)
    kwargs = {"mask_token_id": K - 1} if name == "absorbing" else {}
    scheduler = D3PMScheduler(K, 2, name, trained_betas=[0.5, 1.0], **kwargs)
    matrices = families.build(name, K, [0.5, 1.0]).matrices
    prior = scheduler.transition.log_prior.double().exp()
    tables = torch.stack(
        [torch.stack([ref.exact_prediction(matrices, joint, n, "leave_one_out") for n in (1, 2)]) for joint in joints]
    ).log()  # [C, T, K * K, 2, K]

    def exact_model(x_t, timesteps, class_labels):
        logits = tables[class_labels, timesteps, x_t[:, 0] * K + x_t[:, 1]]
        return logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0)

    x_0, labels, x_1 = weighted_rows(name, joints)
    last = torch.full_like(x_0, K - 1)  # at T the states are masks; uniform ones say nothing, so that any will do

    def enumerated_noise(self, original_samples, timesteps, generator=None):
        return torch.where((timesteps == 0)[:, None], x_1, last)

    monkeypatch.setattr(D3PMScheduler, "add_noise", enumerated_noise)
    batch = {"x_0": x_0, "condition": {"class_labels": labels}}
    got = evaluate_bound(scheduler, exact_model, [batch], progress_bar=False)
    best = sum(ref.best_bound(matrices, joint, prior, [0, 1, 2]) for joint in joints) / 2
    assert got.total * 2 == pytest.approx(best.item(), abs=1e-6)


def test_known_elements_are_a_condition():
    """The bound of one position given the other is that of the conditional distribution, at one step: no noise at all."""
    family = families.build("absorbing", 4, [1.0])
    probs = toy.joint(family, 2)
    mask = family.kwargs["mask_token_id"]
    states = [s for s in itertools.product(range(4), repeat=2) if probs[s] > 0]
    conditional = probs / probs.sum(0, keepdim=True)  # p(x^0 | x^1)

    def model(x_t, t):
        assert (x_t[:, 0] == mask).all() and (x_t[:, 1] != mask).all()  # the second one is known, and not noised
        logits = torch.stack([conditional[:, b] for b in x_t[:, 1].tolist()]).log()
        return torch.stack([logits, torch.zeros_like(logits)], 1)

    scored = torch.tensor([True, False])
    for state in states:
        batch = {"x_0": torch.tensor([state]), "loss_mask": scored[None]}
        got = evaluate_bound(family.scheduler(), model, [batch], progress_bar=False)
        assert got.total == pytest.approx(-math.log(conditional[state]), abs=1e-6) and got.num_known == 1


# Training


SHORT = {**SETTINGS, "max_train_steps": 6, "validation_steps": 3, "checkpointing_steps": 3, "num_samples": 2}


def run(path, dataset, pipeline=None, eval_dataset=None, data_collator=None, **settings):
    arguments = D3PMTrainingArguments(**{**SHORT, **settings}, output_dir=str(path))
    pipeline = make_pipeline() if pipeline is None else pipeline
    return train(arguments, pipeline, dataset, eval_dataset, data_collator=data_collator)


def test_the_loss_is_the_mean_over_what_is_scored():
    pipeline, examples = make_pipeline(), list(texts(5, prompt=2))
    scheduler = pipeline.scheduler
    batch = DataCollatorForD3PM()(examples)
    t, seeds = torch.tensor([5, 20, 40, 60, 99]), [3, 4, 5, 6, 7]
    batch |= {"timestep": t, "seed": seeds, "num_scored": batch["loss_mask"].sum().float()}
    loss, _, _ = diffusion_loss(scheduler, pipeline.denoiser, batch, D3PMTrainingArguments(loss="vb"))
    total, count = 0.0, 0
    for row, example in enumerate(examples):
        x_0 = torch.tensor([example["input_ids"]])
        x_t = scheduler.add_noise(x_0, t[row : row + 1], noise_generators(seeds[row : row + 1]))
        x_t[:, :2] = x_0[:, :2]
        output = d3pm_loss(scheduler, pipeline.denoiser(x_t, t[row : row + 1]), x_0, x_t, t[row : row + 1])
        total, count = total + output.vb[:, 2:].sum().item(), count + x_0.shape[1] - 2
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    assert set(condition_of(batch)) == {"attention_mask"}
    assert average(torch.ones(3, 4), {}) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_data_sets_of_the_hub(streaming, tmp_path):
    """A `datasets.Dataset` and a stream go in as they are. Samples are drawn given what is known."""
    data = texts()
    run(tmp_path, data.to_iterable_dataset() if streaming else data, eval_dataset=texts(8, seed=1), num_samples=10)
    log = read_log(tmp_path / "log.jsonl")
    assert log[-1]["step"] == 6 and any("eval_bits_per_dim" in line for line in log)
    assert "scored given 8 known ones" in (tmp_path / "README.md").read_text()
    samples = (tmp_path / "samples/step-6.txt").read_text().split("\n")[:-1]
    tokenizer = make_pipeline().tokenizer
    assert len(samples) == 10  # more than there are examples
    for line, example in zip(samples, texts(8, seed=1)):
        assert line[0] == tokenizer.decode(example["input_ids"][:1]) and len(line) == len(example["input_ids"])


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed") / "run"
    run(folder, texts().to_iterable_dataset(), eval_dataset=texts(8, seed=1), max_train_steps=16)
    return folder


@pytest.mark.parametrize(
    ("processes", "settings"),
    [(2, {"train_batch_size": 4}), (1, {"train_batch_size": 2, "gradient_accumulation_steps": 4})],
    ids=["two processes", "accumulation"],
)
def test_the_mean_is_that_of_the_step(streamed, tmp_path, processes, settings):
    """Batches have unequal numbers of scored elements, and each of them counts the same, whoever has it."""
    settings = {**SHORT, **settings, "max_train_steps": 16}
    if processes == 1:
        run(tmp_path / "run", texts().to_iterable_dataset(), eval_dataset=texts(8, seed=1), **settings)
    else:
        codes, output = launch(tmp_path / "run", processes, stream=True, **settings)
        assert codes == [0] * processes, output
    for line, other in zip(read_log(tmp_path / "run/log.jsonl"), read_log(streamed / "log.jsonl"), strict=True):
        assert line == pytest.approx(other, abs=1e-5)
    weights = (load_file(path / "text_model/model.safetensors") for path in (tmp_path / "run", streamed))
    assert_same(*weights, 1e-4)


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_stream_goes_on_where_it_was(streamed, tmp_path, step):
    """60 examples are 7.5 steps: the stream ends within a step, and starts again."""
    options = {"eval_dataset": texts(8, seed=1), "max_train_steps": 16}
    folder = Path(shutil.copytree(streamed, tmp_path / "run"))
    for later in (3, 6, 9, 12, 15, 16):
        if later > step:
            shutil.rmtree(folder / f"checkpoint-{later}")
    run(folder, texts().to_iterable_dataset(), resume_from_checkpoint="latest", **options)
    assert (folder / "log.jsonl").read_bytes() == (streamed / "log.jsonl").read_bytes()
    for name in ("text_model/model.safetensors", "checkpoint-16/model.safetensors"):
        assert (folder / name).read_bytes() == (streamed / name).read_bytes()
    with pytest.raises(ValueError, match="the content of the training data changed"):
        run(folder, texts(seed=5).to_iterable_dataset(), resume_from_checkpoint="latest", **options)


def test_documents_of_a_masked_language_model(tmp_path):
    """Its special tokens are known: they are neither noised nor scored, and stand where the tokenizer puts them."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
    scheduler = D3PMScheduler(31, 20, mask_token_id=27, suppress_tokens=[28, 29, 30])
    seen = []

    class Watched(Denoiser):
        num_classes = 31

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(31, 31)

        def forward(self, x_t, timestep, attention_mask):
            seen.append((x_t, attention_mask))
            return self.table(x_t)

    pipeline = D3PMTextPipeline(Watched(), scheduler, tokenizer, sequence_length=8)
    examples = [{"input_ids": [28, *range(1, n), 29]} for n in range(3, 9)]
    settings = {"validation_steps": 0, "num_samples": 0, "train_batch_size": 6, "max_train_steps": 3}
    with pytest.raises(ValueError, match="which has no `save_pretrained`"):
        run(tmp_path, examples, pipeline, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "check_can_be_kept", lambda *arguments: None)
        patch.setattr(loop, "save_pipeline", lambda *arguments: None)
        run(tmp_path, examples, pipeline, **settings)
    for x_t, attention_mask in seen:
        assert (x_t[:, 0] == 28).all()
        lengths = attention_mask.sum(1)
        assert (x_t.gather(1, lengths[:, None] - 1) == 29).all()
        assert (x_t[attention_mask == 0] == 30).all()


# Classes


class Colors:
    """Images of one of two classes: dark or bright."""

    def __len__(self):
        return 40

    def __getitem__(self, item):
        index = item[0] if isinstance(item, tuple) else item
        generator = torch.Generator().manual_seed(index)
        return {"x_0": torch.randint(0, 2, (1, 4, 4), generator=generator) + 2 * (index % 2), "label": index % 2}


def color_pipeline(num_class_embeds=3, num_class_labels=2):
    torch.manual_seed(0)
    unet = create_unet("tiny", 4, 4, 1, num_class_embeds=num_class_embeds)
    return D3PMImagePipeline(unet, D3PMScheduler(4, 20, "gaussian", "cosine"), num_class_labels=num_class_labels)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_classes_reach_the_network(dropout, tmp_path, monkeypatch):
    seen, compute = [], loop.diffusion_loss

    def watch(scheduler, model, batch, arguments):
        seen.append((batch["condition"]["class_labels"], (batch["x_0"].flatten(1) > 1).any(1).long()))
        return compute(scheduler, model, batch, arguments)

    monkeypatch.setattr(loop, "diffusion_loss", watch)
    settings = {"train_batch_size": 40, "condition_dropout": dropout, "num_inference_steps": 4}
    run(tmp_path, Colors(), color_pipeline(), Colors(), **settings)
    labels, truth = (torch.cat(parts) for parts in zip(*seen))
    dropped = labels == 2
    assert torch.equal(labels[~dropped], truth[~dropped])
    assert dropped.float().mean().item() == pytest.approx(dropout, abs=0.1)
    if dropout:
        for value in (0, 1):  # whichever the class
            assert dropped[truth == value].float().mean().item() == pytest.approx(dropout, abs=0.12)
    assert (tmp_path / "samples/step-6.png").exists() and (tmp_path / "README.md").exists()


def test_wrong_classes(tmp_path):
    with pytest.raises(
        ValueError, match="condition_dropout is 0.5, and the network has no row for no class: make it with"
    ):
        run(tmp_path, Colors(), color_pipeline(2, None), condition_dropout=0.5)
    with pytest.raises(ValueError, match="label_column is 'kind', and an example has the columns 'x_0', 'label'"):
        run(tmp_path, Colors(), color_pipeline(), label_column="kind")
    images = [example["x_0"] for example in (Colors()[i] for i in range(40))]
    with pytest.raises(
        ValueError, match="label_column is 'label', and an example is a Tensor .*: pass dictionaries with"
    ):
        run(tmp_path, images, color_pipeline())
    wrong = [{**Colors()[i], "label": 2} for i in range(40)]
    with pytest.raises(
        ValueError, match="class 2 of example 0 is not one of the 2 classes of the network: pass 0 to 1"
    ):
        run(tmp_path, wrong, color_pipeline())
    wrong = [{"x_0": image, "condition": {"class_labels": -1}} for image in images]
    with pytest.raises(ValueError, match="class -1 of example 0 is not one of the 2 classes of the network"):
        run(tmp_path, wrong, color_pipeline(), data_collator=DataCollatorForD3PM())
    assert not (tmp_path / "log.jsonl").exists()


# The end of a text


class Written(Denoiser):
    """A text model that writes one of two texts, each with its end and something behind it."""

    num_classes = 30

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x_t, timestep, attention_mask=None):
        logits = torch.full((*x_t.shape, 30), -30.0)
        texts = torch.tensor([[1, 2, 29, 29, 29], [3, 29, 4, 29, 5]])[torch.arange(len(x_t)) % 2]
        return logits.scatter(-1, texts[..., None], 30.0)


def test_a_text_ends_where_it_ends():
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "eos_token": "[EOS]"})
    scheduler = D3PMScheduler(30, 10, mask_token_id=27, suppress_tokens=[28])
    options = {"batch_size": 2, "sampler": "ancestral"}
    whole = D3PMTextPipeline(Written(), scheduler, tokenizer, sequence_length=5)(**options)
    assert whole.sequences.tolist() == [[1, 2, 29, 29, 29], [3, 29, 4, 29, 5]]
    cut = D3PMTextPipeline(Written(), scheduler, tokenizer, sequence_length=5, ends_with_eos=True)(**options)
    assert cut.sequences.tolist() == [[1, 2, 29, 28, 28], [3, 29, 28, 28, 28]] and cut.texts == ["bc", "d"]
    suppressed = D3PMScheduler(30, 10, mask_token_id=27, suppress_tokens=[28, 29])
    for wrong in ((scheduler, None), (suppressed, tokenizer)):
        with pytest.raises(
            ValueError, match="ends_with_eos is True, and the process has no end of text: pass a tokenizer"
        ):
            D3PMTextPipeline(Written(), *wrong, sequence_length=5, ends_with_eos=True)


def test_training_on_whole_texts_says_that_they_end(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "[EOS]"})
    torch.manual_seed(0)
    scheduler = D3PMScheduler(29, 20, mask_token_id=27)
    pipeline = D3PMTextPipeline(create_text_model("tiny", 29), scheduler, tokenizer, sequence_length=LENGTH)
    collator = DataCollatorForD3PM(tokenizer, max_length=LENGTH, fill_with_eos=True)
    data = texts(prompt=0).remove_columns("labels")
    run(tmp_path, data, pipeline, data_collator=collator, max_train_steps=2, num_samples=0, validation_steps=0)
    loaded = D3PMTextPipeline.from_pretrained(tmp_path)
    assert loaded.config.ends_with_eos
    sequences = loaded(batch_size=4, output_type="latent").sequences
    for row in sequences.tolist():
        end = row.index(28) if 28 in row else LENGTH
        assert set(row[end:]) <= {28}  # without padding of its own, it is the end itself


# Bad input


@pytest.mark.parametrize(
    "examples, words",
    [
        (
            [{"text": "abc"}] * 8,
            "the columns 'text': it needs the data in one column named 'x_0' or 'input_ids'; `d3pm_hf",
        ),
        ([{"input_ids": [1, 2], "labels": [-100, -100]}] * 8, "example 0 has no element that is scored: remove it"),
        ([{"input_ids": [1, 27]}] * 8, r"token 27 at position \(1,\) of example 0 is the mask of the process"),
        ([{"input_ids": [1, 28]}] * 8, r"token 28 at position \(1,\) of example 0 is outside the vocabulary of 28"),
        ([{"input_ids": [1] * 65}] * 8, "a text has 65 tokens, and max_length is 64: cut or pack the texts"),
        ([], "train_dataset is .*: it must be a data set that is not empty"),
    ],
)
def test_wrong_data(examples, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "run", examples)
    assert not (tmp_path / "run").exists()


def test_wrong_collators_and_columns(tmp_path):
    data = texts(8)
    with pytest.raises(
        ValueError, match="label_column is 'kind', and the network has no classes: make it with num_class"
    ):
        run(tmp_path, data, label_column="kind")
    with pytest.raises(ValueError, match="data_collator is 3: it must be a function"):
        run(tmp_path, data, data_collator=3)
    with pytest.raises(ValueError, match="data_collator returned .*: it must return a dictionary with x_0"):
        run(tmp_path, data, data_collator=list)
    empty = texts(8).to_iterable_dataset().take(0)
    with pytest.raises(ValueError, match="the stream is empty: pass one with at least one example"):
        run(tmp_path, empty)
    with pytest.raises(ValueError, match="condition_dropout is 1.5"):
        run(tmp_path, data, condition_dropout=1.5)
