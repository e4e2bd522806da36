# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Data sets in memory: crops of one long text, and rows of equal shape.

`dataset[i]` is item `i` as it is evaluated. `dataset[i, seed]` is the same item with a random augmentation. It depends on
`i` and `seed` only, so that a run reads the same data with any number of workers and after it was resumed. Tokens are
stored as small integers and become int64 when an item is read.
"""

import mmap

import numpy as np
import torch
from torch.utils.data import Dataset

from ..utils.checks import check_int, check_type, describe


# Number of tokens per chunk in a pass over all data, which limits its memory.
CHUNK_TOKENS = 1 << 22


def token_dtype(num_tokens: int) -> type[np.integer]:
    """Returns the smallest integer type for `num_tokens` states."""
    return np.uint8 if num_tokens <= 1 << 8 else np.uint16 if num_tokens <= 1 << 16 else np.int32


def check_tokens(tokens: np.ndarray, num_tokens: int) -> None:
    """Checks that an array contains states in 0 .. num_tokens - 1 only."""
    check_type("tokens", tokens, np.ndarray, "a numpy array of integers")
    check_int("num_tokens", num_tokens, 1)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens have the type {tokens.dtype}: pass integers, such as numpy.uint8")
    if not tokens.size:
        raise ValueError(f"tokens are {describe(tokens)}: pass a data set that is not empty")
    for extreme in (int(tokens.max()), int(tokens.min())):
        if not 0 <= extreme < num_tokens:
            position = tuple(int(i) for i in np.argwhere(tokens == extreme)[0])
            raise ValueError(
                f"token {extreme} at position {position} is outside the vocabulary of {num_tokens}: check that the data "
                "and num_tokens agree"
            )


def split_item(item, size: int) -> tuple[int, np.random.Generator | None]:
    """Returns the index and the random generator for the augmentation of an item `i` or `(i, seed)`."""
    index, seed = item if isinstance(item, tuple) else (item, None)
    index = range(size)[index]  # as for a list: negative from the end, and an IndexError outside
    return index, None if seed is None else np.random.default_rng([index, seed])


class TokenDataset(Dataset):
    """A data set of one array, `tokens`. A memory-mapped file is sent to a worker by its name; numpy would send its content."""

    tokens: np.ndarray

    def __getstate__(self) -> dict:
        tokens = self.tokens
        if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap.mmap):  # a whole file, not a slice of one
            where = {
                "filename": tokens.filename,
                "dtype": tokens.dtype,
                "offset": tokens.offset,
                "shape": tokens.shape,
            }
            return {**self.__dict__, "tokens": where}
        return self.__dict__

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokens, dict):
            self.tokens = np.memmap(mode="r", **self.tokens)


class TextCrops(TokenDataset):
    """Stretches of `length` tokens of one long text.

    Items are consecutive stretches. With a seed, item `i` starts at a random position in [i * length, (i + 1) * length),
    so that the crops of an epoch are spread evenly over the text.

    Args:
        tokens (`np.ndarray` of shape `[n]`): The whole text. A memory-mapped file stays on disk.
        length (`int`): Number of tokens of an item.
        num_tokens (`int`): Number of states of a token, without a mask.

    Examples:
        ```python
        import numpy as np
        from d3pm_hf.data import TextCrops

        dataset = TextCrops(np.arange(100) % 27, length=32, num_tokens=27)
        assert len(dataset) == 3 and dataset[0].tolist()[:3] == [0, 1, 2]
        ```
    """

    def __init__(self, tokens: np.ndarray, length: int, num_tokens: int):
        check_tokens(tokens, num_tokens)
        check_int("length", length, 1)
        if tokens.ndim != 1:
            raise ValueError(f"tokens are {describe(tokens)}: one long text must have the shape [n]")
        if len(tokens) < length:
            raise ValueError(
                f"the text has {len(tokens)} tokens, fewer than length={length}: pass a longer text or a smaller length"
            )
        self.tokens, self.length, self.num_tokens = tokens, length, num_tokens

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    @property
    def layout(self) -> str:
        """Description of an item, for protocols."""
        return f"consecutive stretches of {self.length} tokens"

    def __getitem__(self, item) -> torch.Tensor:
        index, rng = split_item(item, len(self))
        start = index * self.length
        if rng is not None:
            # The last crop must not go beyond the end of the text.
            start += int(rng.integers(min(self.length, len(self.tokens) - self.length - start + 1)))
        return torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))  # [N]


class Rows(TokenDataset):
    """Items of equal shape: packed text `[N]`, or images `[C, H, W]`.

    Args:
        tokens (`np.ndarray` of shape `[n, N]` or `[n, C, H, W]`): All items. A memory-mapped file stays on disk.
        num_tokens (`int`): Number of states of a token or pixel, without a mask.
        random_flip (`bool`, defaults to `False`): Whether a seed mirrors half of the images left to right.
        num_words (`int`, *optional*): Number of words in the rows, for a perplexity per word.
        labels (`np.ndarray` of shape `[n]`, *optional*): Class of each item. An item is then a dictionary of `x_0` and `label`.

    Examples:
        ```python
        import numpy as np
        from d3pm_hf.data import Rows

        dataset = Rows(np.random.randint(0, 16, (10, 1, 8, 8), dtype=np.uint8), num_tokens=16, random_flip=True)
        assert dataset[0].shape == dataset[0, 1234].shape == (1, 8, 8)  # 1234 decides whether it is mirrored
        ```
    """

    def __init__(
        self,
        tokens: np.ndarray,
        num_tokens: int,
        random_flip: bool = False,
        num_words: int | None = None,
        labels: np.ndarray | None = None,
    ):
        check_tokens(tokens, num_tokens)
        if tokens.ndim < 2:
            raise ValueError(f"tokens are {describe(tokens)}: rows must have the shape [n, N] or [n, C, H, W]")
        if num_words is not None:
            check_int("num_words", num_words, 0)
        if labels is not None and (
            not isinstance(labels, np.ndarray)
            or not np.issubdtype(labels.dtype, np.integer)
            or labels.shape != tokens.shape[:1]
            or labels.min() < 0
        ):
            raise ValueError(
                f"labels are {describe(labels)}: pass an array of integers from 0 on, one for each of the {len(tokens)} items"
            )
        self.tokens, self.num_tokens, self.random_flip, self.num_words = tokens, num_tokens, random_flip, num_words
        self.labels = labels

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def layout(self) -> str:
        """Description of an item, for protocols."""
        shape = " x ".join(map(str, self.tokens.shape[1:]))
        return f"packed rows of {shape} tokens" if self.tokens.ndim == 2 else f"images of {shape}"

    @property
    def num_class_labels(self) -> int | None:
        """Number of classes, if there are any."""
        return None if self.labels is None else int(self.labels.max()) + 1

    def __getitem__(self, item) -> torch.Tensor | dict:
        index, rng = split_item(item, len(self))
        row = self.tokens[index]
        if self.random_flip and rng is not None and rng.integers(2):
            row = row[..., ::-1]
        x_0 = torch.from_numpy(row.astype(np.int64))  # [N] or [C, H, W]
        return x_0 if self.labels is None else {"x_0": x_0, "label": int(self.labels[index])}
