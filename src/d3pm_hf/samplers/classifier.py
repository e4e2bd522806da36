# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Classifier guidance: steps that follow a function of the states, such as the log-probability of a class."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..numerics import categorical, compute_dtype, uniforms
from ..schedulers.scheduling_d3pm import D3PMSchedulerOutput
from ..utils.checks import check_choice, check_float, check_int, check_type, describe
from .guidance import taking_logits
from .walk import check_scheduler


INPUTS = ("prev_sample", "pred_original_sample")
METHODS = ("substitution", "gradient")


@dataclass(frozen=True)
class ClassifierGuidance:
    """A classifier, and how samples follow it.

        p(x_s | x_t, c) is proportional to p(x_s | x_t) p(c | x_s)^scale        at each position

    The classifier reads a state at one position, and at all others the most likely one.

    Args:
        log_prob_fn (`Callable`): `log_prob_fn(x, timestep)` gives log p(c | x), `[n]`, for states `[n, ...]` at a timestep,
            which is -1 for data. With `method="gradient"`, x is one-hot, `[n, ..., K]`, and float32.
        scale (`float`, defaults to 1.0): Exponent of the classifier.
        input (`str`, defaults to `"prev_sample"`): What the classifier reads: `"prev_sample"` is the noisy x_s at its
            timestep, and `"pred_original_sample"` is data, for a classifier of data: then p(x_0 | x_t) is
            multiplied by p(c | x_0)^scale.
        method (`str`, defaults to `"substitution"`): `"substitution"` evaluates each state that is possible at each
            position, up to N K rows per sample. `"gradient"` takes the derivative with respect to the one-hot states, one row
            per sample, which is the first order of the same.
        batch_size (`int`, defaults to 4096): Largest number of rows in a call of `log_prob_fn` with `"substitution"`.

    Examples:
        ```python
        from d3pm_hf import ClassifierGuidance


        def prefers_state_0(x, timestep):
            return (x == 0).float().mean(-1).log_softmax(0)  # log p(c | x), [n], for states [n, N]


        guidance = ClassifierGuidance(prefers_state_0, scale=2.0)  # pipeline(classifier=guidance)
        ```
    """

    log_prob_fn: Callable[[torch.Tensor, int], torch.Tensor]
    scale: float = 1.0
    input: str = "prev_sample"
    method: str = "substitution"
    batch_size: int = 4096

    def __post_init__(self):
        check_type("log_prob_fn", self.log_prob_fn, Callable, "a function")
        check_float("scale", self.scale)
        check_choice("input", self.input, INPUTS)
        check_choice("method", self.method, METHODS)
        check_int("batch_size", self.batch_size, 1)

    def log_weights(self, x: torch.Tensor, log_p: torch.Tensor, timestep: int) -> torch.Tensor:
        """scale log p(c | x with state k at position i), up to a constant per position, `[n, ..., K]`.

        Args:
            x: States `[n, ...]`.
            log_p: Log-probabilities of what takes their place, `[n, ..., K]`; what is impossible is not evaluated.
            timestep: Timestep of the states.
        """
        if self.scale == 0:
            return torch.zeros_like(log_p)
        score = self._substitute if self.method == "substitution" else self._differentiate
        weights = self.scale * score(x, log_p, timestep)
        if not (weights < torch.inf).all():
            raise ValueError(
                f"the classifier gives NaN or infinity at timestep {timestep}: log_prob_fn must return log-probabilities"
            )
        return weights

    def _substitute(self, x: torch.Tensor, log_p: torch.Tensor, timestep: int) -> torch.Tensor:
        flat, possible = x.flatten(1), log_p.flatten(1, -2) > -torch.inf  # [n, N], [n, N, K]
        places = (possible & (possible.sum(-1, keepdim=True) > 1)).nonzero()  # a single state needs no classifier
        scores = torch.zeros_like(log_p).flatten(1, -2)
        for part in places.split(self.batch_size):
            row, position, state = part.unbind(-1)
            changed = flat[row].scatter_(1, position[:, None], state[:, None]).unflatten(1, x.shape[1:])
            scores[row, position, state] = self._evaluate(changed, timestep, len(part)).to(scores)
        return scores.view_as(log_p)

    def _differentiate(self, x: torch.Tensor, log_p: torch.Tensor, timestep: int) -> torch.Tensor:
        with torch.enable_grad():
            one_hot = F.one_hot(x, log_p.shape[-1]).float().requires_grad_()
            values = self._evaluate(one_hot, timestep, len(x))
            if not values.requires_grad:
                raise ValueError(
                    "log_prob_fn has no gradient with respect to the one-hot states: compute it from them with torch, or "
                    "choose method='substitution'"
                )
            return torch.autograd.grad(values.sum(), one_hot)[0].to(log_p)

    def _evaluate(self, x: torch.Tensor, timestep: int, num_rows: int) -> torch.Tensor:
        values = self.log_prob_fn(x, timestep)
        is_float = isinstance(values, torch.Tensor) and values.is_floating_point()
        if not is_float or values.shape != (num_rows,):
            raise ValueError(
                f"log_prob_fn returned {describe(values)} for {num_rows} rows: return one log-probability per row, a "
                f"floating-point tensor of shape [{num_rows}]"
            )
        return values


class ClassifierGuidedScheduler:
    """A scheduler whose steps follow a classifier; all else is that of the scheduler. Samplers take it as any other.

    Args:
        scheduler ([`D3PMScheduler`]): The process.
        guidance ([`ClassifierGuidance`]): The classifier.
        given (`torch.LongTensor` of shape `[B, ...]`, *optional*): Elements that the classifier sees in all states.
        is_given (`torch.BoolTensor` of shape `[B, ...]`, *optional*): Where they are.

    Examples:
        ```python
        import torch
        from d3pm_hf import ClassifierGuidance, D3PMScheduler
        from d3pm_hf.samplers import ClassifierGuidedScheduler, ancestral

        guidance = ClassifierGuidance(lambda x, timestep: 5.0 * (x == 0).float().mean(-1))
        scheduler = ClassifierGuidedScheduler(D3PMScheduler(4, 10, transition="uniform", beta_schedule="cosine"), guidance)
        x_0 = ancestral(scheduler, lambda x_t, t: torch.zeros(*x_t.shape, 4), scheduler.sample_prior((2, 6)), list(range(9, -1, -1)))
        ```
    """

    has_plain_steps = False

    def __init__(
        self,
        scheduler,
        guidance: ClassifierGuidance,
        given: torch.Tensor | None = None,
        is_given: torch.Tensor | None = None,
    ):
        check_scheduler(scheduler)
        check_type("guidance", guidance, ClassifierGuidance, "a `ClassifierGuidance`")
        if guidance.input == "pred_original_sample" and scheduler.config.prediction_type == "previous":
            raise ValueError(
                "prediction_type is 'previous': there is no x_0 for the classifier to read; choose input='prev_sample'"
            )
        self._scheduler, self._guidance, self._given, self._is_given = scheduler, guidance, given, is_given

    def __getattr__(self, name: str):
        if name == "_scheduler":  # of an object that is being copied
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def __len__(self) -> int:
        return len(self._scheduler)

    def posterior_logits(self, model_output, timestep: int, sample, previous_timestep: int | None = None, **warping):
        """log p(x_s | x_t, c), `[B, ..., K]`, normalized. The arguments are those of [`D3PMScheduler.posterior_logits`]."""
        logits = self._scheduler.step_logits(model_output, **warping).to(compute_dtype(model_output))
        return self._guided_posterior(logits, timestep, sample, previous_timestep)

    def step(
        self,
        model_output,
        timestep: int,
        sample,
        *,
        previous_timestep=None,
        generator=None,
        return_dict=True,
        **warping,
    ) -> D3PMSchedulerOutput | tuple:
        """Draws x_s from p(x_s | x_t, c). The arguments are those of [`D3PMScheduler.step`].

        `temperature`, `top_k` and `top_p` are applied to the prediction of the network, before the classifier. With
        `temperature=0` this is one x_0, and the classifier chooses among the x_s of q(x_s | x_t, x_0) alone.
        """
        if previous_timestep is None:
            previous_timestep = self._scheduler.previous_timestep(int(timestep))
        logits = self._scheduler.step_logits(model_output, **warping).to(compute_dtype(model_output))
        log_p = self._guided_posterior(logits, int(timestep), sample, int(previous_timestep))
        u = uniforms(sample.shape, generator, sample.device)
        x_s = categorical(log_p.flatten(0, -2), u.flatten()).view_as(sample)
        return D3PMSchedulerOutput(prev_sample=x_s, pred_logits=logits) if return_dict else (x_s, logits)

    def _guided_posterior(self, logits, timestep: int, sample, previous_timestep: int | None) -> torch.Tensor:
        """log p(x_s | x_t, c) from logits of x_0, or of x_{t-1}."""
        scheduler, s = taking_logits(self._scheduler), timestep - 1 if previous_timestep is None else previous_timestep
        if self._guidance.input == "pred_original_sample":
            log_x0 = scheduler.posterior_logits(logits, timestep, sample, -1)  # log p(x_0 | x_t)
            return scheduler.posterior_logits(logits + self._weights(log_x0, -1), timestep, sample, s)
        log_p = scheduler.posterior_logits(logits, timestep, sample, s)
        guided = (log_p + self._weights(log_p, s)).log_softmax(-1)
        if guided.isnan().any():
            raise ValueError(
                f"the classifier excludes every state of a position at timestep {s}: leave at least one above -inf"
            )
        return guided

    def _weights(self, log_p: torch.Tensor, timestep: int) -> torch.Tensor:
        """The weights of each state at each position, all others being at their most likely state."""
        x = log_p.argmax(-1)
        if self._is_given is not None and self._given is not None:
            x = torch.where(self._is_given, self._given, x)
            log_p = log_p.masked_fill(self._is_given[..., None], -torch.inf)  # nothing takes their place
        return self._guidance.log_weights(x, log_p, timestep)
