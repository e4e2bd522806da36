# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Bits per dimension and perplexities as metrics of the `evaluate` library, each with its standard error.

    BitsPerDim().compute(nats=bound.nats_per_example, elements=bound.elements_per_example)

They are the numbers of a [`Bound`] for examples that were scored elsewhere.
"""

import numpy as np

from ..likelihood.bound import bits, perplexity, perplexity_standard_error, ratio_estimate


try:
    import datasets
    import evaluate
except ImportError as error:
    raise ImportError("metrics need the package evaluate: pip install 'd3pm-hf[evaluation]'") from error


__all__ = ["BitsPerDim", "Perplexity", "WordPerplexity"]

CITATION = "Austin et al., Structured Denoising Diffusion Models in Discrete State-Spaces, 2021"


class LikelihoodMetric(evaluate.Metric):
    """A metric of examples given by their negative log-likelihoods (or bounds on them) and their sizes.

    Subclasses define the key of the result, the argument for the sizes and its description, and `_convert`.
    """

    result: str
    sizes: str
    sizes_description: str

    def _info(self):
        return evaluate.MetricInfo(
            description=type(self).__doc__,
            citation=CITATION,
            inputs_description=f"nats: -log p(x_0) of each example. {self.sizes}: {self.sizes_description}.",
            features=datasets.Features({name: datasets.Value("float64") for name in ("nats", self.sizes)}),
        )

    def _compute(self, nats, **sizes):
        estimate, error, _ = ratio_estimate(np.asarray(nats, float), np.asarray(sizes[self.sizes], float))
        value, standard_error = self._convert(float(estimate), float(error))
        return {self.result: value, f"{self.result}_standard_error": standard_error}

    @staticmethod
    def _convert(nats: float, standard_error: float) -> tuple[float, float]:
        """The metric and its standard error, from the nats per unit of size and their standard error."""
        raise NotImplementedError


class BitsPerDim(LikelihoodMetric):
    """Negative log-likelihood in bits per element, as a metric of the `evaluate` library.

    `compute(nats=..., elements=...)` takes -log p(x_0) of each example, or a bound on it, and its number of characters, tokens or
    pixels. The result has `bits_per_dim` and `bits_per_dim_standard_error`.

    Examples:
        ```python
        from d3pm_hf.evaluation.metrics import BitsPerDim

        result = BitsPerDim().compute(nats=[40.0, 50.0], elements=[32, 32])
        print(result["bits_per_dim"], result["bits_per_dim_standard_error"])
        ```
    """

    result = "bits_per_dim"
    sizes, sizes_description = "elements", "Number of characters, tokens or pixels of each example"

    @staticmethod
    def _convert(nats, standard_error):
        return bits(nats), bits(standard_error)


class Perplexity(LikelihoodMetric):
    """Perplexity per token, as a metric of the `evaluate` library.

    `compute(nats=..., tokens=...)` takes -log p(x_0) of each example, or a bound on it, and its number of tokens. The result has
    `perplexity` and `perplexity_standard_error`.

    Examples:
        ```python
        from d3pm_hf.evaluation.metrics import Perplexity

        result = Perplexity().compute(nats=[40.0, 50.0], tokens=[16, 16])
        print(result["perplexity"], result["perplexity_standard_error"])
        ```
    """

    result = "perplexity"
    sizes, sizes_description = "tokens", "Number of tokens of each example"

    @staticmethod
    def _convert(nats, standard_error):
        return perplexity(nats), perplexity_standard_error(nats, standard_error)


class WordPerplexity(Perplexity):
    """Perplexity per word, as a metric of the `evaluate` library.

    `compute(nats=..., words=...)` takes -log p(x_0) of each example, or a bound on it, and its number of words. The paper counts one
    EOS per sentence as a word. The result has `word_perplexity` and `word_perplexity_standard_error`.

    Examples:
        ```python
        from d3pm_hf.evaluation.metrics import WordPerplexity

        result = WordPerplexity().compute(nats=[40.0, 50.0], words=[6, 7])
        print(result["word_perplexity"], result["word_perplexity_standard_error"])
        ```
    """

    result = "word_perplexity"
    sizes, sizes_description = "words", "Number of words of each example, one EOS per sentence included"
