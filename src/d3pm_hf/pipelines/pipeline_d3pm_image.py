# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMImagePipeline: samples, inpainting and reconstruction of images."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image

from ..data.image_modes import flatten_pictures
from ..models.denoisers import Denoiser
from ..models.image_denoiser import ImageDenoiser
from ..samplers.classifier import ClassifierGuidance
from ..samplers.sampler import Sampler
from ..utils.checks import check_choice, check_int, check_type, describe
from .pipeline_d3pm import D3PMPipeline


IMAGE_OUTPUT_TYPES = ("pil", "np", "pt", "latent")


@dataclass
class D3PMImagePipelineOutput(ImagePipelineOutput):
    """Output of [`D3PMImagePipeline`].

    Args:
        images (`list[PIL.Image.Image]`, `np.ndarray` or `torch.Tensor`): Images, by `output_type`.
        log_normalizer (`torch.FloatTensor` of shape `[B]`, *optional*): With a `reward_fn`, an estimate of the logarithm of
            the expectation of exp(reward_scale r(x)). Its exponential is unbiased.

    Examples:
        ```python
        from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet

        scheduler = D3PMScheduler(4, 10, transition="uniform", beta_schedule="cosine")
        unet = create_unet("tiny", num_classes=4, sample_size=8, in_channels=1)  # untrained
        output = D3PMImagePipeline(unet, scheduler)(num_inference_steps=2)
        output.images[0].save("sample.png")
        ```
    """

    log_normalizer: torch.Tensor | None = None


class D3PMImagePipeline(D3PMPipeline):
    """Generates images with a network, such as a `UNet2DModel`, and a [`D3PMScheduler`].

    Args:
        unet (`ModelMixin` or [`Denoiser`]): A network of diffusers that predicts K logits per channel, or location and
            log-scale, from x_t scaled to [-1, 1] (see [`ImageDenoiser`]); or a denoiser of your own.
        scheduler ([`D3PMScheduler`]): The process over the K levels of a pixel.
        num_class_labels (`int`, *optional*): Number of class labels of a network with `num_class_embeds`. By default each
            embedding is that of a class; if there is one more than classes, the last stands for "no class".

    Examples:
        ```python
        from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet

        scheduler = D3PMScheduler(16, 100, transition="uniform", beta_schedule="cosine")
        pipeline = D3PMImagePipeline(create_unet("tiny", num_classes=16, sample_size=8, in_channels=1), scheduler)  # untrained
        images = pipeline(batch_size=2, num_inference_steps=4).images
        again = pipeline(image=images, start_timestep=50, num_inference_steps=4).images  # corrupted, and denoised again
        ```
    """

    task = "unconditional-image-generation"
    network_name = "unet"
    model_cpu_offload_seq = "unet"

    def __init__(self, unet: ModelMixin | Denoiser, scheduler: SchedulerMixin, num_class_labels: int | None = None):
        super().__init__()
        self.register_parts(unet, scheduler, num_class_labels)
        self.image_processor = VaeImageProcessor(do_resize=False, do_normalize=False)
        self.mask_processor = VaeImageProcessor(
            do_resize=False, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        self.check_components()

    def check_components(self) -> None:
        """Checks that the network fits the scheduler, and that the shape of the images is known."""
        super().check_components()
        _ = self.sample_shape  # raises an error if the denoiser does not give it

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        shape = self.denoiser.sample_shape
        if shape is None or len(shape) != 3:
            raise ValueError(
                f"the denoiser of {type(self.unet).__name__} has sample_shape={shape}: it must be (C, H, W); set it, or "
                "`in_channels` and `sample_size` in the configuration of the network"
            )
        return shape

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        config = self.scheduler.config
        num_class_labels = self.config.get("num_class_labels")
        return ImageDenoiser(network, config.num_classes, config.prediction_type, num_class_labels)

    def encode(self, image) -> torch.Tensor:
        """Converts images to states `[B, C, H, W]`.

        An image is a PIL image, an array `[B, H, W, C]` or a tensor `[B, C, H, W]` of levels in [0, 1], or a
        `torch.LongTensor` of states. PIL images are read as [`~d3pm_hf.data.load_images`] reads files: 16-bit levels are scaled, transparent pixels
        are composited over white, EXIF orientation is applied, and colors become gray for a model of one channel.
        """
        self.check_pictures("image", image)
        image = flatten_pictures(image, self.sample_shape[0])
        if not isinstance(image, torch.Tensor) or image.is_floating_point():
            levels = self.scheduler.config.num_classes - 1
            image = (self.image_processor.preprocess(image) * levels).round().long()
        shape = self.sample_shape
        if tuple(image.shape[1:]) != shape:
            raise ValueError(
                f"the image has the shape {tuple(image.shape[1:])}, and this model generates {shape} (C, H, W)"
            )
        self.scheduler.check_states(image)
        return image.to(self._execution_device)

    @staticmethod
    def check_pictures(name: str, pictures) -> None:
        """Checks that `pictures` are PIL images, arrays or tensors: one, a batch, or a list of them."""
        each = pictures if isinstance(pictures, (list, tuple)) and pictures else [pictures]
        for picture in each:
            check_type(
                name, picture, (Image, np.ndarray, torch.Tensor), "a PIL image, an array, a tensor, or a list of them"
            )
            if not isinstance(picture, Image) and picture.ndim not in (2, 3, 4):
                raise ValueError(f"{name} is {describe(picture)}: a picture has 2 or 3 axes, and a batch 4")

    def encode_mask(self, mask_image) -> torch.Tensor:
        """Converts a mask image, white or transparent where to paint, to the mask of known pixels `[B, C, H, W]`."""
        self.check_pictures("mask_image", mask_image)
        mask_image = flatten_pictures(mask_image, 1)
        if isinstance(mask_image, torch.Tensor):
            mask_image = mask_image.float()
        channels, *size = self.sample_shape
        is_known = self.mask_processor.preprocess(mask_image) < 0.5  # [B, 1, H, W]
        if list(is_known.shape[2:]) != size:
            raise ValueError(f"mask_image is {tuple(is_known.shape[2:])}, and the image {tuple(size)} (H, W)")
        return is_known[:, :1].expand(-1, channels, -1, -1).to(self._execution_device)

    def decode(self, states: torch.Tensor, output_type: str = "pil"):
        """Converts states `[B, C, H, W]` to images: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the states themselves."""
        check_choice("output_type", output_type, IMAGE_OUTPUT_TYPES)
        self.scheduler.check_states(states)
        if states.ndim != 4:
            raise ValueError(f"states have the shape {tuple(states.shape)}: pass a batch [B, C, H, W]")
        if output_type == "latent":
            return states
        pixels = states.float() / (self.scheduler.config.num_classes - 1)
        return self.image_processor.postprocess(pixels, output_type)

    @torch.no_grad()
    def __call__(
        self,
        batch_size: int = 1,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        image=None,
        mask_image=None,
        start_timestep: int | None = None,
        num_particles: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        sampler: str | Sampler | None = None,
        condition: dict | None = None,
        class_labels: int | list[int] | torch.Tensor | None = None,
        guidance_scale: float = 1.0,
        classifier: ClassifierGuidance | None = None,
        reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reward_scale: float = 1.0,
        spacing: str = "optimized",
        sampler_kwargs: dict | None = None,
    ) -> D3PMImagePipelineOutput | tuple:
        """Generates images, inpaints part of an image, or reconstructs an image from its corruption.

        Args:
            batch_size (`int`, defaults to 1): Number of images, unless `image` or `class_labels` hold several.
            num_images_per_prompt (`int`, defaults to 1): Number of samples for each entry of the batch. The samples of one
                entry follow each other.
            num_inference_steps (`int`, *optional*): Number of steps. By default all timesteps of the process.
            timesteps (`list[int]`, *optional*): Strictly decreasing timesteps, in place of `num_inference_steps`.
            image (PIL image, array, tensor, or a list, *optional*): Image to inpaint or to reconstruct.
            mask_image (PIL image, array, tensor, or a list, *optional*): White (1) where to paint, black (0) where `image`
                is known. Known pixels are returned unchanged.
            start_timestep (`int`, *optional*): Timestep up to which `image` is corrupted, to be reconstructed from there.
            num_particles (`int`, defaults to 1): Number of particles per sample. In the limit of many particles, the
                distribution given the known pixels is that of the model ([`~samplers.particle_filter`]). Absorbing processes
                fill in with one.
            generator (`torch.Generator`, or a list of one per sample, *optional*): Source of all random numbers. With a
                list, each sample is the same as in a call of its own.
            latents (`torch.LongTensor` of shape `[B, C, H, W]`, *optional*): State to start from, in place of a draw from
                the prior.
            temperature (`float`, defaults to 1.0): Divides the logits of the network. 0 takes the most likely state.
            top_k (`int`, *optional*): Number of most likely states of x_0 that are kept.
            top_p (`float`, *optional*): Total probability of the most likely states of x_0 that are kept.
            output_type (`str`, defaults to `"pil"`): `"pil"`, `"np"`, `"pt"`, or `"latent"` for the states.
            return_dict (`bool`, defaults to `True`): Whether to return a [`D3PMImagePipelineOutput`] or a tuple.
            callback_on_step_end (`Callable`, *optional*): Called as `callback(pipeline, step, timestep, tensors)` after each
                step. It returns `None`, or a dictionary whose `latents` replace the state.
            callback_on_step_end_tensor_inputs (`list[str]`, defaults to `["latents"]`): Names of the tensors that the
                callback receives: `latents` (x_s), `sample` (x_t), `previous_timestep` (s, -1 for the data) and
                `pred_original_sample` (the most likely x_0, computed only if named here).
            sampler (`str` or `Callable`, *optional*): How x_0 is drawn: `"ancestral"`, `"positions_first"`, `"first_hitting"`,
                `"particle_filter"`, `"predictor_corrector"`, `"confidence"`, `"remasking"`, a name of your own
                ([`~samplers.register_sampler`]) or a function with the signature of [`~samplers.Sampler`]. By default the
                particle filter if `num_particles` is above 1; else positions first, which draws from the same distribution with
                fewer calls of the network, where it applies; else ancestral sampling.
            condition (`dict`, *optional*): Further arguments of the denoiser. Tensors have one row for each entry of the
                batch, or one row for all.
            class_labels (`int`, `list[int]` or `torch.LongTensor` of shape `[B]`, *optional*): Class of each entry of the
                batch, or one for all. Without it, a network with a null class samples without a class.
            guidance_scale (`float`, defaults to 1.0): Scale w of classifier-free guidance, log p(x) + w (log p(x | c) -
                log p(x)): 1 is the conditional model. Any other value, except for 0, doubles the rows of the network.
            classifier ([`~samplers.ClassifierGuidance`], *optional*): A function of the states that samples follow.
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
        check_int("num_images_per_prompt", num_images_per_prompt, 1)
        check_choice("output_type", output_type, IMAGE_OUTPUT_TYPES)
        if (image is None) != (mask_image is None and start_timestep is None):
            raise ValueError("inpainting takes image and mask_image, reconstruction image and start_timestep")

        # 2. Encode what is known.
        known = None if image is None else self.encode(image)
        is_known = None if mask_image is None else self.encode_mask(mask_image)
        if known is not None:
            batch_size = max(batch_size, len(known))
        condition, batch_size = self.add_classes(class_labels, condition, batch_size)

        # 3. Sample x_0.
        report: dict[str, torch.Tensor] = {}
        states = self.sample_states(
            batch_size,
            self.sample_shape,
            known,
            is_known,
            num_per_input=num_images_per_prompt,
            num_inference_steps=num_inference_steps,
            timesteps=timesteps,
            start_timestep=start_timestep,
            spacing=spacing,
            sampler=sampler,
            sampler_kwargs=sampler_kwargs,
            num_particles=num_particles,
            condition=condition,
            guidance_scale=guidance_scale,
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
        images = self.decode(states, output_type)
        return D3PMImagePipelineOutput(images=images, **report) if return_dict else (images, *report.values())
