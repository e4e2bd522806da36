# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMTextPipeline: samples, infilling and reconstruction of text."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import SchedulerMixin
from diffusers.utils import BaseOutput
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.encoding import encode_prompt, padding_token
from ..models.denoisers import Denoiser
from ..models.text_denoisers import (
    CausalLMDenoiser,
    MaskedLMDenoiser,
    TextDenoiser,
    is_causal_lm,
    read_both_sides,
    reads_both_sides,
)
from ..samplers.classifier import ClassifierGuidance
from ..samplers.sampler import Sampler
from ..utils.checks import check_choice, check_int, check_integers, check_type, describe
from ..utils.modules import num_output_rows
from .language_models import LanguageModelMixin, default_length
from .networks import explain_panic
from .pipeline_d3pm import D3PMPipeline
from .text_inputs import finish_texts, prepare_inputs


TEXT_OUTPUT_TYPES = ("text", "latent", "seq")
# The largest `sequence_length`, for networks whose positions are not limited.
MAX_LENGTH = 1 << 24


@dataclass
class D3PMTextPipelineOutput(BaseOutput):
    """Output of [`D3PMTextPipeline`].

    Args:
        sequences (`torch.LongTensor` of shape `[B, N]`): Tokens, with padding behind the end of shorter texts.
        texts (`list[str]`, *optional*): The decoded tokens, with `output_type="text"`.
        log_normalizer (`torch.FloatTensor` of shape `[B]`, *optional*): With a `reward_fn`, an estimate of the logarithm of
            the expectation of exp(reward_scale r(x)). Its exponential is unbiased.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        output = pipeline(batch_size=2, num_inference_steps=4)
        assert len(output.texts) == 2 and output.sequences.shape == (2, 16)
        ```
    """

    sequences: torch.Tensor
    texts: list[str] | None = None
    log_normalizer: torch.Tensor | None = None


class D3PMTextPipeline(LanguageModelMixin, D3PMPipeline):
    """Generates text with a [`D3PMTextModel`] (or a language model of transformers) and a [`D3PMScheduler`].

    Args:
        text_model (`PreTrainedModel` or [`Denoiser`]): A network of transformers that predicts logits from x_t, and from
            the timestep if its configuration has `timestep_conditioning` (see [`TextDenoiser`]); a causal language model
            of transformers (see [`CausalLMDenoiser`]); or a denoiser of your own.
        scheduler ([`D3PMScheduler`]): The process over the vocabulary.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer. A pipeline without one reads and returns tokens. If
            the process has no mask state, the last entry of the vocabulary may be a mask token, for the gaps of a prompt.
        sequence_length (`int`, *optional*): Number of tokens of a sample without a prompt. By default the number of
            positions of the network, at most 256; for an autoregressive process the number of timesteps. `from_pipe` keeps
            it. It is one of the `parameters` of the pipeline, beside the `components`, which are modules only.
        add_special_tokens (`bool`, defaults to `False`): Whether texts have the special tokens that the tokenizer puts around
            them, such as `[CLS]` and `[SEP]`. They count towards `sequence_length`, and the network
            sees them at every step.
        num_class_labels (`int`, *optional*): Number of class labels of a network with `num_class_embeds`. By default each
            embedding is that of a class; if there is one more than classes, the last stands for "no class".
        ends_with_eos (`bool`, defaults to `False`): Whether a sample is one text, which the first end-of-sequence token ends.
            Training on texts that are filled up with it sets this. In packed text the same token stands between texts.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model

        network, scheduler = create_text_model("tiny", vocab_size=28), D3PMScheduler(num_classes=28)  # untrained
        pipeline = D3PMTextPipeline(network, scheduler, character_tokenizer(), sequence_length=32)
        print(pipeline(num_inference_steps=10).texts)
        print(pipeline("fill in the [MASK][MASK][MASK] please", num_inference_steps=10).texts)
        ```
    """

    task = "text-generation"
    network_name = "text_model"
    model_cpu_offload_seq = "text_model"
    _optional_components = ["tokenizer"]

    def __init__(
        self,
        text_model: PreTrainedModel | Denoiser,
        scheduler: SchedulerMixin,
        tokenizer: PreTrainedTokenizerBase | None = None,
        sequence_length: int | None = None,
        add_special_tokens: bool = False,
        num_class_labels: int | None = None,
        ends_with_eos: bool = False,
    ):
        super().__init__()
        if tokenizer is not None:
            check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer of transformers")
        self.register_parts(text_model, scheduler, num_class_labels, tokenizer=tokenizer)
        self.check_components()
        if sequence_length is None:
            sequence_length = default_length(self.denoiser.network)
            if scheduler.family.is_autoregressive:
                sequence_length = len(scheduler)
        check_int("sequence_length", sequence_length, 1, MAX_LENGTH)
        check_type("add_special_tokens", add_special_tokens, bool, "True or False")
        if add_special_tokens and tokenizer is None:
            raise ValueError(
                "add_special_tokens is True, and there is no tokenizer to put them: pass one, or leave it False"
            )
        self.register_to_config(sequence_length=sequence_length)
        if add_special_tokens:  # it is not an argument of every subclass
            self.register_to_config(add_special_tokens=True)
        check_type("ends_with_eos", ends_with_eos, bool, "True or False")
        if ends_with_eos:
            self.set_end()

    def set_end(self) -> None:
        """Sets `ends_with_eos`: the first end-of-sequence token ends a sample."""
        if self.end_token_id is None:
            raise ValueError(
                "ends_with_eos is True, and the process has no end of text: pass a tokenizer with an eos_token that is none of "
                "suppress_tokens, or leave it False"
            )
        self.register_to_config(ends_with_eos=True)

    def check_components(self) -> None:
        """Checks that the network, the scheduler and the tokenizer have the same vocabulary and the same mask token."""
        super().check_components()
        trained = getattr(getattr(self.text_model, "config", None), "num_train_timesteps", None)
        if trained not in (None, len(self.scheduler)):
            raise ValueError(
                f"the network reads the noise level of num_train_timesteps={trained}, and the scheduler has "
                f"{len(self.scheduler)} timesteps: use a network and a scheduler of the same checkpoint"
            )
        if self.tokenizer is None:
            return
        size, num_classes = len(self.tokenizer), self.scheduler.config.num_classes
        without_token = set(range(size, num_classes))  # rows of the output layer, which is padded to a round number
        is_mask_only = size == num_classes + 1 and self.tokenizer.mask_token_id == num_classes
        if not is_mask_only and (size > num_classes or not without_token.issubset(self.scheduler.never_data)):
            raise ValueError(
                f"the tokenizer has a vocabulary of {size} and the scheduler one of {num_classes}: load the tokenizer that "
                "the checkpoint was trained with, or name the states without a token in suppress_tokens"
            )
        # The mask of the process is never data, so it must be a token that no text is encoded to.
        mask, token = self.scheduler.gap_token_id, self.tokenizer.mask_token_id
        # A causal language model never reads the mask of the process, which comes after all of its tokens.
        if None not in (mask, token) and mask != token and not isinstance(self.denoiser, CausalLMDenoiser):
            change = f"pass mask_token_id={token} to D3PMScheduler"
            if token == num_classes:
                change = f"make the network and the scheduler with {token + 1} classes"
            raise ValueError(
                f"the mask of the scheduler is token {mask} ({describe(self.tokenizer.convert_ids_to_tokens(mask))}), and that "
                f"of the tokenizer is token {token} ({describe(self.tokenizer.mask_token)}): {change}"
            )

    @property
    def sample_shape(self) -> tuple[int]:
        return (self.config.sequence_length,)

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        num_classes = self.scheduler.config.num_classes
        if not is_causal_lm(network):
            return TextDenoiser(network, num_classes, self.config.get("num_class_labels"))
        if reads_both_sides(network):
            read_both_sides(network)  # also the layers of one that was just loaded
            return MaskedLMDenoiser(network, num_output_rows(network), shift_logits=True)
        return CausalLMDenoiser(network, num_classes)

    def encode(self, prompt: str | list[str], sequence_length: int | None = None) -> torch.Tensor:
        """Encodes prompts as tokens `[B, N]`. Gaps, and everything after a shorter prompt, are the mask token.

        With `add_special_tokens`, those of the tokenizer are put around the prompt and what is continued.
        """
        if sequence_length is not None:
            check_int("sequence_length", sequence_length, 1)
        rows = self.tokenize(prompt)
        if sequence_length is None and self.scheduler.family.is_autoregressive:  # its number of tokens is fixed
            sequence_length = len(self.scheduler)
        num_added = self.num_special_tokens
        lengths = sorted({len(row) + num_added for row in rows})
        if sequence_length is None and len(lengths) > 1:
            raise ValueError(
                f"the prompts have between {lengths[0]} and {lengths[-1]} tokens: encode them one by one, or pass "
                "`sequence_length` to have gaps after the shorter ones"
            )
        length = lengths[-1] if sequence_length is None else sequence_length
        if lengths[-1] > length or not length:
            larger = "" if self.scheduler.family.is_autoregressive else " or a larger sequence_length"
            raise ValueError(
                f"a prompt has {lengths[-1]} tokens, and sequence_length is {length}: pass a shorter prompt{larger}"
            )
        gap = self.gap_token_id
        if gap is None and lengths[0] < length:
            raise ValueError("the tokenizer has no mask token to mark gaps with: give it one, or pass `input_ids`")
        before, after = self.surrounding_tokens
        return torch.tensor([before + row + [gap] * (length - num_added - len(row)) + after for row in rows])

    def tokenize(self, prompt: str | list[str]) -> list[list[int]]:
        """The tokens of each prompt, without special tokens around them."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass `input_ids` in place of `prompt`")
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, (list, tuple)) or not prompts or not all(isinstance(one, str) for one in prompts):
            raise ValueError(f"prompt is {prompt!r}: pass a string or a list of at least one string")
        with explain_panic("the tokenizer fails on this text"):
            return [encode_prompt(one, self.tokenizer) for one in prompts]

    def decode(self, sequences: torch.Tensor) -> list[str]:
        """Decodes tokens `[B, N]` to text."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass output_type='latent'")
        check_integers("sequences", sequences, "[B, N]")
        if not sequences.numel():
            raise ValueError(f"sequences is {describe(sequences)}: pass at least one token")
        low, high = sequences.min().item(), sequences.max().item()
        if low < 0 or high >= len(self.tokenizer):
            raise ValueError(
                f"sequences hold the token {low if low < 0 else high}: the tokenizer has those from 0 to {len(self.tokenizer) - 1}"
            )
        with explain_panic("the tokenizer fails on these tokens"):
            return self.tokenizer.batch_decode(sequences.tolist(), skip_special_tokens=True)

    @property
    def gap_token_id(self) -> int | None:
        """Token that marks a gap: the mask of the tokenizer, or that of the process if the tokenizer has none."""
        mask = None if self.tokenizer is None else self.tokenizer.mask_token_id
        return self.scheduler.gap_token_id if mask is None else mask

    @property
    def end_token_id(self) -> int | None:
        """Token that ends a text: the end-of-sequence token of the tokenizer, if the process can produce it."""
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        is_data = end is not None and end < self.scheduler.config.num_classes and end not in self.scheduler.never_data
        return end if is_data else None

    @property
    def padding_token_id(self) -> int:
        """Token behind the end of a text: that for padding, or for the end, of the tokenizer; or else that of a gap."""
        candidates = [self.gap_token_id]
        if self.tokenizer is not None:
            candidates = [padding_token(self.tokenizer), self.tokenizer.eos_token_id, *candidates]
        num_classes = self.scheduler.config.num_classes
        return next((token for token in candidates if token is not None and token < num_classes), 0)

    @property
    def special_token_ids(self) -> list[int]:
        """Tokens that are no data: those that the process cannot produce, and those that the tokenizer puts around a text."""
        special = set(self.scheduler.never_data)
        if self.num_special_tokens:
            special.update(self.tokenizer.all_special_ids)
        return sorted(special - {self.gap_token_id})

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens that stand around a text."""
        return self.tokenizer.num_special_tokens_to_add() if self.config.get("add_special_tokens") else 0

    @property
    def surrounding_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and those that it puts after it."""
        if not self.num_special_tokens:
            return [], []
        mask, token = self.tokenizer.mask_token, self.tokenizer.mask_token_id
        with explain_panic("the tokenizer fails on this text"):
            template = [] if mask is None else self.tokenizer(mask).input_ids
        if template.count(token) != 1 or len(template) != 1 + self.num_special_tokens:
            raise ValueError(
                f"the tokenizer reads its mask token {mask!r} as {template}, which does not tell where a text stands among "
                "the special tokens: pass `input_ids` with the special tokens in place of `prompt`"
            )
        place = template.index(token)
        return template[:place], template[place + 1 :]

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        batch_size: int = 1,
        num_return_sequences: int = 1,
        sequence_length: int | None = None,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        input_ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        start_timestep: int | None = None,
        num_particles: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        sampler: str | Sampler | None = None,
        condition: dict | None = None,
        class_labels: int | list[int] | torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        classifier: ClassifierGuidance | None = None,
        max_new_tokens: int | None = None,
        attention_mask: torch.Tensor | None = None,
        return_full_text: bool = True,
        reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reward_scale: float = 1.0,
        spacing: str = "optimized",
        sampler_kwargs: dict | None = None,
    ) -> D3PMTextPipelineOutput | tuple:
        """Generates text, continues a prompt, fills in its gaps, or reconstructs a text from its corruption.

        Args:
            prompt (`str` or `list[str]`, *optional*): Text with gaps, such as `"the quick [MASK][MASK] fox"`, or text that
                is continued. Prompts of a batch may have unequal lengths: shorter ones are padded on the right, which the
                network does not attend to.
            batch_size (`int`, defaults to 1): Number of texts, unless there are several prompts or `class_labels`.
            num_return_sequences (`int`, defaults to 1): Number of samples for each entry of the batch. The samples of one
                entry follow each other.
            sequence_length (`int`, *optional*): Number of tokens. Shorter prompts are continued to it. By default the length
                of the prompt, or that of the checkpoint if there is none.
            num_inference_steps (`int`, *optional*): Number of steps. By default all timesteps of the process.
            timesteps (`list[int]`, *optional*): Strictly decreasing timesteps, in place of `num_inference_steps`.
            input_ids (`torch.LongTensor` of shape `[B, N]`, *optional*): Tokens, in place of `prompt`.
            mask (`torch.BoolTensor` of shape `[B, N]`, *optional*): True where `input_ids` are filled in, by default where
                they are the mask token. All other tokens are returned unchanged.
            start_timestep (`int`, *optional*): Timestep up to which the text is corrupted, to be reconstructed from there.
            num_particles (`int`, defaults to 1): Number of particles per sample. In the limit of many particles, the
                distribution given the known tokens is that of the model ([`~samplers.particle_filter`]). Absorbing processes
                fill in with one.
            generator (`torch.Generator`, or a list of one per sample, *optional*): Source of all random numbers. With a
                list, each sample is the same as in a call of its own.
            latents (`torch.LongTensor` of shape `[B, N]`, *optional*): State to start from, in place of a draw from
                the prior.
            temperature (`float`, defaults to 1.0): Divides the logits of the network. 0 takes the most likely state.
            top_k (`int`, *optional*): Number of most likely states of x_0 that are kept.
            top_p (`float`, *optional*): Total probability of the most likely states of x_0 that are kept.
            output_type (`str`, defaults to `"text"`): `"text"`, or `"latent"` (or `"seq"`) for the tokens alone.
            return_dict (`bool`, defaults to `True`): Whether to return a [`D3PMTextPipelineOutput`] or a tuple.
            callback_on_step_end (`Callable`, *optional*): Called as `callback(pipeline, step, timestep, tensors)` after each
                step. It returns `None`, or a dictionary whose `latents` replace the state.
            callback_on_step_end_tensor_inputs (`list[str]`, defaults to `["latents"]`): Names of the tensors that the
                callback receives: `latents` (x_s), `sample` (x_t), `previous_timestep` (s, -1 for the data) and
                `pred_original_sample` (the most likely x_0, computed only if named here).
            sampler (`str` or `Callable`, *optional*): How x_0 is drawn: `"ancestral"`, `"positions_first"`, `"first_hitting"`,
                `"left_to_right"`, `"particle_filter"`, `"predictor_corrector"`, `"confidence"`, `"remasking"`, a name of your own
                ([`~samplers.register_sampler`]) or a function with the signature of [`~samplers.Sampler`]. By default the
                particle filter if `num_particles` is above 1; else positions first, or left to right for a causal network of an
                autoregressive process, which draw from the same distribution with less work of the network, where they apply;
                else ancestral sampling.
            condition (`dict`, *optional*): Further arguments of the denoiser, such as `{"attention_mask": mask}`.
                Tensors have one row for each entry of the batch, or one row for all.
            class_labels (`int`, `list[int]` or `torch.LongTensor` of shape `[B]`, *optional*): Class of each entry of the
                batch, or one for all. Without it, a network with a null class samples without a class.
            guidance_scale (`float`, defaults to 1.0): Scale w of classifier-free guidance, log p(x) + w (log p(x | c) -
                log p(x)): 1 is the conditional model. Any other value, except for 0, doubles the rows of the network. Without
                a class or another condition, c is the prompt that `max_new_tokens` continue, and p(x) the prediction with masks
                in its place: LLaDA's `cfg_scale` is w - 1.
            classifier ([`~samplers.ClassifierGuidance`], *optional*): A function of the states that samples follow.
            max_new_tokens (`int`, *optional*): Number of tokens to generate after the prompt, which the network sees at
                every step. They end with the end-of-sequence token of the tokenizer, if the process can produce it:
                `sequences` have padding behind the first one.
            attention_mask (`torch.LongTensor` of shape `[B, N]`, *optional*): 1 for tokens of `input_ids`, and 0 for the
                padding behind them.
            return_full_text (`bool`, defaults to `True`): Whether a text that was continued begins with its prompt.
            reward_fn (`Callable`, *optional*): r, which maps states of data `[n, ...]` to numbers `[n]`. The particles steer
                to p(x) exp(reward_scale r(x)) / Z, and the output has an estimate of log Z.
            reward_scale (`float`, defaults to 1.0): Factor of the reward.
            spacing (`str`, defaults to `"optimized"`): Timesteps of `num_inference_steps`, as in `scheduler.set_timesteps`:
                `"optimized"`, those stored for this number if there are any, else evenly spaced ones; or `"even"`.
            sampler_kwargs (`dict`, *optional*): Options of the sampler, such as `{"corrector": "gibbs"}`.
        """
        # 1. Check the components and the arguments.
        self.check_components()
        check_int("batch_size", batch_size, 1)
        check_int("num_return_sequences", num_return_sequences, 1)
        check_choice("output_type", output_type, TEXT_OUTPUT_TYPES)
        check_type("return_full_text", return_full_text, bool, "True or False")
        if not return_full_text and max_new_tokens is None:
            raise ValueError("return_full_text is False, and no prompt is continued: pass `max_new_tokens`")

        # 2. Encode what is known or given.
        inputs = prepare_inputs(
            self, prompt, input_ids, attention_mask, mask, sequence_length, max_new_tokens, start_timestep
        )
        batch_size = batch_size if inputs.tokens is None else max(batch_size, len(inputs.tokens))
        condition, batch_size = self.add_classes(class_labels, condition, batch_size)
        if inputs.is_attended is not None:
            condition = inputs.add_attention_mask(condition)
            generator = inputs.shorten_rows(generator, batch_size * num_return_sequences)

        # 3. Sample x_0.
        report: dict[str, torch.Tensor] = {}
        sequences = self.sample_states(
            batch_size,
            (inputs.length,),
            inputs.tokens,
            inputs.is_known,
            given=None if inputs.is_given is None else inputs.tokens,
            is_given=inputs.is_given,
            num_per_input=num_return_sequences,
            num_inference_steps=num_inference_steps,
            timesteps=timesteps,
            start_timestep=start_timestep,
            spacing=spacing,
            sampler=sampler,
            sampler_kwargs=sampler_kwargs,
            num_particles=num_particles,
            condition=condition,
            guidance_scale=guidance_scale,
            drops_given=inputs.is_new is not None,
            classifier=classifier,
            reward_fn=reward_fn,
            reward_scale=reward_scale,
            report=report,
            generator=generator,
            latents=latents,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )

        # 4. Decode.
        sequences, texts = finish_texts(self, sequences, inputs, return_full_text, output_type == "text")
        if not return_dict:
            return (sequences, texts, *report.values())
        return D3PMTextPipelineOutput(sequences=sequences, texts=texts, **report)
