# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Samples of text as a point of two coordinates: how likely a judge finds them, and how diverse they are."""

from dataclasses import dataclass

import torch

from ..likelihood import evaluate_bound
from ..likelihood.causal import scores_in_one_pass
from ..pipelines import D3PMPipeline
from ..utils.checks import check_int, check_type
from .text import check_sequences, ngram_entropy, standard_error, token_entropies


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
