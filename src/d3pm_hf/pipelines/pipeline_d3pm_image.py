# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMImagePipeline: samples, inpainting and reconstructions of images."""

from collections.abc import Callable

import numpy as np
import torch
from diffusers import ImagePipelineOutput, SchedulerMixin, UNet2DModel
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image

from ..models.denoisers import Denoiser, ImageDenoiser
from ..utils.checks import check_choice, check_type, describe
from ..visualization.pictures import flatten_pictures
from .pipeline_d3pm import D3PMPipeline


class D3PMImagePipeline(D3PMPipeline):
    """Generates images with a `UNet2DModel` and a [`D3PMScheduler`].

    Args:
        unet (`UNet2DModel`): reads x_t scaled to [-1, 1]; puts out K logits per channel, or location and log-scale.
        scheduler ([`D3PMScheduler`]): the process over the K levels of a pixel.
    """

    task = "unconditional-image-generation"
    network_name = "unet"
    model_cpu_offload_seq = "unet"

    def __init__(self, unet: UNet2DModel, scheduler: SchedulerMixin):
        super().__init__()
        self.check_parts(scheduler, unet=unet)
        self.register_modules(unet=unet, scheduler=scheduler)
        self.image_processor = VaeImageProcessor(do_resize=False, do_normalize=False)
        self.mask_processor = VaeImageProcessor(
            do_resize=False, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        self.check_components()

    def check_components(self) -> None:
        """Checks that the network fits the scheduler, and that the shape of the images is known."""
        self.check_parts(self.scheduler, unet=self.unet)
        self.check_denoiser()
        shape = self.denoiser.sample_shape
        if shape is None or len(shape) != 3:
            raise ValueError(
                f"the denoiser of {type(self.unet).__name__} has sample_shape={shape}: it must be (C, H, W); set it, or "
                "`in_channels` and `sample_size` in the configuration of the network"
            )

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        config = self.scheduler.config
        return ImageDenoiser(network, config.num_classes, config.prediction_type)

    def encode(self, image) -> torch.LongTensor:
        """Pictures (PIL, arrays `[B, H, W, C]` or tensors `[B, C, H, W]` in [0, 1], or states) as states `[B, C, H, W]`.

        PIL images are read as [`~d3pm_hf.data.load_images`] reads files: 16-bit levels are scaled, transparent pixels
        are composited over white, EXIF orientation is applied, and colors become gray for a model of one channel.
        """
        self.check_pictures("image", image)
        image = flatten_pictures(image, self.denoiser.sample_shape[0])
        if not isinstance(image, torch.Tensor) or image.is_floating_point():
            levels = self.scheduler.config.num_classes - 1
            image = (self.image_processor.preprocess(image) * levels).round().long()
        shape = self.denoiser.sample_shape
        if tuple(image.shape[1:]) != shape:
            raise ValueError(
                f"the image has the shape {tuple(image.shape[1:])}, and this model makes {shape} (C, H, W)"
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

    def encode_mask(self, mask_image) -> torch.BoolTensor:
        """A picture of what to paint (white or transparent) as where pixels are known, `[B, C, H, W]`."""
        self.check_pictures("mask_image", mask_image)
        mask_image = flatten_pictures(mask_image, 1)
        if isinstance(mask_image, torch.Tensor):
            mask_image = mask_image.float()
        channels, *size = self.denoiser.sample_shape
        is_known = self.mask_processor.preprocess(mask_image) < 0.5  # [B, 1, H, W]
        if list(is_known.shape[2:]) != size:
            raise ValueError(f"mask_image is {tuple(is_known.shape[2:])}, and the image {tuple(size)} (H, W)")
        return is_known[:, :1].expand(-1, channels, -1, -1).to(self._execution_device)

    def decode(self, states: torch.LongTensor, output_type: str = "pil"):
        """States `[B, C, H, W]` as pictures: `"pil"`, `"np"`, `"pt"`, or `"latent"` for the states themselves."""
        check_choice("output_type", output_type, ("pil", "np", "pt", "latent"))
        self.scheduler.check_states(states)
        if states.ndim != 4:
            raise ValueError(f"states have the shape {tuple(states.shape)}: pass a batch [B, C, H, W]")
        if output_type == "latent":
            return states
        pixels = states.float() / (self.scheduler.config.num_classes - 1)
        return self.image_processor.postprocess(pixels, output_type, do_denormalize=[False] * len(pixels))

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
        latents: torch.LongTensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
    ) -> ImagePipelineOutput | tuple:
        """Generates images; with `image`, fills in part of it or reconstructs it.

        Args:
            batch_size (`int`, defaults to 1): how many; with several images in `image`, as many as those.
            num_images_per_prompt (`int`, defaults to 1): Number of samples for each entry of the batch, one after the
                other: `batch_size * num_images_per_prompt` in all.
            num_inference_steps (`int`, *optional*): all timesteps of the process by default.
            timesteps (`list[int]`, *optional*): your own, descending; instead of `num_inference_steps`.
            image (PIL image, array, tensor, or a list, *optional*): what to inpaint or to reconstruct.
            mask_image (PIL image, array, tensor, or a list, *optional*): white (1) where to paint, black (0) where `image`
                is known. Known pixels come back as they are.
            start_timestep (`int`, *optional*): corrupts `image` to this timestep, and denoises it from there.
            num_particles (`int`, defaults to 1): samples that compete for the best match with the known pixels. Exact as
                it grows; for absorbing processes 1 is enough.
            generator (`torch.Generator`, or a list of one per sample, *optional*): a batch with a list equals single runs.
            latents (`torch.LongTensor` of shape `[B, C, H, W]`, *optional*): the state to start from.
            temperature, top_k, top_p: reshape the network's distribution at each step.
            output_type (`str`, defaults to `"pil"`): `"pil"`, `"np"`, `"pt"`, or `"latent"` for the states.
            return_dict (`bool`, defaults to `True`): an `ImagePipelineOutput`, or a tuple.
            callback_on_step_end (`Callable`, *optional*): called as `f(pipeline, step, timestep, tensors)` after each step;
                returns nothing, or a dictionary whose `latents` replace the state.
            callback_on_step_end_tensor_inputs (`list[str]`): of `latents`, `sample` (x_t before the step),
                `previous_timestep` (that of `latents`; -1 for the data) and `pred_original_sample` (the most likely x_0;
                computed only if named here).
        """
        self.check_components()
        self.check_counts(
            batch_size=batch_size, num_images_per_prompt=num_images_per_prompt, num_particles=num_particles
        )
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"output_type is {output_type!r}: it must be pil, np, pt or latent")
        if (image is None) != (mask_image is None and start_timestep is None):
            raise ValueError("inpainting takes image and mask_image, reconstruction image and start_timestep")
        known = is_known = None
        if image is not None:
            known = self.encode(image)
            batch_size = max(batch_size, len(known))
        if mask_image is not None:
            is_known = self.encode_mask(mask_image)
        states = self.sample_states(
            batch_size,
            self.denoiser.sample_shape,
            known,
            is_known,
            num_per_input=num_images_per_prompt,
            num_inference_steps=num_inference_steps,
            timesteps=timesteps,
            start_timestep=start_timestep,
            num_particles=num_particles,
            generator=generator,
            latents=latents,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        images = self.decode(states, output_type)
        return ImagePipelineOutput(images=images) if return_dict else (images,)
