# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Statistics of text samples: entropies, words, and how likely a judge finds them."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from scipy.stats import entropy

from ..likelihood import evaluate_bound
from ..likelihood.causal import scores_in_one_pass
from ..pipelines import D3PMPipeline
from ..utils.checks import check_int, check_type, describe


def token_entropy(sequences: torch.Tensor) -> float:
    """Entropy of the tokens within a sample in bits, averaged over samples `[B, N]`. It is low for repetitive samples."""
    return float(token_entropies(sequences).mean())


def token_entropies(sequences: torch.Tensor) -> torch.Tensor:
    """Entropy of the tokens within each sample, in bits, `[B]` in float64.

    H_b = -sum_k f_bk log2 f_bk,   f_bk the share of token k among the N tokens of sample b
    """
    check_sequences("sequences", sequences)
    counts = [torch.unique(row, return_counts=True)[1].numpy() for row in sequences.cpu()]
    return torch.tensor([entropy(each, base=2) for each in counts], dtype=torch.float64)


def ngram_entropy(sequences: torch.Tensor, ngram_size: int = 3) -> tuple[float, float]:
    """Entropy of the n-grams of all samples `[B, N]` together in bits, and its standard error.

        H = -sum_g f_g log2 f_g,   f_g the share of n-gram g among the B (N - n + 1) n-grams of all samples

    It is low if samples repeat one another, which [`token_entropy`] does not see, and it sees the order of tokens within an
    n-gram. Rare n-grams are missing from few samples, so that it grows with B: compare the same number of samples. The
    standard error is that of the mean of -log2 f over the n-grams of a sample, the first order in f; it is NaN for one sample.

    Args:
        sequences (`torch.LongTensor` of shape `[B, N]`): Samples.
        ngram_size (`int`, defaults to 3): n.
    """
    check_sequences("sequences", sequences)
    check_int("ngram_size", ngram_size, 1, sequences.shape[1])
    ngrams = sequences.cpu().unfold(1, ngram_size, 1)  # [B, N - n + 1, n]
    _, index, counts = torch.unique(ngrams.flatten(0, 1), dim=0, return_inverse=True, return_counts=True)
    surprise = -(counts.double() / len(index)).log2()[index].reshape(ngrams.shape[:2]).mean(1)  # [B]
    return float(surprise.mean()), standard_error(surprise)


def standard_error(values: torch.Tensor) -> float:
    """Standard error of the mean of `values`, `[B]`; NaN for a single one."""
    return float(values.std() / len(values) ** 0.5) if len(values) > 1 else math.nan


def check_sequences(name: str, value) -> None:
    """Checks that `value` is a tensor of tokens of shape `[B, N]` that is not empty."""
    check_type(name, value, torch.Tensor, "a `torch.LongTensor` of shape [B, N]")
    if value.is_floating_point() or value.dtype == torch.bool or value.ndim != 2 or not value.numel():
        raise ValueError(f"{name} is {describe(value)}: it must be a `torch.LongTensor` of shape [B, N]")


def word_statistics(texts: list[str], reference: list[str]) -> dict[str, float]:
    """Statistics of the words of samples: the share that occurs in the reference, their mean length, and their entropy.

    The first and the last word of a text are left out, as they may be cut.

    Args:
        texts (`list[str]`): Samples.
        reference (`list[str]`): Texts of the data set.
    """
    for name, strings in (("texts", texts), ("reference", reference)):
        check_type(name, strings, (list, tuple), "a list of strings")
        for text in strings:
            check_type(f"an entry of {name}", text, str, "a string")
    vocabulary = {word for text in reference for word in _whole_words(text)}
    words = [word for text in texts for word in _whole_words(text)]
    if not words:
        return {"known_words": 0.0, "word_length": 0.0, "word_entropy": 0.0}
    return {
        "known_words": sum(word in vocabulary for word in words) / len(words),
        "word_length": sum(map(len, words)) / len(words),
        "word_entropy": float(entropy(list(Counter(words).values()), base=2)),
    }


def _whole_words(text: str) -> list[str]:
    return [word for word in text.split(" ")[1:-1] if word]


@dataclass(frozen=True)
class JudgedSamples:
    """Samples of one sampler, as one point of a frontier. All numbers are in bits.

    Args:
        nll (`float`): Negative log-likelihood per token under the judge.
        entropy (`float`): Entropy of the tokens within a sample, averaged over the samples ([`token_entropy`]).
        ngram_entropy (`float`): Entropy of the n-grams of all samples together ([`ngram_entropy`]).
        nll_standard_error, entropy_standard_error, ngram_entropy_standard_error (`float`): Standard errors, from the spread
            between samples; NaN for a single sample.
        ngram_size (`int`): n.
        num_samples, num_tokens (`int`): Number of samples, and of tokens that the judge scored.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model
        from d3pm_hf.evaluation import judge_samples

        network = create_text_model("tiny", 28, is_decoder=True, timestep_conditioning=False)
        judge = D3PMTextPipeline(network, D3PMScheduler(28, 16, transition="autoregressive"), character_tokenizer())
        judged = judge_samples(judge, torch.randint(0, 27, (4, 16)))
        print(judged.nll, judged.entropy)
        ```
    """

    nll: float
    entropy: float
    ngram_entropy: float
    nll_standard_error: float
    entropy_standard_error: float
    ngram_entropy_standard_error: float
    ngram_size: int
    num_samples: int
    num_tokens: int


def judge_samples(
    judge: D3PMPipeline, sequences: torch.Tensor, *, ngram_size: int = 3, batch_size: int = 64
) -> JudgedSamples:
    """Negative log-likelihood of samples under an autoregressive judge, and their entropies, with standard errors.

        nll = -1 / (B N) sum_{b, i} log2 p_judge(x_b^i | x_b^1, ..., x_b^{i-1})

    Neither number says that samples are good. A sampler that always draws the likeliest text has a low `nll`, and one that draws
    tokens at random has high entropies. Draw samples at several temperatures: a sampler is better where its curve of `nll` over
    an entropy is below that of another.

    Args:
        judge ([`D3PMPipeline`]): Pipeline of an autoregressive process with a causal network, whose tokens are those of the
            samples. One pass over the samples gives its likelihood.
        sequences (`torch.LongTensor` of shape `[B, N]`): Samples, as a text pipeline returns them. N is the number of tokens of
            the judge.
        ngram_size (`int`, defaults to 3): n of the n-grams.
        batch_size (`int`, defaults to 64): Number of samples that the judge reads at once.
    """
    check_type("judge", judge, D3PMPipeline, "a `D3PMPipeline`")
    check_int("batch_size", batch_size, 1)
    scheduler, denoiser = judge.scheduler, judge.denoiser
    if not scores_in_one_pass(scheduler, denoiser):
        raise ValueError(
            f"judge has a process of the family {scheduler.config.transition!r} and a {type(denoiser).__name__} that does not score "
            "in one pass: it must have an autoregressive process and a causal network that reads no timestep"
        )
    check_sequences("sequences", sequences)
    mask = scheduler.transition.absorbing_state
    if (sequences == mask).any():
        raise ValueError(f"sequences hold token {mask}, the mask of the judge: pass samples that are finished")
    if sequences.shape[1] != len(scheduler):
        raise ValueError(
            f"sequences have {sequences.shape[1]} tokens, and the judge {len(scheduler)}: pass samples of the length of the judge"
        )
    diversity, diversity_error = ngram_entropy(sequences, ngram_size)
    batches = sequences.to(judge.device).split(batch_size)
    likelihood = evaluate_bound(scheduler, denoiser, batches, is_causal=True, progress_bar=False)
    entropies = token_entropies(sequences)
    return JudgedSamples(
        nll=likelihood.bits_per_dim,
        entropy=float(entropies.mean()),
        ngram_entropy=diversity,
        nll_standard_error=likelihood.bits_per_dim_standard_error,
        entropy_standard_error=standard_error(entropies),
        ngram_entropy_standard_error=diversity_error,
        ngram_size=ngram_size,
        num_samples=len(sequences),
        num_tokens=likelihood.num_elements,
    )
