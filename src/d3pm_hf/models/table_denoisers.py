# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Denoisers for rows of a table: a residual MLP over all columns at once, and a transformer over the columns."""

from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from torch import nn

from ..utils.checks import check_float, check_int, check_type
from .denoisers import Denoiser


class TableDenoiser(Denoiser):
    """Base class of networks over the columns of a table: where the states of each column are among those of all.

    A column has its own states 0, 1, .. and, with `has_mask`, the mask, the last of the K states of the whole, which all columns share.
    """

    sizes: torch.Tensor
    first_inputs: torch.Tensor
    places: torch.Tensor
    rank_scale: torch.Tensor
    num_classes: int
    output_bias: Any

    def set_columns(self, num_categories: list[int], is_ordered: list[bool] | None, has_mask: bool) -> None:
        """Sets the sizes of the columns, and the buffers that translate states."""
        check_type("num_categories", num_categories, (list, tuple), "a list of numbers of states")
        for size in num_categories:
            check_int("an entry of num_categories", size, 2)
        check_type("has_mask", has_mask, bool, "True or False")
        if not num_categories:
            raise ValueError("num_categories is empty: a table has at least one column")
        ordered = [False] * len(num_categories) if is_ordered is None else is_ordered
        check_type("is_ordered", ordered, (list, tuple), "a list of True and False, one for each column")
        if len(ordered) != len(num_categories):
            raise ValueError(
                f"is_ordered has {len(ordered)} entries for {len(num_categories)} columns: pass one for each"
            )
        sizes = torch.tensor(num_categories)
        self.num_classes, self.has_mask = int(sizes.max()) + has_mask, has_mask
        self.num_columns, self.num_outputs = len(sizes), int(sizes.sum())
        buffers = {
            "sizes": sizes,
            "first_inputs": (sizes + int(has_mask)).cumsum(0) - sizes - int(has_mask),  # [N], rows of the embedding
            "places": (torch.arange(self.num_classes) < sizes[:, None])
            .flatten()
            .nonzero()
            .squeeze(1),  # of the N K logits
            "rank_scale": torch.where(torch.tensor(list(ordered), dtype=torch.bool), 2 / (sizes - 1), 0.0),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def set_timesteps(self, num_timesteps: int | None) -> None:
        """Sets whether the network reads the timestep, one of `num_timesteps`."""
        if num_timesteps is not None:
            check_int("num_timesteps", num_timesteps, 1)
        self.reads_timestep = num_timesteps is not None

    def read(self, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the embedding `[B, N]`, and the place of each state in the order of its column, in [-1, 1], zero if it has none."""
        is_masked = (x_t == self.num_classes - 1) if self.has_mask else torch.zeros_like(x_t, dtype=torch.bool)
        own = torch.where(is_masked, self.sizes, x_t)
        ranks = torch.where(is_masked | (self.rank_scale == 0), 0, own * self.rank_scale - 1)
        return own + self.first_inputs, ranks

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Logits of all columns after each other, `[B, sum of sizes]`, as `[B, N, K]`: minus infinity for states of other columns."""
        logits = values.new_full((len(values), self.num_columns * self.num_classes), -torch.inf)
        return logits.index_copy(1, self.places, values).unflatten(1, (self.num_columns, self.num_classes))

    def set_frequencies(self, frequencies: torch.Tensor) -> None:
        """Makes the network start from the frequencies of the states of each column, `[N, K]`, whatever it reads."""
        rows = frequencies.to(self.output_bias).clamp(min=1e-6).log()
        self.output_bias.data.copy_(rows.flatten()[self.places])


class D3PMTableMLP(TableDenoiser, ModelMixin, ConfigMixin):
    """A residual MLP that reads all columns of a row at once.

    Each state of each column has an embedding, and an ordered column its place in the order beside it. They are read together, pass
    through residual blocks, and one linear layer gives the logits of all columns.

    Args:
        num_categories (`list[int]`): Number of data states of each column.
        is_ordered (`list[bool]`, *optional*): Whether the states of each column have an order, as the bins of a number have.
        has_mask (`bool`, defaults to `True`): Whether the process has a mask, the last state.
        hidden_size (`int`, defaults to 512): Width of the blocks.
        num_layers (`int`, defaults to 4): Number of residual blocks.
        embedding_size (`int`, defaults to 16): Width of the embedding of a state.
        dropout (`float`, defaults to 0.0): Dropout inside the blocks.
        num_timesteps (`int`, *optional*): Number of timesteps, if the network reads them. A masking process needs none: the masks
            tell how much is left to predict.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMTableMLP

        network = D3PMTableMLP([4, 3, 8], hidden_size=32, num_layers=1)
        logits = network(torch.tensor([[2, 8, 8]]), torch.tensor(0))  # 8 is the mask
        assert logits.shape == (1, 3, 9) and (logits[0, 1, 3:] == -torch.inf).all()
        ```
    """

    @register_to_config
    def __init__(
        self,
        num_categories: list[int],
        is_ordered: list[bool] | None = None,
        has_mask: bool = True,
        hidden_size: int = 512,
        num_layers: int = 4,
        embedding_size: int = 16,
        dropout: float = 0.0,
        num_timesteps: int | None = None,
    ):
        super().__init__()
        self.set_columns(num_categories, is_ordered, has_mask)
        for name, value in (
            ("hidden_size", hidden_size),
            ("num_layers", num_layers),
            ("embedding_size", embedding_size),
        ):
            check_int(name, value, 1)
        check_float("dropout", dropout, 0, 1)
        self.set_timesteps(num_timesteps)
        self.embedding = nn.Embedding(self.num_outputs + self.num_columns * has_mask, embedding_size)
        self.input = nn.Linear(self.num_columns * (embedding_size + 1), hidden_size)
        self.time = nn.Linear(hidden_size, hidden_size) if self.reads_timestep else None
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden_size),
                nn.Linear(hidden_size, hidden_size),
                nn.SiLU(),
                nn.Dropout(dropout),
                nn.Linear(hidden_size, hidden_size),
            )
            for _ in range(num_layers)
        )
        self.norm, self.output = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, self.num_outputs)

    @property
    def output_bias(self) -> torch.Tensor:
        """Bias of the logits of all columns."""
        return self.output.bias

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor, **condition) -> torch.Tensor:
        """Logits of x_0, `[B, N, K]`, of rows x_t `[B, N]`. There is no condition: what is given is part of the row."""
        refuse_condition(condition)
        rows, ranks = self.read(x_t)
        embedded = self.embedding(rows).flatten(1)  # [B, N d]
        hidden = self.input(torch.cat([embedded, ranks.to(embedded)], 1))
        if self.time is not None:
            hidden = hidden + self.time(embed_timesteps(timestep, hidden))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.spread(self.output(self.norm(hidden)))


class D3PMTableTransformer(TableDenoiser, ModelMixin, ConfigMixin):
    """A transformer over the columns of a row: each column is a token.

    Args:
        num_categories (`list[int]`): Number of data states of each column.
        is_ordered (`list[bool]`, *optional*): Whether the states of each column have an order, as the bins of a number have.
        has_mask (`bool`, defaults to `True`): Whether the process has a mask, the last state.
        hidden_size (`int`, defaults to 128): Width of a token.
        num_layers (`int`, defaults to 4): Number of layers.
        num_heads (`int`, defaults to 4): Number of attention heads.
        dropout (`float`, defaults to 0.0): Dropout inside the layers.
        num_timesteps (`int`, *optional*): Number of timesteps, if the network reads them.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMTableTransformer

        network = D3PMTableTransformer([4, 3, 8], hidden_size=32, num_layers=1)
        assert network(torch.tensor([[2, 8, 8]]), torch.tensor(0)).shape == (1, 3, 9)  # 8 is the mask
        ```
    """

    @register_to_config
    def __init__(
        self,
        num_categories: list[int],
        is_ordered: list[bool] | None = None,
        has_mask: bool = True,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        num_timesteps: int | None = None,
    ):
        super().__init__()
        self.set_columns(num_categories, is_ordered, has_mask)
        for name, value in (("hidden_size", hidden_size), ("num_layers", num_layers), ("num_heads", num_heads)):
            check_int(name, value, 1)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size is {hidden_size}: it must be a multiple of num_heads, which is {num_heads}")
        check_float("dropout", dropout, 0, 1)
        self.set_timesteps(num_timesteps)
        self.embedding = nn.Embedding(self.num_outputs + self.num_columns * has_mask, hidden_size)
        self.column_embedding = nn.Parameter(0.02 * torch.randn(self.num_columns, hidden_size))
        self.rank_embedding = nn.Parameter(0.02 * torch.randn(self.num_columns, hidden_size))
        self.time = nn.Linear(hidden_size, hidden_size) if self.reads_timestep else None
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, 2 * hidden_size, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden_size)
        self.output_weight = nn.Parameter(hidden_size**-0.5 * torch.randn(self.num_outputs, hidden_size))
        self.output_bias = nn.Parameter(torch.zeros(self.num_outputs))

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor, **condition) -> torch.Tensor:
        """Logits of x_0, `[B, N, K]`, of rows x_t `[B, N]`. There is no condition: what is given is part of the row."""
        refuse_condition(condition)
        rows, ranks = self.read(x_t)
        hidden = self.embedding(rows) + self.column_embedding  # [B, N, D]
        hidden = hidden + ranks.to(hidden)[..., None] * self.rank_embedding
        if self.time is not None:
            hidden = hidden + self.time(embed_timesteps(timestep, hidden[:, 0]))[:, None]
        hidden = self.norm(self.layers(hidden))
        parts = zip(hidden.unbind(1), self.output_weight.split(self.sizes.tolist()))
        return self.spread(torch.cat([column @ weight.T for column, weight in parts], 1) + self.output_bias)


def refuse_condition(condition: dict) -> None:
    """Checks that there is no condition."""
    if condition:
        raise ValueError(
            f"condition has {sorted(condition)}, and a network over columns takes none: pass values as `given`"
        )


def embed_timesteps(timestep: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sinusoidal embeddings of timesteps, one or one for each row, of the shape of `like` `[B, D]`."""
    times = torch.as_tensor(timestep, device=like.device).expand(len(like))
    return get_timestep_embedding(times, like.shape[1]).to(like)
