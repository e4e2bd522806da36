# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Bits per dimension and perplexity per word as metrics of the `evaluate` library."""

import math

import datasets
import evaluate


CITATION = "Austin et al., Structured Denoising Diffusion Models in Discrete State-Spaces, 2021"


class BitsPerDim(evaluate.Metric):
    """`BitsPerDim().compute(nats=[...], elements=[...])`: -log2 p of whole examples, per element of all of them."""

    def _info(self):
        return evaluate.MetricInfo(
            description="Negative log-likelihood (or a bound on it) in bits per element.",
            citation=CITATION,
            inputs_description="nats: -log p of each example. elements: its number of elements.",
            features=datasets.Features({"nats": datasets.Value("float64"), "elements": datasets.Value("int64")}),
        )

    def _compute(self, nats, elements):
        return {"bits_per_dim": math.fsum(nats) / sum(elements) / math.log(2)}


class WordPerplexity(evaluate.Metric):
    """`WordPerplexity().compute(nats=[...], words=[...])`: exp of the nats per word; the paper counts each EOS as one."""

    def _info(self):
        return evaluate.MetricInfo(
            description="Perplexity per word, from negative log-likelihoods (or bounds on them) of tokens.",
            citation=CITATION,
            inputs_description="nats: -log p of each example. words: its number of words, one EOS per sentence included.",
            features=datasets.Features({"nats": datasets.Value("float64"), "words": datasets.Value("int64")}),
        )

    def _compute(self, nats, words):
        return {"word_perplexity": math.exp(math.fsum(nats) / sum(words))}
