# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text pipelines as a model of the LM Evaluation Harness (lm-eval).

    python -m d3pm_hf.evaluation.lm_harness --model d3pm --model_args pretrained=FOLDER,order=margin --tasks mine --include_path tasks

The arguments are those of `lm_eval`, which knows the model `d3pm` once this module is imported. Versions after 0.4.13 import it by
themselves, by an entry point of the package, so that `lm_eval --model d3pm` is enough. Likelihoods are exact ones of a
sampler that reveals tokens in an `order` ([`evaluate_likelihood`]), and not bounds.
"""

from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm.auto import tqdm

from ..likelihood.exact import score_continuations
from ..likelihood.orders import MEASURES, block_timesteps, check_has_orders
from ..likelihood.texts import Row
from ..models.text_denoisers import num_positions
from ..pipelines import D3PMPipeline
from ..utils.checks import check_choice, check_int
from ..utils.names import EXACT_ORDERS


__all__ = ["D3PMHarnessModel"]

# Number of tokens that are generated if a task does not say how many.
DEFAULT_LENGTH = 32


@register_model("d3pm")
class D3PMHarnessModel(LM):
    """A text pipeline with an absorbing process, as lm-eval asks for it.

    Args:
        pretrained (`str`): Folder of the pipeline, or its id on the Hub.
        order (`str`, defaults to `"left_to_right"`): Order in which tokens are revealed, as in [`evaluate_likelihood`]:
            `"left_to_right"`, `"confidence"`, `"margin"` or `"entropy"`.
        block_length (`int`, defaults to 1): Number of tokens that each call of the network reveals.
        batch_size (`int`, defaults to 16): Number of requests in a batch.
        max_length (`int`, *optional*): Number of tokens that the network sees at once. Defaults to its number of positions, or, if that
            is not limited, to the `sequence_length` of the pipeline.
        device (`str`, *optional*): Device of the network.
        peft (`str`, *optional*): Folder or id on the Hub of a LoRA that is added to the pipeline, as for the model `hf` of lm-eval.
        kwargs: Further arguments of `D3PMPipeline.from_pretrained`, such as `revision` and `dtype`.

    Examples:
        ```python
        from lm_eval.api.instance import Instance
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model
        from d3pm_hf.evaluation.lm_harness import D3PMHarnessModel

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        pipeline.save_pretrained("tiny")
        model = D3PMHarnessModel("tiny", order="margin")  # `lm_eval.simple_evaluate(model, tasks=[...])`
        request = Instance("loglikelihood", {}, ("the quick ", "fox"), 0)
        print(model.loglikelihood([request], disable_tqdm=True))  # nats, and whether it is what the model writes
        ```
    """

    def __init__(
        self,
        pretrained: str,
        order: str = "left_to_right",
        block_length: int = 1,
        batch_size: int | str = 16,
        max_length: int | None = None,
        device: str | None = None,
        peft: str | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        check_choice("order", order, EXACT_ORDERS)
        self.order = order
        self.block_length, self.batch_size = read_int("block_length", block_length), read_int("batch_size", batch_size)
        kwargs.pop("max_batch_size", None)  # which lm-eval passes to every model
        self.pipeline: Any = D3PMPipeline.from_pretrained(pretrained, **kwargs)
        if peft is not None:
            self.pipeline.load_lora_weights(peft)
        if self.pipeline.task != "text-generation" or self.pipeline.tokenizer is None:
            raise ValueError(
                f"{pretrained} is a {type(self.pipeline).__name__}: lm-eval needs a text pipeline with a tokenizer"
            )
        check_has_orders(self.pipeline.scheduler)
        # lm-eval asks for "cuda:0" unless it is told otherwise.
        if device is not None and (not str(device).startswith("cuda") or torch.cuda.is_available()):
            self.pipeline.to(device)
        self.pipeline.set_progress_bar_config(disable=True)
        limit = num_positions(self.pipeline.denoiser.network) or self.pipeline.config.sequence_length
        self.max_length = read_int("max_length", max_length or limit or 256)
        before, after = self.pipeline.surrounding_tokens
        self.num_free = self.max_length - len(before + after)  # tokens of a text
        if self.num_free < 2:
            raise ValueError(f"max_length is {self.max_length}: a context and a continuation need two tokens at least")

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) of each request, and whether each of its tokens is the most likely one when it is revealed.

        The start of a context that is too long is cut off. A mask token in a context, as in `"the united [MASK] of america"`, is the
        place of its continuation, which is given what stands on both sides.
        """
        rows: list[Row] = []
        gap = self.pipeline.gap_token_id
        for request in requests:
            context, continuation = (self._tokenize(text) for text in request.args)
            if context.count(gap) > 1:
                raise ValueError(
                    f"a context has {context.count(gap)} mask tokens: one is the place of the continuation"
                )
            if len(continuation) > self.num_free:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens, and the network sees {self.num_free} at once: use "
                    "loglikelihood_rolling, or a network with more positions"
                )
            place = context.index(gap) if gap in context else len(context)
            room, after = self.num_free - len(continuation), context[place + 1 :]
            after = after[: max(room - place, room // 2)]  # the text before the gap keeps half of the room at least
            rows.append((context[max(0, place + len(after) - room) : place], continuation, after))
        return self._score(rows, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of each whole text: in windows, each given the tokens before it that the network has room for."""
        rows: list[Row] = []
        counts = []
        for request in requests:
            tokens, half = self._tokenize(request.args[0]), self.num_free // 2
            ends = [self.num_free, *range(self.num_free + half, len(tokens) + half, half)]
            starts = [0, *ends[:-1]]
            windows = [(start, min(end, len(tokens))) for start, end in zip(starts, ends) if start < len(tokens)]
            rows += [(tokens[max(0, end - self.num_free) : start], tokens[start:end], []) for start, end in windows]
            counts.append(len(windows))
        scores = [score for score, _ in self._score(rows, disable_tqdm)]
        return [sum(part.tolist()) for part in torch.tensor(scores, dtype=torch.float64).split(counts)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of the strings `until`: greedy, unless `do_sample` and a `temperature` are set.

        Requests of one length and temperature are batched. The start of a context that is too long is cut off.
        """
        groups: dict[tuple[int, float], list[int]] = {}
        for index, request in enumerate(requests):
            settings = request.args[1]
            number = max(1, min(int(settings.get("max_gen_toks", DEFAULT_LENGTH)), self.num_free - 1))
            temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample", False) else 0.0
            groups.setdefault((number, temperature), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as bar:
            for (number, temperature), group in groups.items():
                for first in range(0, len(group), self.batch_size):
                    chosen = group[first : first + self.batch_size]
                    contexts = [self._shorten(requests[index].args[0], self.num_free - number) for index in chosen]
                    for index, text in zip(chosen, self._continue(contexts, number, temperature)):
                        until = requests[index].args[1].get("until") or []
                        until = [until] if isinstance(until, str) else until
                        texts[index] = min((text.split(stop)[0] for stop in until if stop), key=len, default=text)
                    bar.update(len(chosen))
        return texts

    def _shorten(self, context: str, length: int) -> str:
        """The context, or the text of its last `length` tokens if it has more."""
        tokens = self._tokenize(context)
        return context if len(tokens) <= length else self.pipeline.tokenizer.decode(tokens[-length:])

    def _continue(self, contexts: list[str], number: int, temperature: float) -> list[str]:
        """The texts of `number` tokens after each context, in the order of the model."""
        output = self.pipeline(
            contexts,
            max_new_tokens=number,
            return_full_text=False,
            temperature=temperature,
            timesteps=block_timesteps(self.pipeline.scheduler, number, self.block_length),
            sampler="confidence",
            sampler_kwargs={"measure": MEASURES[self.order]},
            generator=[torch.Generator().manual_seed(0) for _ in contexts],
        )
        return output.texts

    def _score(self, rows: list[Row], disable_tqdm: bool) -> list[tuple[float, bool]]:
        if not rows:  # all texts are empty
            return []
        settings = self.order, self.block_length, self.batch_size
        log_p, is_greedy = score_continuations(self.pipeline, rows, *settings, progress_bar=not disable_tqdm)
        return list(zip(log_p.tolist(), is_greedy.tolist()))

    def _tokenize(self, text: str) -> list[int]:
        return self.pipeline.tokenize([text])[0] if text else []


def read_int(name: str, value: Any) -> int:
    """An argument of lm-eval, which may be written as a string, as a positive integer."""
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    check_int(name, number, 1)
    return number


def main() -> None:
    """The command line of lm-eval, which knows the model `d3pm`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
