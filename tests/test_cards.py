# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Model cards: every number with its protocol and its error, for pipelines of this package and of others."""

import pytest
import torch
from diffusers import ConfigMixin, DDPMPipeline, DDPMScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from huggingface_hub import ModelCard

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextModel,
    D3PMTextPipeline,
    bound_results,
    character_tokenizer,
    create_model_card,
    create_text_model,
    create_unet,
    evaluate_bound,
    export,
    register_schedule,
    register_transition,
)
from d3pm_hf.hub.cards import LOADING_NOTE, eval_result
from d3pm_hf.models import Denoiser, ImageDenoiser
from d3pm_hf.transitions import RankOneTransition


LENGTH = 16


def make_text():
    torch.manual_seed(0)
    return D3PMTextPipeline(
        create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=LENGTH
    )


class PixelDenoiser(Denoiser, ModelMixin, ConfigMixin):
    """A network of the user's own, saved and loaded by diffusers: one table of logits for all pixels."""

    sample_shape = (1, 4, 4)

    @register_to_config
    def __init__(self, num_classes: int = 5):
        super().__init__()
        self.num_classes = num_classes
        self.table = torch.nn.Embedding(num_classes, num_classes)

    def forward(self, x_t, timestep, **condition):
        return self.table(x_t)


class OwnImagePipeline(D3PMImagePipeline):
    """A pipeline of the user's own."""


class TaskPipeline(D3PMImagePipeline):
    task = "text-to-image"


def make_own(pipeline=OwnImagePipeline):
    torch.manual_seed(0)
    return pipeline(PixelDenoiser(), D3PMScheduler(5, 20, transition="uniform", beta_schedule="cosine"))


def test_the_card_of_own_classes():
    pipeline = make_own()
    card = ModelCard(str(create_model_card(pipeline, "someone/own")))
    assert card.data.pipeline_tag == "unconditional-image-generation" and card.data.base_model is None
    assert "`PixelDenoiser`, 25 parameters." in card.text
    assert (
        f"{LOADING_NOTE} Import `test_cards.PixelDenoiser`, `test_cards.OwnImagePipeline` before you load" in card.text
    )
    assert (
        "```python\nfrom d3pm_hf import D3PMPipeline\nimport test_cards\n\n"
        'pipeline = D3PMPipeline.from_pretrained("someone/own")\n'
        'pipeline(num_inference_steps=20).images[0].save("sample.png")\n```'
    ) in card.text


def test_own_classes_are_saved_and_loaded_and_not_exported(tmp_path):
    pipeline = make_own()
    pipeline.save_pretrained(tmp_path / "saved")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "saved")
    assert type(loaded) is OwnImagePipeline and loaded.denoiser is loaded.unet
    assert torch.equal(loaded.unet.table.weight, pipeline.unet.table.weight)
    for own, words in (
        (pipeline, "the unet is test_cards.PixelDenoiser"),
        (D3PMImagePipeline(pipeline.unet, pipeline.scheduler), "the unet is test_cards.PixelDenoiser"),
        (
            OwnImagePipeline(create_unet("tiny", 5, 8, 1), pipeline.scheduler),
            "the pipeline is test_cards.OwnImagePip",
        ),
    ):
        with pytest.raises(
            ValueError,
            match=f"{words}.*, which cannot be exported because it is not part of d3pm_hf: use `save_pretrained`, and import",
        ):
            export(own, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@register_transition("falling", "levels fall to zero")
class OwnTransition(RankOneTransition):
    """A family of the user's own: states are replaced by the first one."""

    @staticmethod
    def stationary_of(settings):
        return torch.eye(settings.num_classes, dtype=torch.float64)[0]


@register_schedule("quarter")
def own_betas(num_steps):
    return torch.full((num_steps,), 0.25, dtype=torch.float64)


def test_own_transitions_and_schedules_are_described_and_not_exported(tmp_path):
    for settings, words in (
        (
            {"transition": "uniform", "beta_schedule": "quarter"},
            "the beta_schedule is test_cards.own_betas, which cannot",
        ),
        (
            {"transition": "falling", "beta_schedule": "cosine"},
            "the transition is test_cards.OwnTransition, which cannot",
        ),
    ):
        pipeline = D3PMImagePipeline(create_unet("tiny", 5, 8, 1), D3PMScheduler(5, 20, **settings))
        with pytest.raises(
            ValueError, match=f"{words} be exported because it is not part of d3pm_hf: use `save_pretr"
        ):
            export(pipeline, tmp_path / "exported")
        card = create_model_card(pipeline)
        assert "import test_cards\n" in card.text and "before you load the checkpoint." in card.text
    assert "Its process is `falling`: levels fall to zero. There are 5 states" in card.text
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("part", ["network", "transition"])
def test_parts_that_cannot_be_saved(tmp_path, part):
    """diffusers would leave out the network with a log message."""
    if part == "network":
        denoiser = ImageDenoiser(create_unet("tiny", 5, 8, 1), 5)
        pipeline = D3PMImagePipeline(denoiser, D3PMScheduler(5, 20, transition="uniform"))
        words = "unet is a ImageDenoiser, which has no `save_pretrained`: derive it from `ModelMixin`"
    else:
        transition = RankOneTransition(torch.full((5,), 0.2), own_betas(20))
        pipeline = D3PMImagePipeline(create_unet("tiny", 5, 8, 1), D3PMScheduler(transition=transition))
        words = "RankOneTransition object, which cannot be saved: register its class with `register_transition`"
    for save in (pipeline.save_pretrained, lambda folder: export(pipeline, folder), pipeline.push_to_hub):
        with pytest.raises(ValueError, match=words):
            save(tmp_path / "saved")
    assert not [*tmp_path.iterdir()]


def test_a_compiled_network_is_exported_as_itself(tmp_path):
    model = torch.compile(create_text_model("tiny", 28))
    pipeline = D3PMTextPipeline(model, D3PMScheduler(28), character_tokenizer(), sequence_length=16)
    export(pipeline, tmp_path / "exported")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "exported")
    assert torch.equal(loaded.text_model.lm_head.weight, model.lm_head.weight)


def test_pipelines_that_are_not_d3pm_pipelines(tmp_path):
    unet = create_unet("tiny", 17, 8, 1)
    for pipeline, words in (
        (
            DDPMPipeline(unet, DDPMScheduler()),
            "pipeline is a DDPMPipeline with task=None: it must be a `D3PMPipeline`",
        ),
        (
            make_own(TaskPipeline),
            "task='text-to-image': it must be .*, and its task one of text-generation, unconditional",
        ),
    ):
        for call in (create_model_card, lambda pipeline: export(pipeline, tmp_path / "exported")):
            with pytest.raises(ValueError, match=words):
                call(pipeline)


def test_a_hand_written_card_is_kept(tmp_path):
    pipeline = make_text()
    pipeline.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# mine")
    pipeline.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# mine"


def test_card(tmp_path):
    pipeline = make_text()
    model, scheduler = pipeline.text_model, pipeline.scheduler
    x_0 = torch.randint(0, 27, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    bound = evaluate_bound(
        scheduler, lambda x, t: model(x, t).logits, [x_0], num_inference_steps=5, progress_bar=False
    )
    card = create_model_card(
        pipeline,
        "someone/text",
        training={"steps": 1000, "learning rate": 5e-4},
        eval_results=bound_results(bound, "noise", split="validation", task="text-generation"),
        sample="once upon a time",
        datasets="someone/data",
        license="mit",
    )
    card.save(tmp_path / "README.md")
    again = ModelCard.load(tmp_path / "README.md")
    bits, perplexity = again.data.eval_results
    assert bits.metric_value == round(bound.bits_per_dim, 4) and bits.metric_type == "bits_per_dim"
    assert perplexity.metric_value == round(bound.perplexity, 4) and bits.dataset_split == "validation"
    assert bits.metric_args["protocol"] == bound.protocol and bound.protocol in again.text
    errors = (bound.bits_per_dim_standard_error, bound.perplexity * bound.standard_error)
    for result, error in zip((bits, perplexity), errors):  # every number with its error, in the index and in the table
        assert result.metric_args["standard_error"] == pytest.approx(error, rel=0.05)
        assert f"| {result.metric_value} ± {result.metric_args['standard_error']} |" in again.text
    assert again.data.library_name == "d3pm_hf" and again.data.license == "mit" and "d3pm" in again.data.tags
    for part in ("tokens turn into a mask", "28 states", "1000 timesteps", "| steps | 1000 |", "once upon a time"):
        assert part in again.text
    assert 'D3PMPipeline.from_pretrained("someone/text")' in again.text


def test_a_bound_of_one_example_has_no_error():
    x_0 = torch.randint(0, 27, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    pipeline = make_text()
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, [x_0], num_inference_steps=5, progress_bar=False)
    card = create_model_card(pipeline, eval_results=bound_results(bound, "noise", task="text-generation"))
    assert ModelCard(str(card)).data.eval_results[0].metric_args == {"protocol": bound.protocol}
    assert f"| {round(bound.bits_per_dim, 4)} |" in card.text and "nan" not in str(card).lower()


HOSTILE = (
    "a|b",
    "two\nlines",
    "<script>x</script>",
    "`code`",
    "[a](b)",
    "**bold**",
    "__init__",
    "--> end",
    "\\",
    "# a\n---\n",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_plain_text_on_a_card(name):
    """A Markdown parser finds each name unchanged in its cell, and no further cells."""
    markdown_it = pytest.importorskip("markdown_it")
    pipeline = make_text()
    x_0 = torch.randint(0, 27, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, [x_0], num_inference_steps=2, progress_bar=False)
    results = bound_results(bound, name, split="test", task="text-generation")
    card = ModelCard(str(create_model_card(pipeline, training={name: name, "steps": 5}, eval_results=results)))
    plain = " ".join(name.split())
    assert [result.dataset_name for result in card.data.eval_results] == [plain, plain]
    tokens = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).parse(card.text)
    assert not [token for token in tokens if token.type == "html_block"]
    cells = [
        after.children
        for token, after in zip(tokens, tokens[1:])
        if token.type == "td_open" and after.type == "inline"
    ]
    assert len(cells) == 2 * 2 + 2 * 4
    assert all(child.type in ("text", "text_special") for cell in cells for child in cell)
    texts = ["".join(child.content for child in cell) for cell in cells]
    assert texts[:4] == [plain, plain, "steps", "5"] and texts[4] == texts[8] == f"{plain}, test"


@pytest.mark.parametrize("sample", ["plain", "```\n# out\n```", "a ````` b", "~~~\n```text"])
def test_a_sample_stays_in_its_fence(sample):
    markdown_it = pytest.importorskip("markdown_it")
    card = create_model_card(make_text(), sample=sample)
    *_, last = markdown_it.MarkdownIt("commonmark").parse(card.text)
    assert (last.type, last.content) == ("fence", sample + "\n")


def test_language_and_base_model(tmp_path, monkeypatch):
    """`base_model` is the repository that the network was loaded from, and never a local folder."""
    monkeypatch.chdir(tmp_path)
    pipeline = make_text()
    assert create_model_card(pipeline).data.base_model is None
    pipeline.text_model.save_pretrained("some/folder")
    pipeline.text_model = D3PMTextModel.from_pretrained("some/folder")
    assert create_model_card(pipeline).data.base_model is None
    pipeline.save_pretrained("saved")
    again = D3PMPipeline.from_pretrained("saved")
    monkeypatch.chdir("some")  # where the relative path leads nowhere
    assert create_model_card(again).data.base_model is None
    pipeline.text_model.config._name_or_path = "google-bert/bert-base-uncased"  # as `from_pretrained` sets it
    card = ModelCard(str(create_model_card(pipeline, language="en")))
    assert (card.data.base_model, card.data.language) == ("google-bert/bert-base-uncased", "en")
    card = create_model_card(pipeline, base_model="someone/other", language=["en", "de"])
    assert (card.data.base_model, card.data.language) == ("someone/other", ["en", "de"])
    assert "base_model_relation" not in card.data.to_dict()
    card = create_model_card(pipeline, base_model="someone/other", training={"seed": 0})
    assert card.data.base_model_relation == "finetune"


def test_the_code_of_a_card_takes_steps_that_there_are():
    """A network that predicts x_{t-1} cannot skip timesteps, so that 20 steps would raise an error."""
    scheduler = D3PMScheduler(28, 50, prediction_type="previous")
    pipeline = D3PMTextPipeline(make_text().text_model, scheduler, character_tokenizer(), sequence_length=LENGTH)
    assert "pipeline(num_inference_steps=50)" in create_model_card(pipeline).text


def test_card_of_an_image_pipeline():
    card = create_model_card(
        D3PMImagePipeline(create_unet("tiny", 17, 8, 1), D3PMScheduler(17, transition="uniform")), sample="samples.png"
    )
    assert "![samples](samples.png)" in card.text and card.data.pipeline_tag == "unconditional-image-generation"


# Entries of the model-index


def test_an_eval_result_has_its_protocol_and_its_error():
    result = eval_result(
        "bits_per_dim",
        "Bits per dimension",
        1.234567,
        task="text-generation",
        dataset_name="two\nlines",
        split="validation",
        protocol="all of 3 examples",
        standard_error=0.012345,
        num_samples=3,
    )
    assert (result.metric_value, result.dataset_name, result.dataset_type) == (1.2346, "two lines", "two lines")
    assert (result.dataset_split, result.task_type) == ("validation", "text-generation")
    assert result.metric_args == {"protocol": "all of 3 examples", "num_samples": 3, "standard_error": 0.012}


@pytest.mark.parametrize("error", [None, float("nan")])
def test_an_eval_result_without_an_error(error):
    result = eval_result(
        "fid", "FID", 3.0, task="unconditional-image-generation", dataset_name="digits", standard_error=error
    )
    assert result.metric_args == {} and result.dataset_split == "test"


def test_an_unknown_task():
    with pytest.raises(ValueError, match="task is 'text': it must be one of text-generation, unconditional-image-gen"):
        eval_result("fid", "FID", 3.0, task="text", dataset_name="digits")
