"""Indexed attention over latents in pages: each query attends to the tokens that its layer's indexer chooses.

The model's own indexer runs for one sequence at a time, with the sequence's index keys in the pages, and for few
queries at once, since it has a score for each query, head and key.

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moetool.runtime.decoding import is_indexed
from moetool.runtime.kv.pages import KvPages

MOST_SCORES = 2**24
"""Most scores of an indexer, and numbers of a mask, at once."""


@dataclass(slots=True)
class _IndexKeys:
    """Index keys of one sequence, which its indexer takes for a cache.

    Attributes:
        rows: index keys of all sequences.
        row_N: rows of this one.
        held: number of its tokens whose keys are there.
    """

    rows: torch.Tensor
    row_N: torch.Tensor
    held: int

    def update_indexer(self, new_1TE: torch.Tensor, layer: int) -> torch.Tensor:
        """Keep the keys of the next tokens; returns those of all tokens so far, [1, N, E]."""
        end = self.held + new_1TE.shape[1]
        self.rows.index_copy_(0, self.row_N[self.held : end], new_1TE[0])
        self.held = end
        return self.rows.index_select(0, self.row_N[:end])[None]


def choose_by_sequence(
    indexer: Any,
    hidden_1TD: torch.Tensor,
    query_1TR: torch.Tensor,
    rotary: tuple[torch.Tensor, ...],
    mask: torch.Tensor,
    positions: torch.Tensor | None = None,
    **cached: KvPages | None,
) -> list[torch.Tensor | None]:
    """The forward of an indexer over a batch, in place of its class's.

    Args:
        mask: not used.
        cached: the pages, under the name that the model gives its cache; None: the tokens are one whole sequence.

    Returns:
        For each sequence, the keys of each query, int32 [t, k], some of them repeated; None: all up to its own.
    """
    ((name, pages),) = cached.items()
    count, device = hidden_1TD.shape[1], hidden_1TD.device
    if pages is None:
        rows, key_rows = hidden_1TD.new_empty(count, indexer.head_dim), torch.arange(count, device=device)
        sequences = [(0, count, 0, count)]
    else:
        assert pages.batch is not None
        rows, key_rows, sequences = pages.index_keys[indexer.layer_idx], pages.batch.key_rows, pages.batch.sequences
    choices: list[torch.Tensor | None] = []
    for begin, end, first, last in sequences:
        keys = _IndexKeys(rows, key_rows[first:last], last - first - (end - begin))
        chooses = last - first > indexer.index_topk
        parts: list[torch.Tensor] = []
        step = max(1, MOST_SCORES // (indexer.n_heads * (last - first)))
        for at in range(begin, end, step):
            part = slice(at, min(at + step, end))
            held = keys.held + part.stop - at
            causal_TN = torch.ones(part.stop - at, held, dtype=torch.bool, device=device).tril(keys.held)
            chosen_1TK = type(indexer).forward(
                indexer,
                hidden_1TD[:, part],
                query_1TR[:, part],
                tuple(each[:, part] for each in rotary),
                causal_TN[None],
                None,
                **{name: keys},
            )
            if chooses:
                own_T1 = torch.arange(held - len(causal_TN), held, device=device)[:, None]
                parts.append(_up_to_own(chosen_1TK[0], own_T1, indexer.index_topk))
        choices.append(torch.cat(parts) if chooses else None)
    return choices


def _up_to_own(chosen_TK: torch.Tensor, own_T1: torch.Tensor, most: int) -> torch.Tensor:
    """Keys of each query, int32 [T, most]; its best one, again, stands for those after its own."""
    best_T1 = chosen_TK[:, :1]
    padded_TK = torch.cat([chosen_TK, best_T1.expand(-1, most - chosen_TK.shape[1])], dim=1)
    return torch.where(padded_TK <= own_T1, padded_TK, best_T1).int()


def indexed_arguments(model: Any) -> dict[str, Any]:
    """Arguments of a forward whose indexers are `choose_by_sequence`: a mask, which they and attention ignore."""
    if not is_indexed(model.config.get_text_config()):
        return {}
    return {"attention_mask": {"indexed_attention": torch.zeros(1, 1, 1, 1, device=model.device)}}
