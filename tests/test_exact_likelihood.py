# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Exact likelihoods by order: against the sampler itself, led to every sequence of a toy, and sums over all sequences."""

import itertools
import math
import sys

import pytest
import reference as ref
import torch
import toy

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Denoiser,
    bound_results,
    character_tokenizer,
    create_text_model,
    create_unet,
    evaluate_bound,
    evaluate_documents,
    evaluate_likelihood,
    log_likelihood,
)
from d3pm_hf.likelihood import block_timesteps
from d3pm_hf.likelihood.orders import MEASURES, ORDERS
from d3pm_hf.samplers.confidence import masked_shares, merge_ties, sort_positions


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
K, N, T, MASK = 4, 4, 12, 3
QUIET = {"progress_bar": False}


class Table(Denoiser):
    """A network of random logits for each state of all positions that are attended to, each timestep and each position."""

    def __init__(self, reads_timestep=True, num_classes=K, num_timesteps=T, seed=0):
        super().__init__()
        shape = (num_timesteps if reads_timestep else 1, num_classes**N, N, num_classes)
        table = 1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.num_classes, self.reads_timestep, self.num_calls = num_classes, reads_timestep, 0

    def forward(self, x_t, timestep, attention_mask=None):
        self.num_calls += 1
        x_t = x_t if attention_mask is None else torch.where(attention_mask.bool(), x_t, 0)
        timestep = timestep * torch.ones(len(x_t), dtype=torch.long)
        return self.table[timestep if self.reads_timestep else 0 * timestep, toy.indices(x_t, self.num_classes)]


def create_pipeline(reads_timestep=True, network=None, **options):
    options = {"num_classes": K, "num_train_timesteps": T, **options}
    network = (
        Table(reads_timestep, options["num_classes"], options["num_train_timesteps"]) if network is None else network
    )
    return D3PMTextPipeline(network, D3PMScheduler(**options), sequence_length=N)


def from_the_right(logits, is_hidden):
    return torch.arange(logits.shape[1]).float().expand(is_hidden.shape)


# Which elements are given, and which are padding: a row of each batch.
LAYOUTS = {
    "all": ([0, 0, 0, 0], [1, 1, 1, 1]),
    "prompt": ([1, 1, 0, 0], [1, 1, 1, 1]),
    "infilling": ([0, 1, 0, 0], [1, 1, 1, 1]),
    "padding": ([0, 0, 0, 1], [1, 1, 1, 0]),
    "prompt and padding": ([1, 0, 0, 1], [1, 1, 1, 0]),
}


def create_batch(layout, tokens=(0, 1, 2)):
    """All sequences of a layout: given elements are token 1, and padding is token 0."""
    is_given, attention_mask = (torch.tensor(values) for values in LAYOUTS[layout])
    free = [(int(1 & attended),) if given else tokens for given, attended in zip(is_given, attention_mask)]
    x_0 = torch.tensor(list(itertools.product(*free)))
    batch = {"x_0": x_0, "loss_mask": ~is_given.bool().expand_as(x_0)}
    return batch if attention_mask.all() else {**batch, "attention_mask": attention_mask.expand_as(x_0)}


def probabilities(pipeline, batch, order, **options):
    return (-evaluate_likelihood(pipeline, batch, order=order, **options, **QUIET).nats_per_example).exp()


class Recorder(Denoiser):
    """A network that keeps its inputs and its outputs."""

    def __init__(self, network):
        super().__init__()
        self.inner, self.num_classes, self.inputs, self.outputs = network, network.num_classes, [], []

    def forward(self, x_t, timestep, **condition):
        self.inputs.append(x_t)
        self.outputs.append(self.inner(x_t, timestep, **condition))
        return self.outputs[-1]


def sampler_probabilities(pipeline, batch, measure, monkeypatch, **options):
    """Probabilities of all sequences of a batch under the sampler itself: each of its draws is made to be that of a sequence.

    The sampler chooses the timesteps, the number of positions and the positions; softmax of what the network said of the
    positions that a call revealed is the probability of the draw.
    """
    x_0, is_given = batch["x_0"], ~batch["loss_mask"]
    recorder = Recorder(pipeline.denoiser)
    recorded = D3PMTextPipeline(recorder, pipeline.scheduler, sequence_length=N)
    recorded.set_progress_bar_config(disable=True)

    def draw(logits, u):  # of all masks
        return x_0[recorder.inputs[-1] == pipeline.scheduler.mask_token_id]

    monkeypatch.setattr(sys.modules[masked_shares.__module__], "categorical", draw)
    mask = batch.get("attention_mask")
    drawn = recorded.sample_states(
        len(x_0),
        (N,),
        given=x_0,
        is_given=is_given,
        sampler="confidence",
        sampler_kwargs={"measure": measure},
        condition=None if mask is None else {"attention_mask": mask},
        **options,
    )
    assert torch.equal(drawn, x_0)
    states = [*recorder.inputs, x_0]
    log_p = torch.zeros(len(x_0), dtype=torch.float64)
    for before, after, output in zip(states, states[1:], recorder.outputs):
        excluded = torch.tensor(pipeline.scheduler.never_data)
        probs = output.index_fill(-1, excluded, -torch.inf).softmax(-1)
        log_p += torch.where(before != after, probs.gather(-1, x_0[..., None]).squeeze(-1).log(), 0).sum(1)
    return log_p.exp(), len(recorder.inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_length", [1, 2, 3, N])
@pytest.mark.parametrize("order", MEASURES)
def test_the_likelihood_is_that_of_the_sampler(order, block_length, layout, monkeypatch):
    pipeline, batch = create_pipeline(), create_batch(layout)
    timesteps = block_timesteps(pipeline.scheduler, int(batch["loss_mask"][0].sum()), block_length)
    expected, num_calls = sampler_probabilities(pipeline, batch, MEASURES[order], monkeypatch, timesteps=timesteps)
    got = evaluate_likelihood(pipeline, batch, order=order, block_length=block_length, **QUIET)
    torch.testing.assert_close((-got.nats_per_example).exp(), expected, rtol=1e-10, atol=0)
    assert got.num_calls == num_calls and expected.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"x0_posterior": "denoising"}, {"beta_schedule": "linear"}], ids=str)
@pytest.mark.parametrize("reads_timestep", [True, False])
@pytest.mark.parametrize("steps", [None, 1, 2, 3, 5])
def test_a_number_of_steps_is_that_of_the_sampler(steps, reads_timestep, options, monkeypatch):
    """Without `num_inference_steps`, the sampler with all timesteps of a process that has enough reveals one position per call."""
    pipeline, batch = create_pipeline(reads_timestep, **options), create_batch("infilling")
    expected, num_calls = sampler_probabilities(pipeline, batch, "margin", monkeypatch, num_inference_steps=steps)
    got = probabilities(pipeline, batch, "margin", num_inference_steps=steps)
    if steps is not None or num_calls == 3:
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
    assert num_calls == 3 or steps is not None or options.get("beta_schedule") == "linear"


def test_draws_of_the_sampler():
    pipeline, batch = create_pipeline(False), create_batch("all")
    pipeline.set_progress_bar_config(disable=True)
    timesteps = block_timesteps(pipeline.scheduler, N, 2)
    options = {"sampler": "confidence", "timesteps": timesteps, "generator": torch.Generator().manual_seed(0)}
    drawn = pipeline.sample_states(20_000, (N,), **options)
    law = torch.zeros(K**N, dtype=torch.float64)
    law[toy.indices(batch["x_0"], K)] = probabilities(pipeline, batch, "confidence", block_length=2)
    assert ref.fit(toy.indices(drawn, K)[:, None], law[None]) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [*(name for name in ORDERS if name != "random"), from_the_right])
def test_probabilities_add_up_to_one(order, layout):
    for reads_timestep, options in ((True, {}), (False, {}), (True, {"num_train_timesteps": 2})):
        pipeline = create_pipeline(reads_timestep, **options)
        for block_length in (1, 2, N):
            total = probabilities(pipeline, create_batch(layout), order, block_length=block_length).sum()
            assert total.item() == pytest.approx(1, abs=1e-6)


def test_rows_of_all_layouts_in_one_batch():
    """Each row has its own number of calls and its own timesteps, and the likelihood that it has alone."""
    pipeline, batches = create_pipeline(), [create_batch(layout) for layout in LAYOUTS]
    ones = [{"attention_mask": torch.ones_like(batch["x_0"]), **batch} for batch in batches]
    mixed = {name: torch.cat([batch[name] for batch in ones]) for name in ones[0]}
    shuffled = torch.randperm(len(mixed["x_0"]), generator=torch.Generator().manual_seed(0))
    for order in (*ORDERS, from_the_right):
        before = pipeline.text_model.num_calls
        got = evaluate_likelihood(
            pipeline, {name: value[shuffled] for name, value in mixed.items()}, order=order, **QUIET
        )
        assert pipeline.text_model.num_calls == before + N + 1  # one to see that the network gives the same again
        alone = torch.cat(
            [evaluate_likelihood(pipeline, batch, order=order, **QUIET).nats_per_example for batch in batches]
        )
        torch.testing.assert_close(got.nats_per_example, alone[shuffled], rtol=1e-12, atol=0)
        assert got.num_known == sum(int((~b["loss_mask"] & b["attention_mask"].bool()).sum()) for b in ones)
        assert torch.equal(got.elements_per_example, mixed["loss_mask"][shuffled].sum(1))


def test_left_to_right_is_the_product_of_conditionals():
    pipeline, batch = create_pipeline(), create_batch("all")
    log_p, x_0 = torch.zeros(len(batch["x_0"]), dtype=torch.float64), batch["x_0"]
    for i in range(N):
        x_t = torch.where(torch.arange(N) < i, x_0, MASK)
        t = torch.tensor((N - i) * T // N - 1)  # the mutual information of T = 12 falls evenly
        probs = pipeline.denoiser(x_t, t)[:, i, :MASK].softmax(-1)
        log_p += probs.gather(1, x_0[:, i : i + 1]).squeeze(1).log()
    torch.testing.assert_close(probabilities(pipeline, batch, "left_to_right"), log_p.exp(), rtol=1e-10, atol=0)


def test_timesteps_of_blocks():
    for beta_schedule, num_timesteps in itertools.product(("mutual_information", "linear", "cosine"), (7, 100)):
        scheduler = D3PMScheduler(K, num_timesteps, beta_schedule=beta_schedule)
        all_timesteps = list(range(num_timesteps - 1, -1, -1))
        shares = masked_shares(scheduler, all_timesteps)
        masked = [scheduler.transition.matrix(0, t + 1)[0, MASK].item() for t in (*all_timesteps, -1)]
        assert [*shares.values()] == pytest.approx([share / masked[0] for share in masked], abs=1e-6)
        for num_hidden, block_length in ((1, 1), (5, 1), (5, 2), (60, 7)):
            expected = [
                min(t for t in all_timesteps if math.floor(num_hidden * shares[t] + 1e-6) >= left)
                for left in range(num_hidden, 0, -block_length)
            ]
            assert block_timesteps(scheduler, num_hidden, block_length) == expected


class Constant(Denoiser):
    """The same logits `[K]` everywhere."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.num_classes = torch.nn.Parameter(torch.tensor(logits)), len(logits)

    def forward(self, x_t, timestep):
        return self.logits.expand(*x_t.shape, -1)


def hidden_sets(order: str) -> list[set[int]]:
    """The positions that are hidden at each call, if the network knows equally much of all of them."""
    revealed = [0, 1, 2, 3] if order == "left_to_right" else [0, 2, 1, 3]
    return [set(revealed[i:]) for i in range(N + 1)]


@pytest.mark.parametrize("order", MEASURES)
def test_ties_go_to_positions_that_are_far_apart(order):

    class Position(Constant):
        def forward(self, x_t, timestep):
            seen.append({i for i in range(N) if x_t[0, i] == MASK})
            return super().forward(x_t, timestep)

    seen = []
    pipeline = create_pipeline(network=Position([0.0, 1.0, 2.0, 9.0]))
    evaluate_likelihood(pipeline, torch.tensor([[0, 1, 2, 0]]), order=order, **QUIET)
    assert seen[1:] == hidden_sets(order)[:-1]


class Rounded(Constant):
    """Equal logits at all positions but for rounding, which depends on the batch as it does in matrix products."""

    def forward(self, x_t, timestep, attention_mask=None):
        noise = torch.randn(*x_t.shape, self.num_classes, generator=torch.Generator().manual_seed(x_t.numel()))
        return super().forward(x_t, timestep) + 1e-6 * noise


@pytest.mark.parametrize("order", MEASURES)
def test_rounding_chooses_no_order(order):
    pipeline, batch = create_pipeline(network=Rounded([0.0, 1.0, 2.0, 9.0])), create_batch("all")
    seen = Recorder(pipeline.denoiser)
    together = probabilities(D3PMTextPipeline(seen, pipeline.scheduler, sequence_length=N), batch, order)
    assert all(set((row == MASK).nonzero().flatten().tolist()) in hidden_sets(order) for x in seen.inputs for row in x)
    alone = [probabilities(pipeline, {k: v[i : i + 1] for k, v in batch.items()}, order) for i in range(9)]
    torch.testing.assert_close(together[:9], torch.cat(alone), rtol=1e-4, atol=0)


@pytest.mark.parametrize("measure", MEASURES.values())
def test_rounding_does_not_lead_the_sampler(measure):
    seen = Recorder(Rounded([0.0, 1.0, 2.0, 9.0]))
    pipeline = create_pipeline(network=seen)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.sample_states(30, (N,), sampler="confidence", sampler_kwargs={"measure": measure})
    order = next(name for name, value in MEASURES.items() if value == measure)
    assert all(set((row == MASK).nonzero().flatten().tolist()) in hidden_sets(order) for x in seen.inputs for row in x)


def test_ties_are_those_of_hidden_positions():
    scores = torch.tensor([[0.0, -1.0, -1.00005, -1.00015, -3.0], [-1.0, -2.0, -9.0, -4.0, torch.finfo().min]])
    hidden = torch.tensor([[False, True, True, True, True], [False] * 4 + [True]])
    assert merge_ties(scores, hidden)[0, 1:3].tolist() == [0, 0]
    assert merge_ties(scores, hidden)[0, 3:].tolist() == pytest.approx([-1e-4, -2], abs=1.1e-4)
    assert merge_ties(scores, hidden).isfinite().all() and merge_ties(scores, hidden)[1, 4] == 0
    assert merge_ties(scores, ~hidden)[1, 0] == 0 > merge_ties(scores, ~hidden)[1, 1]


def test_equal_positions_are_spread():
    assert sort_positions(torch.zeros(1, 8)).tolist() == [[0, 4, 2, 6, 1, 5, 3, 7]]
    assert sort_positions(torch.zeros(1, 6)).tolist() == [[0, 4, 2, 1, 5, 3]]  # the longer order without 6 and 7
    assert sort_positions(torch.tensor([[0.0, 2, 1, 2, 0, 1]])).tolist() == [[1, 3, 2, 5, 0, 4]]
    assert sort_positions(torch.zeros(2, 1)).tolist() == [[0], [0]]


def test_excluded_states_have_infinite_nats():
    pipeline = create_pipeline(network=Constant([0.0, 0.0, -math.inf, 50.0]))
    got = evaluate_likelihood(pipeline, torch.tensor([[0, 1, 0, 1], [0, 2, 0, 0]]), order="entropy", **QUIET)
    assert got.nats_per_example.tolist() == pytest.approx([N * math.log(2), math.inf])  # the mask is never data
    assert got.total == math.inf and "infinite" in str(got) and math.isnan(got.standard_error)


def test_suppressed_tokens_are_given_and_never_predicted():
    pipeline = create_pipeline(num_classes=5, suppress_tokens=[3])
    x_0 = torch.tensor(list(itertools.product((0, 1, 2), (3,), (0, 1, 2), (0, 1, 2))))
    got = evaluate_likelihood(pipeline, x_0, order="margin", **QUIET)
    assert got.num_known == len(x_0) and (-got.nats_per_example).exp().sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("order", MEASURES)
def test_many_ties_in_bfloat16(order):
    """Logits of two values: nearly all scores tie, in every batch alike."""
    network = Table(reads_timestep=False)
    network.table.data = network.table.data.sign().bfloat16()
    pipeline, batches = create_pipeline(network=network), [create_batch(layout) for layout in ("all", "padding")]
    for batch in batches:
        assert probabilities(pipeline, batch, order).sum().item() == pytest.approx(1, abs=1e-6)
        alone = torch.cat(
            [probabilities(pipeline, {k: v[i : i + 1] for k, v in batch.items()}, order) for i in range(9)]
        )
        torch.testing.assert_close(probabilities(pipeline, batch, order)[:9], alone, rtol=1e-12, atol=0)


def test_elements_with_vocabularies_of_their_own():
    sizes = [2, 3, 2, 3]
    pipeline = create_pipeline(element_classes=sizes)
    x_0 = torch.tensor(list(itertools.product(*map(range, sizes))))
    for order in MEASURES:
        assert probabilities(pipeline, x_0, order).sum().item() == pytest.approx(1, abs=1e-6)


def test_images():
    unet = create_unet("tiny", 3, 2, in_channels=1, num_class_labels=2)
    pipeline = D3PMImagePipeline(unet, D3PMScheduler(3, 8))
    x_0 = torch.tensor(list(itertools.product((0, 1), repeat=4))).reshape(-1, 1, 2, 2)
    for order in ("left_to_right", "margin"):
        labels = torch.arange(2).repeat_interleave(16)
        batch = {"x_0": x_0.repeat(2, 1, 1, 1), "condition": {"class_labels": labels}}
        got = evaluate_likelihood(pipeline, batch, order=order, **QUIET)
        sums = (-got.nats_per_example).exp().view(2, 16).sum(1)
        assert sums.tolist() == pytest.approx([1, 1], abs=1e-5) and "given class_labels" in got.protocol


# Random orders


def test_random_orders_average_to_the_bound():
    pipeline, x_0 = create_pipeline(False), torch.tensor([[0, 2, 1, 1]])
    expected = 0.0
    for order in itertools.permutations(range(N)):
        scores = -torch.tensor([order.index(i) for i in range(N)]).float()
        one = evaluate_likelihood(pipeline, x_0, order=lambda logits, is_hidden: scores[None], **QUIET)
        expected += one.nats_per_example.item() / math.factorial(N)
    options = {"continuous_time": True, "num_eval_timesteps": 20}
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, [x_0.expand(2000, -1)], **options, **QUIET)
    assert abs(bound.total * N - expected) < 4 * bound.standard_error * N < 0.2
    drawn = torch.cat(
        [
            evaluate_likelihood(pipeline, x_0, order="random", seed=seed, **QUIET).nats_per_example
            for seed in range(300)
        ]
    )
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / 300**0.5
    assert len(set(drawn.tolist())) == math.factorial(N)


def test_a_random_order_says_what_it_is():
    pipeline = create_pipeline()
    drawn = evaluate_likelihood(pipeline, create_batch("all"), order="random", seed=3, **QUIET)
    assert not drawn.is_exact and "exact" not in str(drawn)
    assert drawn.protocol.startswith(
        "estimate of the bound of infinitely many steps, by one random order per example, seed 3;"
    )
    exact = evaluate_likelihood(pipeline, create_batch("prompt"), order="margin", block_length=2, **QUIET)
    assert exact.is_exact and "bound" not in str(exact)
    assert exact.protocol == (
        "exact, of the sampler that reveals 2 positions per call in the order 'margin'; 9 examples, 18 elements scored given 18 "
        "known ones, 1 calls"
    )
    nats, elements = exact.nats_per_example, exact.elements_per_example
    assert exact.total == pytest.approx((nats.sum() / elements.sum()).item())
    assert exact.standard_error == pytest.approx((nats / 2).std().item() / 3)


# Texts


@pytest.fixture(scope="module")
def texts():
    torch.manual_seed(0)
    network = create_text_model("tiny", 28)
    network.train()  # with dropout
    return D3PMTextPipeline(network, D3PMScheduler(28, 100), character_tokenizer(), sequence_length=16)


def test_texts_of_unequal_length(texts):
    data = ["some words", "x", "a longer text", "words some"]
    for order in ("entropy", "random"):
        together = evaluate_likelihood(texts, data, order=order, batch_size=3, **QUIET)
        alone = [evaluate_likelihood(texts, one, order=order, **QUIET).nats_per_example for one in data]
        torch.testing.assert_close(together.nats_per_example, torch.cat(alone), rtol=1e-5, atol=1e-5)
        assert together.elements_per_example.tolist() == [len(text) for text in data]
    assert texts.text_model.training


def test_continuations(texts):
    context, continuations = "the quick ", ["fox", "dog runs", "a"]
    got = log_likelihood(texts, context, continuations, order="margin")
    for number, one in zip(got, continuations):
        tokens = texts.encode(context + one)
        scored = torch.arange(tokens.shape[1])[None] >= len(context)
        other = evaluate_likelihood(texts, [(tokens, scored)], order="margin", **QUIET)
        assert number.item() == pytest.approx(-other.nats_per_example.item(), rel=1e-5)
    tokens = texts.encode(context)[0]
    for contexts in (tokens, tokens[None], [tokens] * 3, [tokens.tolist()] * 3, [context] * 3):
        again = log_likelihood(texts, contexts, continuations, order="margin")
        torch.testing.assert_close(again, got, rtol=1e-12, atol=0)
    assert log_likelihood(texts, "", "fox").shape == (1,)


def test_all_continuations_add_up_to_one(texts):
    tokens = torch.cartesian_prod(torch.arange(27), torch.arange(27))
    for order in ("left_to_right", "confidence"):
        assert log_likelihood(texts, "ab", tokens, order=order).exp().sum().item() == pytest.approx(1, abs=1e-5)


# Documents


def test_the_bound_of_a_document_does_not_depend_on_its_place(texts):
    documents = ["some words", "x", "a longer text", "words some", "twelve chars"]
    options = {"num_estimates": 3, "num_eval_timesteps": 4}
    together = evaluate_documents(texts, documents, batch_size=2, **options, **QUIET)
    assert together.num_elements.tolist() == [len(text) for text in documents]
    for numbers in ([4, 0, 2], [1], [3, 3]):
        some = evaluate_documents(texts, [documents[i] for i in numbers], **options, **QUIET)
        torch.testing.assert_close(some.nats, together.nats[numbers], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(some.standard_errors, together.standard_errors[numbers], rtol=1e-3, atol=1e-4)
    other = evaluate_documents(texts, documents, seed=1, **options, **QUIET)
    is_other = ~torch.isclose(other.nats, together.nats, rtol=1e-5, atol=1e-5)
    assert is_other.tolist() == [True, False, True, True, True]  # a single token has one order
    assert together.standard_errors[1] < 1e-6 and len(set(together.nats.tolist())) == len(documents)


@pytest.mark.parametrize("num_terms, reads_timestep", [(2, True), (3, False), (N + 1, True)])
def test_the_error_of_a_document(num_terms, reads_timestep):
    """The mean of the estimates is the bound, and lies as far from it as the standard errors say."""
    pipeline, documents = create_pipeline(reads_timestep), create_batch("all")["x_0"]
    bounds = evaluate_documents(pipeline, documents, num_estimates=40, num_eval_timesteps=num_terms, **QUIET)
    expected = 0.0
    for order in itertools.permutations(range(N)):
        scores = -torch.tensor([order.index(i) for i in range(N)]).float()
        one = evaluate_likelihood(
            pipeline, documents, order=lambda logits, is_hidden: scores.expand(is_hidden.shape), **QUIET
        )
        expected += one.nats_per_example / math.factorial(N)
    z = (bounds.nats - expected) / bounds.standard_errors
    assert abs(z.mean()) < 4 / len(z) ** 0.5 and 0.7 < z.std() < 1.4
    assert torch.allclose(bounds.bits_per_token, bounds.nats / N / math.log(2))
    assert bounds.protocol.startswith(
        f"40 estimates per document, infinitely many steps, {num_terms} stratified terms"
    )


def test_documents_of_a_number_of_steps_and_of_other_processes():
    documents = create_batch("all")["x_0"][:5]
    uniform = create_pipeline(transition="uniform", beta_schedule="cosine")
    for pipeline, steps in ((create_pipeline(), 3), (uniform, None), (uniform, 5)):
        options = {"num_inference_steps": steps, "num_eval_timesteps": 3}
        bounds = evaluate_documents(pipeline, documents, num_estimates=50, seed=2, **options, **QUIET)
        options = {"num_inference_steps": steps, "seed": 1}
        rows = documents.repeat_interleave(400, 0)
        whole = evaluate_bound(pipeline.scheduler, pipeline.denoiser, [rows], **options, **QUIET)
        expected = whole.nats_per_example.view(5, -1)
        error = (bounds.standard_errors**2 + expected.var(1) / 400).sqrt()
        assert ((bounds.nats - expected.mean(1)).abs() < 4 * error).all()
        assert f"{steps or T} of {T} steps" in bounds.protocol


def test_seeds_by_content(texts):
    x_0 = torch.randint(0, 27, (3, 8), generator=torch.Generator().manual_seed(0))
    options = {"num_eval_timesteps": 4, "seed_by": "content", **QUIET}
    whole = evaluate_bound(texts.scheduler, texts.denoiser, x_0, **options).nats_per_example
    turned = evaluate_bound(texts.scheduler, texts.denoiser, [x_0.flip(0)], **options).nats_per_example
    torch.testing.assert_close(turned.flip(0), whole, rtol=1e-5, atol=1e-5)
    batch = {"x_0": x_0, "loss_mask": torch.arange(8).expand(3, -1) > 0}
    given = evaluate_bound(texts.scheduler, texts.denoiser, batch, **options).nats_per_example
    assert (given != whole).all()


# Bad input


def test_an_order_that_looks_at_what_is_not_revealed():
    """The data are known to a function that closes over them; it is asked about rows at other places."""
    pipeline, x_0 = create_pipeline(), create_batch("all")["x_0"]

    def cheat(logits, is_hidden):
        return logits.log_softmax(-1).gather(-1, x_0[: len(logits), :, None]).squeeze(-1)

    def whole(logits, is_hidden):
        return logits.log_softmax(-1).amax(-1) * (x_0 == 0)

    def noise(logits, is_hidden):
        return torch.rand(is_hidden.shape)

    def batchwise(logits, is_hidden):
        return logits.amax(-1) - logits.amax(-1).mean(0)

    for order in (cheat, whole, noise, batchwise):
        with pytest.raises(ValueError, match="^order .*must not look at data that are not revealed"):
            evaluate_likelihood(pipeline, x_0, order=order, **QUIET)
    for order, words in (
        (lambda a, b: a, "order returned a Tensor"),
        (lambda a, b: a[..., 0] * math.nan, "order returned NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate_likelihood(pipeline, x_0, order=order, **QUIET)


def test_processes_without_an_order():
    x_0 = torch.zeros(1, N, dtype=torch.long)
    for options in ({"transition": "uniform"}, {"mask_in_data": True}, {"prediction_type": "previous"}):
        pipeline = create_pipeline(beta_schedule="cosine", **options)
        with pytest.raises(ValueError, match="^the process is .*, which has no order: .*use `evaluate_bound`"):
            evaluate_likelihood(pipeline, x_0, order="margin", **QUIET)
    pipeline = create_pipeline(num_train_timesteps=N, transition="autoregressive")
    with pytest.raises(ValueError, match="whose only order is 'left_to_right': .*is_causal=True"):
        evaluate_likelihood(pipeline, x_0, **QUIET)
    pipeline = create_pipeline(transition="uniform", beta_schedule="cosine")
    with pytest.raises(ValueError, match="the process is 'uniform', which has no order: .*use `evaluate_bound`"):
        log_likelihood(pipeline, x_0[:, :2], x_0[:, 2:])
    probs = {"prior": "fitted", "unigram_probs": torch.tensor([0.5, 0.3, 0.2, 0.0]), "trained_betas": [0.1] * T}
    with pytest.raises(ValueError, match="prior is 'fitted', .* needs prior='stationary'"):
        evaluate_likelihood(create_pipeline(**probs), x_0, **QUIET)


def test_a_network_that_differs_from_call_to_call():
    class Noisy(Constant):
        def forward(self, x_t, timestep):
            return super().forward(x_t, timestep) + torch.rand(()) * torch.arange(K)

    with pytest.raises(ValueError, match="two calls of `model` with the same input differ"):
        evaluate_likelihood(create_pipeline(network=Noisy([0.0] * K)), torch.zeros(1, N, dtype=torch.long), **QUIET)


def test_texts_that_are_too_long(texts):
    positions = texts.text_model.config.max_position_embeddings
    long = "a" * positions
    with pytest.raises(
        ValueError, match=f"a context of {positions} tokens and 1 after it, .*: cut the start of the context"
    ):
        log_likelihood(texts, long, "b")
    with pytest.raises(ValueError, match=f"a text of {positions + 1} tokens, .*: cut the text"):
        evaluate_likelihood(texts, [long + "b"], **QUIET)
    with pytest.raises(ValueError, match=f"a text has {positions + 1} tokens, .*: cut the text"):
        evaluate_likelihood(texts, torch.zeros(1, positions + 1, dtype=torch.long), **QUIET)


def test_wrong_arguments(texts):
    x_0 = torch.zeros(2, N, dtype=torch.long)
    for arguments, words in (
        ({"order": "right_to_left"}, "order is 'right_to_left': it must be one of left_to_right, confidence"),
        ({"block_length": 0}, "block_length is 0"),
        ({"block_length": 2, "num_inference_steps": 3}, "pass one of the two"),
        ({"num_inference_steps": T + 1}, "num_inference_steps is 13"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate_likelihood(create_pipeline(), x_0, **arguments, **QUIET)
    with pytest.raises(ValueError, match="pipeline is 'text8': it must be a `D3PMPipeline`"):
        evaluate_likelihood("text8", x_0)
    with pytest.raises(ValueError, match="order is 'random', whose average over orders is a bound"):
        log_likelihood(texts, "a", "b", order="random")
    with pytest.raises(ValueError, match="got 2 contexts and 3 continuations"):
        log_likelihood(texts, ["a", "b"], ["a", "b", "c"])
    with pytest.raises(ValueError, match="continuation 1 has no tokens"):
        log_likelihood(texts, "a", ["b", ""])
    with pytest.raises(ValueError, match="continuation number 0 holds the mask token 27, which stands for a gap"):
        log_likelihood(texts, "a", "b[MASK]")
    with pytest.raises(ValueError, match="documents number 1 has no tokens"):
        evaluate_documents(texts, ["a", ""])
    for measure in (evaluate_likelihood, evaluate_documents, lambda *data: log_likelihood(*data, "b")):
        with pytest.raises(ValueError, match="characters that the tokenizer does not know .'é'"):
            measure(texts, ["a", "café"])
    with pytest.raises(ValueError, match="the likelihood is NaN"):
        evaluate_likelihood(create_pipeline(network=Constant([0.0, math.nan, 0.0, 0.0])), x_0, **QUIET)


def test_a_likelihood_is_no_bound_on_a_card():
    pipeline = D3PMTextPipeline(
        create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=8
    )
    result = evaluate_likelihood(pipeline, ["some words"], order="margin", progress_bar=False)
    with pytest.raises(ValueError, match="bound is a `Likelihood` of the order 'margin', which is no bound"):
        bound_results(result, "text8", task="text-generation")
