# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Choices of arguments, which the help of command lines lists without an import of torch."""

# Transition families of this package: what each does to a token, and the tensors that it is created from.
TRANSITIONS = {
    "absorbing": "tokens turn into a mask and stay one",
    "uniform": "tokens are replaced by uniform ones",
    "absorbing_uniform": "tokens are masked or replaced by uniform ones, as in BERT",
    "stationary": "tokens are replaced by draws from a given distribution",
    "autoregressive": "tokens are masked one by one from the right: an autoregressive model",
    "by_element": "each element has a process of its own",
    "matrix": "tokens move by given transition matrices",
    "rate": "tokens move by a given rate matrix",
    "nearest_neighbor": "tokens move to their nearest neighbors in an embedding space",
    "absorbing_nearest_neighbor": "tokens move to their nearest neighbors in an embedding space, or are masked",
    "gaussian": "levels drift to near ones, as under discretized Gaussian noise",
    "band_diagonal": "levels drift to ones within a band",
}
INPUT_TENSORS = {
    "stationary": ("stationary_probs",),
    "matrix": ("transition_matrices", "stationary_probs"),
    "rate": ("rate_matrix",),
    "nearest_neighbor": ("embeddings",),
    "absorbing_nearest_neighbor": ("embeddings",),
}
# Noise schedules of this package.
SCHEDULES = ("mutual_information", "linear", "cosine", "reciprocal")
# The values of arguments of a scheduler that are one of a few words.
CHOICES = {
    "prior": ("stationary", "fitted"),
    "prediction_type": ("x0", "logistic", "previous"),
    "x0_posterior": ("leave_one_out", "denoising"),
    "reconstruction": ("posterior", "raw"),
}
# Data sets of each task to measure a checkpoint on. The last one is the user's own.
DATASETS = {
    "text-generation": ("text8", "lm1b", "prose", "text"),
    "unconditional-image-generation": ("cifar10", "digits", "images"),
}
OWN_DATASETS = tuple(names[-1] for names in DATASETS.values())
# The split of the data sets that are part of the package.
ONLY_SPLITS = {"prose": "validation", "digits": "test"}
ALL_SPLITS = "all"
# Orders in which positions are revealed that have an exact likelihood.
EXACT_ORDERS = ("left_to_right", "confidence", "margin", "entropy")
# How the networks of MDLM (subs), SEDD (score), and UDLM and Duo (mean) are read.
PARAMETERIZATIONS = ("subs", "score", "mean")
