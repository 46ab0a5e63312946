"""Products of an event's rows with weights in slots of a pool: a few calls for any number of experts.

A device's table maps each expert of a layer to its slot, so that the device finds addresses without the host. Experts
without a slot in the table are skipped and their rows left unchanged: an event in several waves makes the same call for
each wave with another table.

The choice of kernel depends only on the numbers of rows and experts, and a row's result only on that row and the
weight. So an expert's rows are bit-identical for every slot and every composition of the wave.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

FEW_ROWS = 64
"""Up to this number of rows each reads its expert's weights separately: rows rarely share an expert."""
_MAX_GROUPS = 1023
"""Most groups of torch's grouped product on a GPU."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of an event on the device: row r of the output is a choice, and reads row r // `each` of its input.

    Attributes:
        expert_R: the expert of each row, int32; ids beyond the table have no weights.
        num_experts: E, with weights.
        block_rows: most rows of a block; 0 if rows are few and each is separate.
        order_R: the rows by expert, int32.
        first_E, end_E: of each expert's rows among them, int32.
        expert_B: the expert of each block, int32; E for blocks that are not needed.
        block_E: the first block of each expert, int32.
    """

    expert_R: torch.Tensor
    num_experts: int
    block_rows: int = 0
    order_R: torch.Tensor | None = None
    first_E: torch.Tensor | None = None
    end_E: torch.Tensor | None = None
    expert_B: torch.Tensor | None = None
    block_E: torch.Tensor | None = None

    @classmethod
    def of(cls, index_TK: torch.Tensor, num_experts: int) -> "SlotRows":
        """Sort the rows of the choices [T, K] without synchronizing with the device."""
        expert_R = index_TK.reshape(-1).to(torch.int32)
        count = len(expert_R)
        if count <= FEW_ROWS:
            return cls(expert_R, num_experts)
        size = 64 if count >= 32 * num_experts else 16
        sorted_R, order_R = expert_R.sort(stable=True)
        numbers = torch.arange(num_experts, dtype=torch.int32, device=expert_R.device)
        end_E = torch.searchsorted(sorted_R, numbers, right=True, out_int32=True)
        first_E = torch.searchsorted(sorted_R, numbers, out_int32=True)
        last_E = ((end_E - first_E + (size - 1)) // size).cumsum(0)
        blocks = torch.arange(-(-count // size) + min(count, num_experts), device=expert_R.device)
        return cls(
            expert_R,
            num_experts,
            block_rows=size,
            order_R=order_R.to(torch.int32),
            first_E=first_E,
            end_E=end_E,
            expert_B=torch.searchsorted(last_E, blocks, right=True, out_int32=True),
            block_E=(last_E - (end_E - first_E + (size - 1)) // size).to(torch.int32),
        )


def multiply(
    x: torch.Tensor, each: int, rows: SlotRows, table_E: torch.Tensor, weight_SOI: torch.Tensor, out_RO: torch.Tensor
) -> None:
    """Multiply each row by the transpose of its expert's weight, by products of torch.

    Weights are gathered first, unless the pool has few enough slots for one grouped product over all of them.

    Args:
        x: input rows [., I]; row r of the output is of input row r // `each`.
        table_E: the slot of each expert, int32; -1 for none.
        weight_SOI: the weights of all slots, of any floating type.
        out_RO: rows whose expert has a slot are written.
    """
    experts, num_slots = rows.expert_R.clamp(max=rows.num_experts - 1), len(weight_SOI)
    slot_R = torch.where(rows.expert_R < rows.num_experts, table_E[experts], -1)
    here_R1 = (slot_R >= 0)[:, None]
    if rows.order_R is None:
        x_RI = x.repeat_interleave(each, dim=0) if each > 1 else x
        made = torch.bmm(weight_SOI[slot_R.clamp(min=0)].to(x.dtype), x_RI[:, :, None])[:, :, 0]
        torch.where(here_R1, made, out_RO, out=out_RO)
        return
    if num_slots <= _MAX_GROUPS and weight_SOI.dtype == x.dtype:
        group_R, count, weights = slot_R, num_slots, weight_SOI
    else:
        group_R, count = experts, rows.num_experts
        weights = weight_SOI[table_E.clamp(min=0)].to(x.dtype)
    # Rows without a weight go to the end, beyond all groups.
    sorted_R, order_R = torch.where(here_R1[:, 0], group_R, count).sort(stable=True)
    ends = torch.searchsorted(sorted_R, torch.arange(count, device=x.device).to(sorted_R), right=True, out_int32=True)
    made = functional.grouped_mm(x[order_R // each], weights.transpose(-2, -1), offs=ends)
    out_RO[order_R] = torch.where((sorted_R < count)[:, None], made, out_RO[order_R])
