"""A model that trains fast on a CPU: expert products on sorted tokens, and a balancing loss for each layer.

The model is transformers' own: only the function that computes the experts differs during training, so the result is a
plain checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moetool.errors import UsageError, first_line
from moetool.models.checkpoint import Checkpoint
from moetool.reference.data import separator_id
from moetool.reference.training_recipe import ModelOptions

FAMILY = "qwen3_moe"

EXPERTS = "moetool_sorted"
"""Name of `sorted_experts` among transformers' implementations of experts."""

_TOKENS = 256  # number of tokens whose scores over the vocabulary are in memory at once
_ROUND = 64  # an expert's number of rows is padded to a multiple of this


class _Spread(torch.autograd.Function):
    """Gather the experts' rows from the tokens. Plain autograd would add their gradients row by row."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, token_S: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return hidden_TD[token_S]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad_SD,), (slot_TK,) = gradients, ctx.saved_tensors
        return grad_SD[slot_TK].sum(1), None, None


class _Experts(torch.autograd.Function):
    """Every expert on its rows: `down(silu(gate(x)) * up(x))`.

    Plain autograd would allocate a gradient as large as all experts for each indexed expert.
    """

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, rows_E: list[int]) -> Tensor:
        gate_up_SF = rows_SD.new_empty(len(rows_SD), gate_up_EFD.shape[1])
        out_SD = torch.empty_like(rows_SD)
        for x, y, weight in zip(rows_SD.split(rows_E), gate_up_SF.split(rows_E), gate_up_EFD, strict=True):
            torch.mm(x, weight.T, out=y)
        gate, up = gate_up_SF.chunk(2, -1)
        inner_SF = nn.functional.silu(gate) * up
        for x, y, weight in zip(inner_SF.split(rows_E), out_SD.split(rows_E), down_EDF, strict=True):
            torch.mm(x, weight.T, out=y)
        ctx.rows_E = rows_E
        ctx.save_for_backward(rows_SD, gate_up_SF, gate_up_EFD, down_EDF)
        return out_SD

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows_E, (grad_SD,) = ctx.rows_E, gradients
        rows_SD, gate_up_SF, gate_up_EFD, down_EDF = ctx.saved_tensors
        gate, up = gate_up_SF.chunk(2, -1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        inner_SF, grad_inner_SF = silu * up, torch.empty_like(up)
        grad_down_EDF, grad_gate_up_EFD = torch.empty_like(down_EDF), torch.empty_like(gate_up_EFD)
        parts = zip(
            *(x.split(rows_E) for x in (grad_SD, inner_SF, grad_inner_SF)), down_EDF, grad_down_EDF, strict=True
        )
        for grad, x, grad_x, weight, grad_weight in parts:
            torch.mm(grad, weight, out=grad_x)
            torch.mm(grad.T, x, out=grad_weight)
        grad_gate = grad_inner_SF * up * (sigmoid + silu * (1 - sigmoid))
        grad_gate_up_SF = torch.cat([grad_gate, grad_inner_SF * silu], -1)
        grad_rows_SD = torch.empty_like(rows_SD)
        parts = zip(
            *(x.split(rows_E) for x in (grad_gate_up_SF, rows_SD, grad_rows_SD)),
            *(gate_up_EFD, grad_gate_up_EFD),
            strict=True,
        )
        for grad, x, grad_x, weight, grad_weight in parts:
            torch.mm(grad, weight, out=grad_x)
            torch.mm(grad.T, x, out=grad_weight)
        return grad_rows_SD, grad_gate_up_EFD, grad_down_EDF, None


class _Gather(torch.autograd.Function):
    """The weighted sum over a token's experts; padding rows get no gradient."""

    @staticmethod
    def forward(ctx: Any, out_SD: Tensor, weights_TK: Tensor, token_S: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(out_SD, weights_TK, token_S, slot_TK)
        return torch.einsum("tkd,tk->td", out_SD[slot_TK], weights_TK.to(out_SD.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad_TD,), (out_SD, weights_TK, token_S, slot_TK) = gradients, ctx.saved_tensors
        weight_S = out_SD.new_zeros(len(out_SD))
        weight_S[slot_TK.flatten()] = weights_TK.flatten().to(out_SD.dtype)
        grad_TD = grad_TD.to(out_SD.dtype)
        grad_TK = torch.einsum("tkd,td->tk", out_SD[slot_TK], grad_TD).to(weights_TK.dtype)
        return grad_TD[token_S] * weight_S[:, None], grad_TK, None, None


def sorted_experts(self: nn.Module, hidden_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """Compute every expert on its own tokens, sorted by expert; no token is dropped.

    Each expert's rows are padded to a multiple of 64, so that the products have few shapes, since a CPU library
    generates code for each shape. One batched product, padded to the busiest expert, would compute far more rows.
    """
    weights: list[Tensor] = [self.gate_up_proj, self.down_proj]  # type: ignore[list-item]
    num_experts, num_tokens, top_k = len(weights[0]), *top_k_index_TK.shape
    with torch.no_grad():
        expert_N = top_k_index_TK.flatten()
        order_N = expert_N.argsort(stable=True)
        count_E = torch.bincount(expert_N, minlength=num_experts)
        rows_E = (count_E + _ROUND - 1) // _ROUND * _ROUND
        gap_E = rows_E.cumsum(0) - rows_E - (count_E.cumsum(0) - count_E)
        place_N = torch.arange(len(expert_N), device=expert_N.device) + gap_E[expert_N[order_N]]
        slot_TK = torch.empty_like(expert_N).index_copy_(0, order_N, place_N).view(num_tokens, top_k)
        token_S = expert_N.new_zeros(int(rows_E.sum())).index_copy_(0, place_N, order_N // top_k)
    kind = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_TD.dtype
    with torch.autocast(kind, enabled=False):
        rows_SD = _Spread.apply(hidden_TD.to(dtype), token_S, slot_TK)
        out_SD = _Experts.apply(rows_SD, *(weight.to(dtype) for weight in weights), rows_E.tolist())
        mixed_TD = _Gather.apply(out_SD, top_k_weights_TK, token_S, slot_TK)
    return mixed_TD.to(hidden_TD.dtype)


class _NextToken(torch.autograd.Function):
    """Mean cross-entropy of the next token, and its gradient, computed in chunks of tokens.

    The scores of a whole batch over the vocabulary would be the largest array of a step. Memory bandwidth would bound
    every pass over them.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, dtype: torch.dtype) -> Tensor:
        rows_TD, weight = hidden_TD.to(dtype), weight_VD.to(dtype)
        grad_TD, grad_VD = torch.empty_like(rows_TD), torch.zeros_like(weight, dtype=torch.float32)
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        for rows, grad, target in zip(*(x.split(_TOKENS) for x in (rows_TD, grad_TD, target_T)), strict=True):
            scores_TV = (rows @ weight.T).float()
            total += nn.functional.cross_entropy(scores_TV, target, reduction="sum")
            error_TV = scores_TV.softmax(-1)
            error_TV[torch.arange(len(target), device=target.device), target] -= 1
            error_TV = (error_TV / len(target_T)).to(dtype)
            grad.copy_(error_TV @ weight)
            grad_VD += error_TV.T @ rows
        ctx.save_for_backward(grad_TD, grad_VD)
        ctx.dtypes = hidden_TD.dtype, weight_VD.dtype
        return total / len(target_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (scale,), (grad_TD, grad_VD) = gradients, ctx.saved_tensors
        hidden, weight = ctx.dtypes
        return (grad_TD * scale).to(hidden), (grad_VD * scale).to(weight), None, None


def losses(model: Any, rows_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row's tokens after its first, and the balancing loss of its routers.

    The second is transformers' balancing loss (Switch Transformer, equations 4 to 6) as the mean over the layers. Over
    all layers at once, an expert that is idle in one layer and busy in another would look balanced.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    out = model.model(rows_BL[:, :-1], use_cache=False, output_router_logits=True)
    kind = rows_BL.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.lm_head.weight.dtype
    with torch.autocast(kind, enabled=False):
        target_T = rows_BL[:, 1:].flatten()
        loss = _NextToken.apply(out.last_hidden_state.flatten(0, 1), model.lm_head.weight, target_T, dtype)
        experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
        uneven = [load_balancing_loss_func((logits.float(),), experts, top_k) for logits in out.router_logits]
    return loss, torch.stack(uneven).mean()


def new_config(options: ModelOptions, tokenizer: Any) -> Any:
    """Return the transformers config of the architecture; the vocabulary is the tokenizer's.

    Raises:
        UsageError: transformers refuses the architecture.
    """
    from transformers import Qwen3MoeConfig

    end = separator_id(tokenizer)
    try:
        return Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden_size,
            intermediate_size=options.expert_width * options.top_k,  # width of dense layers; there are none
            num_hidden_layers=options.num_layers,
            num_attention_heads=options.num_heads,
            num_key_value_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            max_position_embeddings=options.max_positions,
            tie_word_embeddings=True,
            moe_intermediate_size=options.expert_width,
            num_experts=options.num_experts,
            num_experts_per_tok=options.top_k,
            norm_topk_prob=True,
            router_aux_loss_coef=options.balance,
            bos_token_id=end,
            eos_token_id=end,
            pad_token_id=tokenizer.pad_token_id,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"transformers refuses this architecture: {first_line(error)}") from None


def build(config: Any, seed: int) -> Any:
    """Return a model with new weights, in float32."""
    from transformers import Qwen3MoeForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ready(Qwen3MoeForCausalLM(config).float())


def open_checkpoint(path: Path) -> Any:
    """Return the model of a checkpoint, in float32.

    Raises:
        UsageError: the checkpoint is of another family than the one trained here.
    """
    from transformers import Qwen3MoeForCausalLM
    from transformers.utils import logging

    if (found := Checkpoint(path).config.model_type) != FAMILY:
        raise UsageError(f"{path} is a {found} model, expected {FAMILY}, the family that reference train makes")
    logging.disable_progress_bar()
    return ready(Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32))


def ready(model: Any) -> Any:
    """Prepare a model for training: its experts and attention by fast implementations.

    Effects: registers `sorted_experts` with transformers.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, sorted_experts)
    model.set_experts_implementation(EXPERTS)
    model.set_attn_implementation("eager")  # its backward is faster on a CPU at short sequences
    return model
