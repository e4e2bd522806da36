# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Denoisers for rows of a table: a residual MLP over all columns at once, and a transformer over the columns."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_timestep_embedding
from torch import nn

from ..utils.checks import check_float, check_int, check_type
from .denoisers import Denoiser


class StateVectors(nn.Module):
    """A vector for each state of each column, a smooth function of the state in ordered columns.

    The vector of state k of an ordered column of K states is a sum of cosines that count less the faster they vary,

        v(k) = sum over j < J of c_j cos(pi j (k + 1/2) / K) / (j + 1),   J = min(num_frequencies, K),

    so that what is learned of a state holds for its neighbors, too. All other states have a free vector each, and a frequent state of
    an ordered column, such as a zero among measurements, has one that is added to v(k).

    Args:
        sizes (`list[int]`): Number of states of each column.
        is_ordered (`list[bool]`): Whether the states of each column have an order.
        frequent_states (`list[list[int]]`): The states of each column that have a free vector although the column is ordered.
        width (`int`): Size of a vector.
        num_frequencies (`int`): Largest number of cosines.
        std (`float`): Standard deviation of the vectors at the beginning.
    """

    smooth_states: torch.Tensor
    free_states: torch.Tensor
    cosines: torch.Tensor

    def __init__(
        self,
        sizes: list[int],
        is_ordered: list[bool],
        frequent_states: list[list[int]],
        width: int,
        num_frequencies: int,
        std: float = 1.0,
    ):
        super().__init__()
        self.num_states, self.smooth_sizes = sum(sizes), []
        smooth, free, first = [], [], 0
        cosines = [torch.zeros(0, num_frequencies)]
        for size, has_order, frequent in zip(sizes, is_ordered, frequent_states):
            own = list(range(first, first + size))
            if has_order and size > 2:
                j, k = torch.arange(num_frequencies), torch.arange(size)[:, None]
                cosines.append(torch.cos(torch.pi * j * (k + 0.5) / size) * (j < size) / (j + 1))
                self.smooth_sizes.append(size)
                smooth += own
                free += [own[state] for state in frequent]
            else:
                free += own
            first += size
        buffers = {"smooth_states": torch.tensor(smooth).long(), "free_states": torch.tensor(free).long()}
        for name, value in {**buffers, "cosines": torch.cat(cosines)}.items():
            self.register_buffer(name, value, persistent=False)
        power = self.cosines.square().sum(1).mean() if smooth else 1.0
        self.coefficients = nn.Parameter(
            std / power**0.5 * torch.randn(len(self.smooth_sizes), num_frequencies, width)
        )
        is_added = torch.isin(self.free_states, self.smooth_states)[:, None]
        self.free = nn.Parameter(torch.where(is_added, 0.0, std * torch.randn(len(free), width)))

    def forward(self) -> torch.Tensor:
        """The vectors of the states of all columns after each other, `[sum of sizes, width]`."""
        vectors = self.free.new_zeros(self.num_states, self.free.shape[1])
        if self.smooth_sizes:
            parts = zip(self.cosines.split(self.smooth_sizes), self.coefficients)  # [K, J] and [J, width] of a column
            smooth = torch.cat([cosines @ coefficients for cosines, coefficients in parts])
            vectors = vectors.index_copy(0, self.smooth_states, smooth)
        return vectors.index_add(0, self.free_states, self.free)


class TableDenoiser(Denoiser):
    """Base class of networks over the columns of a table: where the states of each column are among those of all.

    A column has its own states 0, 1, .. and, with `has_mask`, the mask, the last of the K states of the whole, which all columns share.
    """

    sizes: torch.Tensor
    first_states: torch.Tensor
    mask_inputs: torch.Tensor
    places: torch.Tensor
    num_classes: int
    output_bias: torch.Tensor

    def set_columns(
        self,
        num_categories: list[int],
        is_ordered: list[bool] | None,
        frequent_states: list[list[int]] | None,
        has_mask: bool,
        hidden_size: int,
        embedding_size: int,
        num_frequencies: int,
        num_timesteps: int | None,
    ) -> None:
        """Sets the vectors of the states in the input and in the output, the buffers that translate states, and `reads_timestep`."""
        check_type("num_categories", num_categories, (list, tuple), "a list of numbers of states")
        for size in num_categories:
            check_int("an entry of num_categories", size, 2)
        check_type("has_mask", has_mask, bool, "True or False")
        if not num_categories:
            raise ValueError("num_categories is empty: a table has at least one column")
        ordered = [False] * len(num_categories) if is_ordered is None else is_ordered
        frequent = [[] for _ in num_categories] if frequent_states is None else frequent_states
        for name, entries in (("is_ordered", ordered), ("frequent_states", frequent)):
            check_type(name, entries, (list, tuple), "a list with an entry for each column")
            if len(entries) != len(num_categories):
                raise ValueError(
                    f"{name} has {len(entries)} entries for {len(num_categories)} columns: pass one for each"
                )
        for states, size in zip(frequent, num_categories):
            check_type("an entry of frequent_states", states, (list, tuple), "a list of states")
            for state in states:
                check_int("a state of frequent_states", state, 0, size - 1)
        check_int("num_frequencies", num_frequencies, 1)
        if num_timesteps is not None:
            check_int("num_timesteps", num_timesteps, 1)
        self.reads_timestep = num_timesteps is not None
        sizes = torch.tensor(num_categories)
        self.num_classes, self.has_mask = int(sizes.max()) + has_mask, has_mask
        self.num_columns, self.num_outputs = len(sizes), int(sizes.sum())
        # The masks of all columns are the states of one more column.
        masks = [self.num_columns] if has_mask else []
        self.inputs = StateVectors(
            [*num_categories, *masks], [*ordered, False], [*frequent, []], embedding_size, num_frequencies
        )
        self.outputs = StateVectors(
            num_categories, ordered, frequent, hidden_size, num_frequencies, std=0.5 * hidden_size**-0.5
        )
        self.output_bias = nn.Parameter(torch.zeros(self.num_outputs))
        buffers = {
            "sizes": sizes,
            "first_states": sizes.cumsum(0) - sizes,  # [N], among those of all columns
            "mask_inputs": self.num_outputs + torch.arange(self.num_columns),
            "places": (torch.arange(self.num_classes) < sizes[:, None]).flatten().nonzero()[:, 0],  # of the N K logits
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def read(self, x_t: torch.Tensor) -> torch.Tensor:
        """Vectors `[B, N, d]` of states `[B, N]`."""
        rows = x_t + self.first_states
        if self.has_mask:
            rows = torch.where(x_t == self.num_classes - 1, self.mask_inputs, rows)
        return nn.functional.embedding(rows, self.inputs())

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

    Each state of each column has a vector v(k) ([`StateVectors`]). Those of a row are read together and pass through residual blocks to h,
    and the logit of state k is b(k) + h . w(k), with other such vectors w.

    Args:
        num_categories (`list[int]`): Number of data states of each column.
        is_ordered (`list[bool]`, *optional*): Whether the states of each column have an order, as the bins of a number have.
        frequent_states (`list[list[int]]`, *optional*): States of ordered columns that are too frequent to be like their neighbors.
        has_mask (`bool`, defaults to `True`): Whether the process has a mask, the last state.
        hidden_size (`int`, defaults to 256): Width of the blocks.
        num_layers (`int`, defaults to 3): Number of residual blocks.
        embedding_size (`int`, defaults to 16): Width of the vector of a state in the input.
        num_frequencies (`int`, defaults to 32): Number of cosines that the vectors of an ordered column are made of.
        dropout (`float`, defaults to 0.1): Dropout inside the blocks.
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
        frequent_states: list[list[int]] | None = None,
        has_mask: bool = True,
        hidden_size: int = 256,
        num_layers: int = 3,
        embedding_size: int = 16,
        num_frequencies: int = 32,
        dropout: float = 0.1,
        num_timesteps: int | None = None,
    ):
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "embedding_size": embedding_size}
        for name, value in sizes.items():
            check_int(name, value, 1)
        check_float("dropout", dropout, 0, 1)
        widths = hidden_size, embedding_size, num_frequencies
        self.set_columns(num_categories, is_ordered, frequent_states, has_mask, *widths, num_timesteps)
        self.input = nn.Linear(self.num_columns * embedding_size, hidden_size)
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
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor, **condition) -> torch.Tensor:
        """Logits of x_0, `[B, N, K]`, of rows x_t `[B, N]`. There is no condition: what is given is part of the row."""
        refuse_condition(condition)
        hidden = self.input(self.read(x_t).flatten(1))
        if self.time is not None:
            hidden = hidden + self.time(embed_timesteps(timestep, hidden))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.spread(nn.functional.linear(self.norm(hidden), self.outputs(), self.output_bias))


class D3PMTableTransformer(TableDenoiser, ModelMixin, ConfigMixin):
    """A transformer over the columns of a row: each column is a token.

    The vectors of the states in the input and in the output are those of [`StateVectors`], as in [`D3PMTableMLP`].

    Args:
        num_categories (`list[int]`): Number of data states of each column.
        is_ordered (`list[bool]`, *optional*): Whether the states of each column have an order, as the bins of a number have.
        frequent_states (`list[list[int]]`, *optional*): States of ordered columns that are too frequent to be like their neighbors.
        has_mask (`bool`, defaults to `True`): Whether the process has a mask, the last state.
        hidden_size (`int`, defaults to 128): Width of a token.
        num_layers (`int`, defaults to 4): Number of layers.
        num_heads (`int`, defaults to 4): Number of attention heads.
        num_frequencies (`int`, defaults to 32): Number of cosines that the vectors of an ordered column are made of.
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
        frequent_states: list[list[int]] | None = None,
        has_mask: bool = True,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        num_frequencies: int = 32,
        dropout: float = 0.0,
        num_timesteps: int | None = None,
    ):
        super().__init__()
        for name, value in {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}.items():
            check_int(name, value, 1)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size is {hidden_size}: it must be a multiple of num_heads, which is {num_heads}")
        check_float("dropout", dropout, 0, 1)
        widths = hidden_size, hidden_size, num_frequencies
        self.set_columns(num_categories, is_ordered, frequent_states, has_mask, *widths, num_timesteps)
        self.column_embedding = nn.Parameter(0.02 * torch.randn(self.num_columns, hidden_size))
        self.time = nn.Linear(hidden_size, hidden_size) if self.reads_timestep else None
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, 2 * hidden_size, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor, **condition) -> torch.Tensor:
        """Logits of x_0, `[B, N, K]`, of rows x_t `[B, N]`. There is no condition: what is given is part of the row."""
        refuse_condition(condition)
        hidden = self.read(x_t) + self.column_embedding  # [B, N, D]
        if self.time is not None:
            hidden = hidden + self.time(embed_timesteps(timestep, hidden[:, 0]))[:, None]
        hidden = self.norm(self.layers(hidden))
        parts = zip(hidden.unbind(1), self.outputs().split(self.sizes.tolist()))
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
