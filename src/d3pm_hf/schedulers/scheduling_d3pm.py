# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMScheduler: the methods that diffusers expects of a scheduler, over any family of transition matrices."""

from dataclasses import dataclass

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput

from ..numerics import categorical, compute_dtype, uniforms, without_autocast
from ..transitions.base import Transition, expand_time
from ..transitions.families import FAMILIES  # noqa: F401  (registers them)
from ..transitions.registry import get_family
from ..utils.checks import check_device, check_int, check_tensor, check_timestep, check_type, values_are_known
from .arguments import DEFAULT_NUM_TIMESTEPS, check_config, named_options
from .forward_process import ForwardProcessMixin
from .inputs import InputChecksMixin
from .logistic import logistic_logits
from .timesteps import TimestepsMixin
from .warping import apply_warpers, create_warpers


@dataclass
class D3PMSchedulerOutput(BaseOutput):
    """Output of [`D3PMScheduler.step`].

    Args:
        prev_sample (`torch.LongTensor` of shape `[B, ...]`): x_s, the input of the next step.
        pred_logits (`torch.Tensor` of shape `[B, ..., K]`):
            The logits that the step used, after `temperature`, `top_k` and `top_p`: of x_0, or of x_s with
            `prediction_type="previous"`.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        output = D3PMScheduler(28).step(torch.randn(2, 8, 28), 999, torch.full((2, 8), 27))
        assert output.prev_sample.shape == (2, 8) and output.pred_logits.shape == (2, 8, 28)
        ```
    """

    prev_sample: torch.Tensor
    pred_logits: torch.Tensor


class D3PMScheduler(TimestepsMixin, InputChecksMixin, ForwardProcessMixin, SchedulerMixin, ConfigMixin):
    """The forward and the reverse process of D3PM, for any family of transition matrices.

    The timestep `t` in `0 .. num_train_timesteps - 1` has `t + 1` corruption steps behind it: it is the paper's
    `t + 1`. States are integers `[B, ...]`; logits have the classes last, `[B, ..., num_classes]`.

    Args:
        num_classes (`int`): Number of states K, including the mask if there is one. That of `transition` if it is an
            object.
        num_train_timesteps (`int`, defaults to 1000): Number of timesteps T. An autoregressive process has one per
            position.
        transition (`str` or [`Transition`], defaults to `"absorbing"`): Transition family of the forward process:
            `"absorbing"`, `"uniform"`, `"absorbing_uniform"` (BERT's mix), `"stationary"` (needs `stationary_probs`),
            `"gaussian"`, `"band_diagonal"`, `"matrix"` (`transition_matrices`), `"rate"` (`rate_matrix`),
            `"nearest_neighbor"` and `"absorbing_nearest_neighbor"` (`embeddings`), `"autoregressive"`, or any name given to
            [`register_transition`]. A transition object is used as it is.
        beta_schedule (`str`, defaults to `"mutual_information"`): Noise schedule. Also `"linear"`, `"cosine"`,
            `"reciprocal"`, which is 1 / (T - t + 1), and any name given to [`register_schedule`]. Mutual information is
            measured with `unigram_probs`.
        beta_start, beta_end (`float`, *optional*): Both ends of the linear schedule. Defaults to those of the paper: 1e-4
            and 0.02 for Gaussian processes, 0.02 and 1 for all others.
        trained_betas (`list[float]`, *optional*): Your own beta_1 .. beta_T, in place of `beta_schedule`.
        mask_token_id (`int`, *optional*): The absorbing state. Defaults to the last one; images reuse gray, K // 2.
        mask_in_data (`bool`, defaults to `False`): Whether x_0 may be the mask, as for gray pixels. If not, its logit is
            minus infinity.
        mask_fraction (`float`, defaults to 2/3): Share of the noise of `"absorbing_uniform"` that is the mask.
        bandwidth (`int`, defaults to 1): Largest move of one step of `"band_diagonal"`.
        num_neighbors (`int`, defaults to 5): Number of neighbors of each token in the graph of `"nearest_neighbor"`.
        mask_rate (`float`, defaults to 4.0): Rate of masking in `"absorbing_nearest_neighbor"`, in which a token moves to a
            neighbor at a rate of about one.
        prior (`str`, defaults to `"stationary"`): Distribution of x_T. `"fitted"` is `unigram_probs` after T steps, for
            processes that do not reach their stationary distribution.
        prediction_type (`str`, defaults to `"x0"`): Output of the network: `"x0"`, logits of x_0; `"logistic"`, location
            and log-scale of a discretized logistic, `[B, ..., 2]`; or `"previous"`, logits of x_{t-1}.
        x0_posterior (`str`, defaults to `"leave_one_out"`): Meaning of the logits of x_0 at one position.
            `"leave_one_out"`: what the other positions say about it, as eq. 4 of the paper assumes. `"denoising"`:
            q(x_0 | x_t), which is converted.
        reconstruction (`str`, defaults to `"posterior"`): Distribution of the last step, to the data. `"raw"` is the
            network's output as it is, as in the authors' image code.
        trained_exponents (`list[float | str]`, *optional*): Your own alpha_1 .. alpha_T of a process that is a matrix
            exponential, Q_t = exp(alpha_t R), in place of `trained_betas`: beta_t = 1 - exp(-alpha_t) rounds to 1 above
            36.7. `"inf"` is a step that forgets everything.
        transition_kwargs (`dict`, *optional*): Options of a family of your own, saved in the configuration. One with the name
            of an argument above is that argument.
        suppress_tokens (`list[int]`, *optional*): States besides the mask that data never hold, such as special tokens: they
            are never predicted or sampled, and uniform noise does not lead to them.
        inference_timesteps (`dict[int, list[int]]`, *optional*): Timesteps of sampling by their number, each list from T - 1
            down, such as those of [`~evaluation.optimize_timesteps`]. Other numbers of timesteps are spaced evenly.
        unigram_probs (`torch.Tensor` of shape `[K]`, *optional*): Frequencies of the states in the data.
        stationary_probs (`torch.Tensor` of shape `[K]`, *optional*): Stationary distribution of `"stationary"`.
        transition_matrices (`torch.Tensor` of shape `[T, K, K]` or `[K, K]`, *optional*): Q_t of `"matrix"`.
        rate_matrix (`torch.Tensor` of shape `[K, K]`, *optional*): R of `"rate"`, dense or sparse.
        embeddings (`torch.Tensor`, *optional*): Vectors whose neighbors are near, `[K, d]`, or `[K - 1, d]` beside a mask.
        transition_tensors (`dict[str, torch.Tensor]`, *optional*): Tensors of a family of your own.

    Tensors are not part of the configuration: `save_pretrained` writes them to `transition.safetensors`, and `from_config`
    takes them as keywords.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        scheduler = D3PMScheduler(num_classes=28, num_train_timesteps=1000, transition="absorbing")
        x_t = scheduler.add_noise(torch.randint(0, 27, (2, 16)), torch.tensor([100, 900]))
        scheduler.set_timesteps(num_inference_steps=20)
        sample = scheduler.sample_prior((2, 16))
        for t in scheduler.timesteps:
            sample = scheduler.step(torch.zeros(2, 16, 28), t, sample).prev_sample  # zeros: the output of a network
        ```
    """

    order = 1
    _compatibles: list[str] = []
    ignore_for_config = [
        *("unigram_probs", "stationary_probs", "transition_matrices", "rate_matrix", "embeddings"),
        "transition_tensors",
    ]

    @register_to_config
    def __init__(
        self,
        num_classes: int | None = None,
        num_train_timesteps: int = DEFAULT_NUM_TIMESTEPS,
        transition: str | Transition = "absorbing",
        beta_schedule: str = "mutual_information",
        beta_start: float | None = None,
        beta_end: float | None = None,
        trained_betas: list[float] | None = None,
        mask_token_id: int | None = None,
        mask_in_data: bool = False,
        mask_fraction: float = 2 / 3,
        bandwidth: int = 1,
        num_neighbors: int = 5,
        mask_rate: float = 4.0,
        prior: str = "stationary",
        prediction_type: str = "x0",
        x0_posterior: str = "leave_one_out",
        reconstruction: str = "posterior",
        trained_exponents: list[float | str] | None = None,
        transition_kwargs: dict | None = None,
        suppress_tokens: list[int] | None = None,
        inference_timesteps: dict[int, list[int]] | None = None,
        unigram_probs: torch.Tensor | None = None,
        stationary_probs: torch.Tensor | None = None,
        transition_matrices: torch.Tensor | None = None,
        rate_matrix: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        transition_tensors: dict[str, torch.Tensor] | None = None,
    ):
        self._tensors: dict[str, torch.Tensor] = {}
        self._transition: Transition | None = None
        if transition_tensors is not None:
            check_type("transition_tensors", transition_tensors, dict, "a dictionary of tensors")
        tensors = {
            "unigram_probs": unigram_probs,
            "stationary_probs": stationary_probs,
            "transition_matrices": transition_matrices,
            "rate_matrix": rate_matrix,
            "embeddings": embeddings,
            **(transition_tensors or {}),
        }
        if isinstance(transition, Transition):
            self._use_transition(transition, tensors)
        else:
            self.register_to_config(**named_options(self.config, get_family(self.config.transition)))
            check_config(self.config)
            if trained_exponents is not None:  # JSON has no infinity
                self.register_to_config(trained_exponents=["inf" if a == torch.inf else a for a in trained_exponents])
            self._set_tensors(tensors)
        if inference_timesteps is not None:
            self.register_inference_timesteps(inference_timesteps)
        self.init_noise_sigma = 1.0
        self.num_inference_steps: int | None = None
        self.timesteps = torch.arange(len(self) - 1, -1, -1)
        self._previous: dict[int, int] = {}

    @property
    def has_plain_steps(self) -> bool:
        """Whether `step` draws from eq. 4 by the transition, so that a sampler may draw the same in another way."""
        return type(self).step is D3PMScheduler.step

    def scale_model_input(self, sample: torch.Tensor, timestep: int | None = None) -> torch.Tensor:
        """`sample` itself, for interchangeability with other schedulers."""
        return sample

    # Noising and denoising

    @without_autocast
    def add_noise(self, original_samples: torch.Tensor, timesteps: torch.Tensor | int, generator=None) -> torch.Tensor:
        """Draws x_t from q(x_t | x_0) = Cat(x_0 Qbar_t) (section 3 of the paper).

        Args:
            original_samples (`torch.LongTensor` of shape `[B, ...]`): x_0.
            timesteps (`torch.LongTensor` of shape `[B]`, or `int`): Timesteps in `0 .. num_train_timesteps - 1`.
            generator (`torch.Generator` or a list of one per sample, *optional*): Source of the noise.
        """
        if isinstance(timesteps, torch.Tensor):
            if timesteps.is_floating_point():
                raise ValueError(
                    f"timesteps are {timesteps.dtype}: pass integers, and no noise, which is drawn here: "
                    "add_noise(x_0, timesteps, generator)"
                )
            if timesteps.shape == (1,):
                timesteps = timesteps[0]  # one for all: `scheduler.timesteps[i][None]` of diffusers' scripts
        self.check_states(original_samples)
        self.check_timesteps(timesteps, original_samples)
        return self.transition.sample(original_samples, self.num_steps_behind(timesteps), generator)

    def reveal(self, original_samples: torch.Tensor, timestep: int) -> torch.Tensor:
        """A state x_t for known data: x_0 itself if the process can keep it until t, else a draw from q(x_t | x_0).

        Args:
            original_samples (`torch.LongTensor` of shape `[B, ...]`): x_0.
            timestep (`int`): t; -1 stands for the data.
        """
        self.check_states(original_samples)
        check_int("timestep", timestep, -1, len(self) - 1)
        return self.transition.reveal(original_samples, self.num_steps_behind(timestep))

    def sample_prior(self, shape, generator=None, device=None) -> torch.Tensor:
        """Draws x_T, the start of sampling, from the prior.

        Args:
            shape (`tuple[int]`): Shape of the states, `[B, ...]`.
            generator (`torch.Generator` or a list of one per sample, *optional*): Source of the draw.
            device (`str` or `torch.device`, *optional*): Device of the states. Defaults to the CPU.
        """
        check_type("shape", shape, (tuple, list), "a tuple of integers")
        for size in shape:
            check_int("a size in shape", size, 1)
        device = "cpu" if device is None else device
        check_device("device", device)
        return self.transition.sample_prior(shape, generator, device)

    def logits(self, model_output: torch.Tensor) -> torch.Tensor:
        """Converts the output of the network to logits `[B, ..., K]` of x_0, or of x_{t-1} with `"previous"`."""
        check_type("the network's output", model_output, torch.Tensor, "a floating-point tensor")
        last = 2 if self.config.prediction_type == "logistic" else self.config.num_classes
        check_tensor("the network's output", model_output, *[None] * (model_output.ndim - 1), last)
        if self.config.prediction_type == "logistic":
            location, log_scale = model_output.to(compute_dtype(model_output)).unbind(-1)
            return logistic_logits(location, log_scale, self.config.num_classes)
        return model_output

    @without_autocast
    def posterior_logits(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | int,
        sample: torch.Tensor,
        previous_timestep: torch.Tensor | int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> torch.Tensor:
        """log p(x_s | x_t), `[B, ..., K]`, normalized: the paper's eq. 4 for any number of skipped steps.

            log p(x_s | x_t) = log q(x_t | x_s) + log sum_{x_0} q(x_s | x_0) p(x_0) + const

        Args:
            model_output (`torch.Tensor`): Output of the network.
            timestep (`int`, or `torch.LongTensor` of shape `[B]`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            previous_timestep (`int`, or `torch.LongTensor` of shape `[B]`, *optional*): s, -1 for the data. Defaults
                to t - 1.
            temperature, top_k, top_p: As in [`D3PMScheduler.step`].
        """
        self.check_model_output(model_output, sample)
        self.check_timesteps(timestep, sample, previous_timestep)
        logits = self.step_logits(model_output, temperature, top_k, top_p).to(compute_dtype(model_output))
        if self.config.prediction_type == "previous":
            self._check_logits(logits)
            return logits.log_softmax(-1)
        self._check_logits(self.transition.forbid(logits))
        t = self.num_steps_behind(timestep)
        s = t - 1 if previous_timestep is None else self.num_steps_behind(previous_timestep)
        raw = logits
        if self.config.x0_posterior == "denoising":
            logits = self.transition.to_leave_one_out(logits, sample, t)
        posterior = self.transition.posterior_logits(logits, sample, s, t)
        if self.config.reconstruction == "raw":
            to_data = expand_time(s, sample) == 0
            posterior = torch.where(to_data[..., None], self.transition.forbid(raw), posterior)
        posterior = posterior.log_softmax(-1)
        if values_are_known(sample):
            self.check_possible(posterior.isnan().any(-1), raw, sample, t)
        return posterior

    def step_logits(
        self,
        model_output: torch.Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> torch.Tensor:
        """The logits that a step uses: those of the network, after `temperature`, `top_k` and `top_p`.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network.
            temperature, top_k, top_p: As in [`D3PMScheduler.step`].
        """
        logits, warpers = self.logits(model_output), create_warpers(temperature, top_k, top_p)
        if warpers:
            logits = logits.to(compute_dtype(logits))
            # The state that is never data must not take a place among the k best.
            is_direct = self.config.prediction_type == "previous"
            logits = logits if is_direct else self.transition.forbid(logits)
        self._check_logits(logits)
        return apply_warpers(warpers, logits) if warpers else logits

    @without_autocast
    def step(
        self,
        model_output: torch.Tensor,
        timestep: int,
        sample: torch.Tensor,
        *,
        previous_timestep: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> D3PMSchedulerOutput | tuple:
        """Draws x_s from p(x_s | x_t), s being the timestep that follows t in sampling.

            p(x_s | x_t) is proportional to q(x_t | x_s) sum_{x_0} q(x_s | x_0) p(x_0)        (the paper's eq. 4)

        On a CPU, an output that holds NaN or infinity raises an error. On an accelerator that would wait for the device in each
        step: samplers, and so pipelines, look once per call.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network.
            timestep (`int`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            previous_timestep (`int`, *optional*): s, -1 for the data. By default the entry after t in
                `self.timesteps`, or t - 1 before `set_timesteps` was called. With it the step depends on its
                arguments alone, so that threads may share a scheduler.
            temperature, top_k, top_p: Applied to the distribution that the network predicts, as in transformers. With
                `temperature=0` this is the most likely x_0 (the argmax of the logits, of equal ones the first), and x_s is drawn
                from q(x_s | x_t, x_0); with `prediction_type="previous"`, x_s itself is the most likely state.
            generator (`torch.Generator` or a list of one per sample, *optional*): Source of the draw.
            return_dict (`bool`, defaults to `True`): Whether to return a [`D3PMSchedulerOutput`] or the tuple
                `(prev_sample, pred_logits)`.
        """
        timestep = check_timestep("timestep", timestep)
        if previous_timestep is None:
            previous = self.previous_timestep(timestep)
        else:
            previous = check_timestep("previous_timestep", previous_timestep)
        self.check_timesteps(timestep, sample, previous)
        s, t = self.num_steps_behind(previous), self.num_steps_behind(timestep)
        self.check_model_output(model_output, sample)
        direct = self.config.prediction_type == "previous"
        logits = self.step_logits(model_output, temperature, top_k, top_p)
        denoising = self.config.x0_posterior == "denoising"
        if direct or (s == 0 and self.config.reconstruction == "raw"):
            rows = logits if direct else self.transition.forbid(logits)
            u = uniforms(sample.shape, generator, sample.device)
            prev_sample = categorical(rows.flatten(0, -2), u.flatten()).view_as(sample)
        else:
            prev_sample = self.transition.sample_previous(logits, sample, s, t, generator, denoising)
        if not return_dict:
            return prev_sample, logits
        return D3PMSchedulerOutput(prev_sample=prev_sample, pred_logits=logits)

    @without_autocast
    def predict_original_sample(
        self, model_output: torch.Tensor, timestep: torch.Tensor | int, sample: torch.Tensor
    ) -> torch.Tensor:
        """The most likely x_0 given x_t, `[B, ...]`, for previews: the mode of a step from t to the data.

            argmax_{x_0} q(x_t | x_0) p(x_0)

        `temperature`, `top_k` and `top_p` of a step are not applied. The cost is a pass over the classes, often more than
        that of the step.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network.
            timestep (`int`, or `torch.LongTensor` of shape `[B]`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
        """
        if self.config.prediction_type == "previous":
            raise ValueError(
                "prediction_type is 'previous': the network predicts x_{t-1}, and there is no x_0 to preview; look at "
                "`prev_sample`"
            )
        self.check_model_output(model_output, sample)
        self.check_timesteps(timestep, sample)
        logits = self.logits(model_output).to(compute_dtype(model_output))
        self._check_logits(logits)
        if self.config.reconstruction == "raw":
            return self.transition.forbid(logits).argmax(-1)
        denoising = self.config.x0_posterior == "denoising"
        return self.transition.most_likely_data(logits, sample, self.num_steps_behind(timestep), denoising)
