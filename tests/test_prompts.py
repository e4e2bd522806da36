# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text given text: prompts that are continued, prompts of unequal lengths, and the end of a text."""

import families
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, Denoiser, character_tokenizer, create_text_model
from d3pm_hf.models.text_denoisers import num_positions


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
ALPHABET, T = "abcdefgh>.", 8
K, MASK = len(ALPHABET) + 1, len(ALPHABET)
PROMPTS = ["abc>", "a>", "hgfedcb>"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tokenizer_with_end():
    """A full stop ends a text."""
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.eos_token = "."
    return tokenizer


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def build(transition="absorbing", tokenizer=None, settings=None, **kwargs):
    """A pipeline around an untrained network. Without a mask the process has one state less than the tokenizer."""
    torch.manual_seed(0)
    num_classes = K if "absorbing" in transition or settings else K - 1
    settings = settings or ({"mask_token_id": MASK} if "absorbing" in transition else {})
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = create_text_model("tiny", num_classes, **{**sizes, "max_position_embeddings": 32, **kwargs}).eval()
    # What it predicts depends on what it sees.
    model.lm_head.weight.data.mul_(20 if model.config.backbone == "bert" else 1)
    tokenizer = character_tokenizer(ALPHABET) if tokenizer is None else tokenizer
    scheduler = D3PMScheduler(num_classes, T, transition=transition, beta_schedule="cosine", **settings)
    return quiet(D3PMTextPipeline(model, scheduler, tokenizer, sequence_length=12))


class Writer(Denoiser):
    """Predicts the tokens of one text, `[N]`, whatever it reads, and notes what it reads."""

    num_classes = K

    def __init__(self, text):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.text, self.seen, self.attended = text, [], []

    def forward(self, x_t, timestep, attention_mask=None):
        self.seen.append(x_t)
        self.attended.append(attention_mask)
        tokens = torch.tensor([ALPHABET.index(letter) for letter in self.text])
        return 1000 * torch.nn.functional.one_hot(tokens, K)[: x_t.shape[1]].float().expand(len(x_t), -1, -1)


def write(text, tokenizer=None, scheduler=None):
    """A pipeline whose samples are `text`, where they are not given."""
    tokenizer = tokenizer_with_end() if tokenizer is None else tokenizer
    scheduler = D3PMScheduler(K, T, mask_token_id=MASK) if scheduler is None else scheduler
    return quiet(D3PMTextPipeline(Writer(text), scheduler, tokenizer, sequence_length=12))


# A batch, and each of its rows alone


@pytest.mark.parametrize("backbone", ["bert", "t5"])
@pytest.mark.parametrize("transition", ["absorbing", "uniform", "absorbing_uniform", "gaussian", "band_diagonal"])
def test_continuations_of_unequal_prompts(transition, backbone):
    pipeline = build(transition, backbone=backbone)
    options = {"max_new_tokens": 5, "num_return_sequences": 2, "temperature": 2.0}
    if transition != "band_diagonal":  # in which few tokens lead to x_t
        options |= {"top_k": 6, "top_p": 0.9}
    batch = pipeline(PROMPTS, generator=[seeded(i) for i in range(6)], **options)
    assert batch.sequences.shape == (6, 13)
    for i, prompt in enumerate(PROMPTS):
        alone = pipeline(prompt, generator=[seeded(2 * i), seeded(2 * i + 1)], **options)
        assert batch.texts[2 * i : 2 * i + 2] == alone.texts
        assert torch.equal(batch.sequences[2 * i : 2 * i + 2, : len(prompt) + 5], alone.sequences)
        assert all(text.startswith(prompt) and len(text) == len(prompt) + 5 for text in alone.texts)
    assert len(set(batch.texts)) >= 5


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("name", [name for name in families.NAMES if name not in families.BY_POSITION])
def test_gaps_in_unequal_prompts(name, num_particles):
    """Every family, particles included, draws for a padded row what it draws for the row alone."""
    family = families.build(name, 5)
    torch.manual_seed(0)
    model = create_text_model("tiny", 5, hidden_size=16, num_hidden_layers=1, intermediate_size=32).eval()
    pipeline = quiet(D3PMTextPipeline(model, family.scheduler()))
    rows, lengths = family.data((3, 6)), [6, 3, 5]
    attended = torch.arange(6) < torch.tensor(lengths)[:, None]
    mask = torch.arange(6).expand(3, -1) % 3 != 0
    options = {"num_particles": num_particles, "output_type": "latent", "num_inference_steps": 4}
    batch = pipeline(
        input_ids=rows, attention_mask=attended, mask=mask, generator=[seeded(i) for i in range(3)], **options
    ).sequences
    assert torch.equal(batch[attended & ~mask], rows[attended & ~mask])
    for i, n in enumerate(lengths):
        alone = pipeline(input_ids=rows[i : i + 1, :n], mask=mask[:1, :n], generator=[seeded(i)], **options).sequences
        assert torch.equal(batch[i : i + 1, :n], alone)


@pytest.mark.parametrize("sampler", ["ancestral", "positions_first", "first_hitting"])
def test_samplers_of_an_absorbing_process(sampler):
    pipeline = build()
    options = {"max_new_tokens": 5, "temperature": 2.0, "sampler": sampler}
    batch = pipeline(PROMPTS, generator=[seeded(i) for i in range(3)], **options).texts
    assert batch == [pipeline(one, generator=seeded(i), **options).texts[0] for i, one in enumerate(PROMPTS)]


def test_prompts_with_gaps_of_unequal_lengths():
    pipeline = build()
    prompts = ["a[MASK][MASK]d", "[MASK]bcdefg[MASK]", "h"]
    batch = pipeline(prompts, generator=[seeded(i) for i in range(3)])
    assert batch.sequences.shape == (3, 8) and batch.texts[2] == "h"
    for i, prompt in enumerate(prompts):
        assert pipeline(prompt, generator=seeded(i)).texts == [batch.texts[i]]
    assert batch.texts[0][0] == "a" and batch.texts[0][3:] == "d" and batch.texts[1][1:7] == "bcdefg"


def test_reconstructions_of_unequal_texts():
    pipeline = build("uniform")
    options = {"start_timestep": 4, "num_inference_steps": 3}
    texts = pipeline(PROMPTS, generator=[seeded(i) for i in range(3)], **options).texts
    assert texts == [pipeline(one, generator=seeded(i), **options).texts[0] for i, one in enumerate(PROMPTS)]
    assert [len(text) for text in texts] == [4, 2, 8] and texts != PROMPTS


@pytest.mark.parametrize("backbone", ["bert", "t5"])
def test_logits_beside_padding(backbone):
    """Those of a row do not depend on its padding, to float32 rounding."""
    pipeline = build(backbone=backbone)
    pipeline.text_model.double()
    x_t = torch.randint(0, K, (2, 9), generator=seeded())
    attended = torch.arange(9) < torch.tensor([[9], [5]])
    with torch.no_grad():
        padded = pipeline.denoiser(x_t, torch.tensor(3), attention_mask=attended.long())
        alone = pipeline.denoiser(x_t[1:, :5], torch.tensor(3))
    assert (padded[1:, :5] - alone).abs().max() < 1e-6


# What the network sees


def test_the_network_sees_the_prompt_at_every_step():
    pipeline = write("eeeeeeeeeeee")
    output = pipeline(["abc>", "a>"], max_new_tokens=3, sampler="ancestral")
    assert output.texts == ["abc>eee", "a>eee"]
    seen, attended = pipeline.text_model.seen, pipeline.text_model.attended
    assert len(seen) == T
    for x_t, mask in zip(seen, attended):
        assert x_t[0, :4].tolist() == [0, 1, 2, 8] and x_t[1, :2].tolist() == [0, 8]
        assert mask.tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert (seen[0][0, 4:] == MASK).all() and (seen[0][1, 2:5] == MASK).all()


def test_prompts_of_equal_lengths_have_no_mask():
    pipeline = write("eeeeeeeeeeee")
    pipeline(["abc>", "fgh>"], max_new_tokens=3)
    pipeline(input_ids=torch.zeros(2, 4).long(), attention_mask=torch.ones(2, 4), max_new_tokens=3)
    assert all(mask is None for mask in pipeline.text_model.attended)


def test_gaps_of_a_prompt_that_is_continued():
    assert write("eeeeeeeeeeee")("a[MASK]c", max_new_tokens=2).texts == ["aecee"]


def test_tokens_in_place_of_a_prompt():
    tokens = torch.tensor([[0, 1, 8, -5], [2, 3, 4, 8]])  # what stands in the padding does not matter
    pipeline = write("eeeeeeeeeeee")
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    output = pipeline(input_ids=tokens, attention_mask=mask, max_new_tokens=2)
    assert output.texts == ["ab>ee", "cde>ee"]
    pad = pipeline.padding_token_id
    assert output.sequences.tolist() == [[0, 1, 8, 4, 4, pad], [2, 3, 4, 8, 4, 4]]
    without = quiet(D3PMTextPipeline(Writer("eeeeee"), pipeline.scheduler))
    output = without(input_ids=tokens, attention_mask=mask, max_new_tokens=2, output_type="latent")
    assert output.sequences[:, :5].tolist() == [[0, 1, 8, 4, 4], [2, 3, 4, 8, 4]] and output.texts is None
    one = without(
        input_ids=tokens[:1], attention_mask=mask[:1], batch_size=3, generator=[seeded()] * 3, output_type="latent"
    )
    assert one.sequences.tolist() == [[0, 1, 8, MASK]] * 3


def test_without_a_mask_token():
    """A process without a mask, and a tokenizer without one: what is continued needs no mark."""
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.mask_token = None
    pipeline = build("uniform", tokenizer, {"suppress_tokens": [MASK]})
    texts = pipeline(["ab", "c"], max_new_tokens=4).texts
    assert texts[0].startswith("ab") and texts[1].startswith("c") and [len(text) for text in texts] == [6, 5]


# Special tokens


def surrounded():
    """A masked language model with [CLS] and [SEP] around a text."""
    from tokenizers import processors

    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("[CLS]", "[SEP]")]
    template = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = template
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=20, **sizes)
    return quiet(D3PMTextPipeline.from_masked_lm(BertForMaskedLM(config), tokenizer, num_train_timesteps=T))


def test_special_tokens_are_seen_at_every_step():
    pipeline = surrounded()
    cls, sep, pad = (pipeline.tokenizer.convert_tokens_to_ids(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    seen = []

    def callback(pipeline, step, timestep, tensors):
        seen.extend([tensors["latents"], tensors["sample"], tensors["pred_original_sample"]])

    watch = {
        "callback_on_step_end": callback,
        "callback_on_step_end_tensor_inputs": ["latents", "sample", "pred_original_sample"],
    }
    for options in ({"batch_size": 2}, {"prompt": ["a[MASK]c", "ab[MASK]d"]}, {"prompt": "abc", "start_timestep": 5}):
        seen.clear()
        sequences = pipeline(**options, **watch).sequences
        assert len(seen) == 3 * len(pipeline.scheduler.timesteps)
        for i, row in enumerate(sequences):
            end = int((row == sep).nonzero()[0])
            assert row[0] == cls and (row[end + 1 :] == pad).all() and not torch.isin(row[1:end], row[[0, end]]).any()
            assert all(x[i, 0] == cls and x[i, end] == sep and (x[i, end + 1 :] == pad).all() for x in seen)


def test_a_continuation_stands_inside_of_the_special_tokens():
    pipeline = surrounded()
    cls, sep, pad = (pipeline.tokenizer.convert_tokens_to_ids(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    output = pipeline(["abc>", "a>"], max_new_tokens=3)
    assert output.sequences[0, [0, 8]].tolist() == [cls, sep] and output.sequences[0, 1:5].tolist() == [0, 1, 2, 8]
    assert output.sequences[1, [0, 6, 7, 8]].tolist() == [cls, sep, pad, pad]
    assert not torch.isin(output.sequences[0, 5:8], torch.tensor(pipeline.scheduler.never_data)).any()
    assert output.texts[0].startswith("abc>") and len(output.texts[0]) == 7 and len(output.texts[1]) == 5
    added = pipeline(["abc>", "a>"], max_new_tokens=3, return_full_text=False, generator=seeded()).texts
    full = pipeline(["abc>", "a>"], max_new_tokens=3, generator=seeded()).texts
    assert [prompt + new for prompt, new in zip(["abc>", "a>"], added)] == full


# The end of a text


def test_texts_end_with_the_end_token():
    """The denoiser writes a full stop at position 6 and letters behind it."""
    pipeline = write("aaaaaa.eee.f")
    end = ALPHABET.index(".")
    output = pipeline(["abc>", "a>"], max_new_tokens=7, num_return_sequences=2)
    assert output.texts == ["abc>aa", "abc>aa", "a>aaaa", "a>aaaa"]
    assert output.sequences[0].tolist() == [0, 1, 2, 8, 0, 0, end] + [end] * 4
    assert output.sequences[2].tolist() == [0, 8, 0, 0, 0, 0, end] + [end] * 4  # padding too
    new = pipeline(["abc>", "a>"], max_new_tokens=7, return_full_text=False).texts
    assert new == ["aa", "aaaa"]
    assert pipeline("abc>ab", max_new_tokens=2, return_full_text=False).texts == [""]
    # With a token of its own for padding.
    pipeline.tokenizer.pad_token = "h"
    assert pipeline("abc>", max_new_tokens=7).sequences[0, 6:].tolist() == [end] + [7] * 4


def test_an_end_in_the_prompt_is_no_end():
    pipeline = write("aaaaaa.eee.f")
    assert pipeline("a.b.", max_new_tokens=2, return_full_text=False).texts == ["aa"]
    assert pipeline("a.b.", max_new_tokens=4, return_full_text=False).texts == ["aa"]


def test_a_process_that_cannot_end_a_text():
    """Without a continuation rows are whole, as packed texts are; so they are if the end token is never data."""
    scheduler = D3PMScheduler(K, T, mask_token_id=MASK, suppress_tokens=[ALPHABET.index(".")])
    sequences = write("aaaaaabeeecf", scheduler=scheduler)("ab>", max_new_tokens=9).sequences
    assert "".join(ALPHABET[i] for i in sequences[0]) == "ab>aaabeeecf"
    pipeline = write("aa.aa.aa.aaa")
    assert "".join(ALPHABET[i] for i in pipeline().sequences[0]) == "aa.aa.aa.aaa"


# Autoregressive processes


def test_an_autoregressive_network_continues_a_prompt():
    torch.manual_seed(0)
    model = create_text_model(
        "tiny", K, hidden_size=16, intermediate_size=32, is_decoder=True, timestep_conditioning=False
    ).eval()
    model.lm_head.weight.data.mul_(20)
    scheduler = D3PMScheduler(K, 10, transition="autoregressive", mask_token_id=MASK)
    pipeline = quiet(D3PMTextPipeline(model, scheduler, character_tokenizer(ALPHABET)))
    continued = pipeline("abcd", max_new_tokens=6, generator=[seeded(i) for i in range(4)], num_return_sequences=4)
    assert all(text[:4] == "abcd" and len(text) == 10 for text in continued.texts) and len(set(continued.texts)) > 1
    # A prompt that is known, by default to the length of the process, is the same condition.
    known = pipeline("abcd", generator=[seeded(i) for i in range(4)], num_return_sequences=4)
    assert known.texts == continued.texts
    for prompts, new in (("abcd", 5), (["abcd", "abc"], 6), ("abcd", 9)):
        with pytest.raises(
            ValueError, match="the autoregressive process has 10 timesteps, one for each token: make all"
        ):
            pipeline(prompts, max_new_tokens=new)


# Wrong input


def test_wrong_input():
    pipeline, tokens = build(), torch.zeros(2, 4).long()

    def refuses(sentence, *args, **kwargs):
        with pytest.raises(ValueError, match=sentence):
            pipeline(*args, **kwargs)

    refuses(
        "a text has 40 tokens, 8 of them new, and the network has 32 positions: shorten it, or",
        "a" * 32,
        max_new_tokens=8,
    )
    refuses("a text has 33 tokens, and the network has 32 positions: shorten it", "a" * 33)
    refuses("got max_new_tokens and sequence_length: pass one of the two", "a", max_new_tokens=2, sequence_length=8)
    refuses("got max_new_tokens and mask: pass", input_ids=tokens, mask=tokens.bool(), max_new_tokens=2)
    refuses("got max_new_tokens and start_timestep: pass", "a", start_timestep=3, max_new_tokens=2)
    refuses("max_new_tokens is 2, and there is no prompt to continue: pass `prompt`", max_new_tokens=2)
    refuses("max_new_tokens is 0: it must be an integer of at least 1", "a", max_new_tokens=0)
    refuses("return_full_text is False, and no prompt is continued: pass `max_new_tokens`", return_full_text=False)
    refuses("attention_mask says which `input_ids` are padding: pass both", "a", attention_mask=torch.ones(1, 1))
    left = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    refuses(
        "attention_mask has a 0 before a 1 in row 1: put the padding behind", input_ids=tokens, attention_mask=left
    )
    refuses("attention_mask has no 1 in row 1", input_ids=tokens, attention_mask=torch.tensor([[1] * 4, [0] * 4]))
    refuses(
        r"attention_mask has the shape \(2, 3\), and input_ids \(2, 4\)", input_ids=tokens, attention_mask=left[:, :3]
    )
    refuses("attention_mask has numbers other than 0 and 1", input_ids=tokens, attention_mask=2 * left)
    refuses(
        "attention_mask is .*: it must be a tensor with the shape of input_ids", input_ids=tokens, attention_mask=[1]
    )
    twice = {"condition": {"attention_mask": torch.ones(2, 4)}, "attention_mask": left.flip(1)}
    refuses("condition has an attention_mask, and the rows are padded", input_ids=tokens, **twice)
    refuses("a prompt has no tokens: write some, or pass `max_new_tokens`", ["a", ""])
    refuses("got 3 generators for a batch of 2", ["ab", "a"], generator=[seeded()] * 3)
    refuses("got 2 inputs for a batch of 3", ["ab", "a"], batch_size=3)


def test_a_denoiser_without_an_attention_mask():
    class Blind(Denoiser):
        num_classes = K

        def forward(self, x_t, timestep):
            return torch.zeros(*x_t.shape, K)

    pipeline = quiet(D3PMTextPipeline(Blind(torch.nn.Linear(1, 1)), build().scheduler, character_tokenizer(ALPHABET)))
    assert len(pipeline(["ab", "cd"], max_new_tokens=2).texts) == 2
    for network in (pipeline.text_model, torch.compile(pipeline.text_model)):
        pipeline.text_model = network
        with pytest.raises(
            ValueError, match="forward of Blind takes no attention_mask to hide the padding with: give it"
        ):
            pipeline(["abc", "cd"], max_new_tokens=2)


def test_positions_of_networks():
    assert num_positions(build().text_model) == 32
    assert num_positions(build(backbone="t5").text_model) is None
    assert len(build(backbone="t5")("a" * 33, max_new_tokens=3).texts[0]) == 36
