# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The judge of samples: its likelihood and the entropies, against numbers computed by hand in float64."""

import math
from collections import Counter

import pytest
import torch

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, create_text_model
from d3pm_hf.evaluation import judge_samples, ngram_entropy, token_entropy


K, N, B = 6, 7, 5
MASK = K - 1


@pytest.fixture(scope="module")
def judge():
    torch.manual_seed(0)
    network = create_text_model("tiny", K, is_decoder=True, timestep_conditioning=False).double()
    for weights in network.parameters():  # far from uniform predictions
        weights.data.mul_(2)
    return D3PMTextPipeline(network, D3PMScheduler(K, N, transition="autoregressive"), sequence_length=N)


@pytest.fixture(scope="module")
def sequences():
    return torch.randint(0, MASK, (B, N), generator=torch.Generator().manual_seed(1))


def test_the_likelihood_is_that_of_one_token_after_the_other(judge, sequences):
    bits = []
    for row in sequences:
        x, total = torch.full((1, N), MASK), 0.0
        for i, token in enumerate(row.tolist()):
            logits = judge.denoiser(x, torch.tensor([N - 1 - i]))[0, i].double()
            logits[MASK] = -math.inf
            total -= logits.log_softmax(-1)[token].item() / math.log(2)
            x[0, i] = token
        bits.append(total / N)
    mean = sum(bits) / B
    error = math.sqrt(sum((value - mean) ** 2 for value in bits) / (B - 1) / B)
    for batch_size in (2, 64):
        judged = judge_samples(judge, sequences, batch_size=batch_size)
        assert judged.nll == pytest.approx(mean, abs=1e-6)
        assert judged.nll_standard_error == pytest.approx(error, rel=1e-5)
        assert (judged.num_samples, judged.num_tokens, judged.ngram_size) == (B, B * N, 3)


def test_the_entropies_are_those_of_counts(judge, sequences):
    def entropy(items):
        return -sum(n / len(items) * math.log2(n / len(items)) for n in Counter(items).values())

    rows = sequences.tolist()
    within = [entropy(row) for row in rows]
    judged = judge_samples(judge, sequences, ngram_size=2)
    assert judged.entropy == pytest.approx(sum(within) / B, abs=1e-12)
    assert judged.entropy == pytest.approx(token_entropy(sequences), abs=1e-12)
    variance = sum((value - judged.entropy) ** 2 for value in within) / (B - 1)
    assert judged.entropy_standard_error == pytest.approx(math.sqrt(variance / B), abs=1e-12)
    for n in (1, 2, 3, N):
        pairs = [[tuple(row[i : i + n]) for i in range(N - n + 1)] for row in rows]
        everything = [pair for row in pairs for pair in row]
        counts = Counter(everything)
        means = [sum(-math.log2(counts[pair] / len(everything)) for pair in row) / len(row) for row in pairs]
        value, error = ngram_entropy(sequences, n)
        assert value == pytest.approx(entropy(everything), abs=1e-12)
        variance = sum((mean - value) ** 2 for mean in means) / (B - 1)
        assert error == pytest.approx(math.sqrt(variance / B), abs=1e-12)
        if n == 2:
            assert (judged.ngram_entropy, judged.ngram_entropy_standard_error) == (value, error)


def test_the_standard_error_of_ngrams_is_the_spread_between_sets():
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.6, 0.25, 0.1, 0.05])
    sets = [torch.multinomial(probs, 200 * 8, True, generator=generator).reshape(200, 8) for _ in range(300)]
    values, errors = torch.tensor([ngram_entropy(each, 2) for each in sets]).T
    assert values.std().item() == pytest.approx(errors.mean().item(), rel=0.15)


def test_what_the_entropies_see():
    """Equal samples lose n-gram entropy alone; tokens in another order lose neither within a sample."""
    row = torch.arange(8)
    equal, diverse = row.repeat(8, 1), torch.stack([row.roll(i) + 8 * i for i in range(8)])
    assert token_entropy(equal) == token_entropy(diverse) == pytest.approx(3)
    assert ngram_entropy(equal, 2)[0] == pytest.approx(math.log2(7))
    assert ngram_entropy(diverse, 2)[0] == pytest.approx(math.log2(56))


def test_one_sample_has_no_standard_error(judge, sequences):
    judged = judge_samples(judge, sequences[:1])
    errors = (judged.nll_standard_error, judged.entropy_standard_error, judged.ngram_entropy_standard_error)
    assert all(map(math.isnan, errors)) and judged.nll > 0


def test_samples_that_cannot_be_judged(judge, sequences):
    with pytest.raises(
        ValueError, match="sequences hold token 5, the mask of the judge: pass samples that are finished"
    ):
        judge_samples(judge, sequences.clone().fill_(MASK))
    with pytest.raises(ValueError, match="sequences have 4 tokens, and the judge 7"):
        judge_samples(judge, sequences[:, :4])
    with pytest.raises(ValueError, match="token 6 .* vocabulary"):
        judge_samples(judge, sequences + 2 * (sequences == 4))
    with pytest.raises(ValueError, match="ngram_size is 8: it must be an integer in 1 .. 7"):
        judge_samples(judge, sequences, ngram_size=8)
    absorbing = D3PMTextPipeline(create_text_model("tiny", K), D3PMScheduler(K, N), sequence_length=N)
    bidirectional = D3PMTextPipeline(create_text_model("tiny", K), judge.scheduler, sequence_length=N)
    for other in (absorbing, bidirectional):
        with pytest.raises(ValueError, match="must have an autoregressive process and a causal network"):
            judge_samples(other, sequences)
