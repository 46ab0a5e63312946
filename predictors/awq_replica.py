"""AWQ replica: a low-bit replica runs each request, and its gates predict the model's experts.

Source: DIRECTOR § V-A, "Quantized Predictor": a low-bit replica of the model, whose gates rank experts nearly as the
model's do; § VIII makes it with AWQ. Readings and deviations:

- The paper says that AWQ rounds weights and activations. AWQ rounds weights only, as does this replica.
  `activation_bits` also rounds the inputs of every rounded weight, scaled by each token's largest value.
- Gates, embeddings and norms are those of the model (`moetool.training.quantize`).
- Only the prompt of a pending request is known. It runs whole, and each new token gets the mean over the prompt
  (`predict_prompt`). For a running request, the replica sees a forward's tokens before the first MoE layer runs, and no
  later ones.
- Experts chosen by its own router rank first, then the others by score.
- It is built from a model and text, not from a trace (`make`). It is scored on all requests of a trace with unseen
  prompts.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import moetool.training.predictor
from moetool.base import config, durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.tables import aligned
from moetool.base.types import GateEvent, ModelSpec
from moetool.base.validation import outside_vocabulary
from moetool.models.families import router_rules
from moetool.training.tokens import Tokens

_RUNNING = 64  # maximum number of kept KV caches; the oldest is dropped

_ORDER = 1e-4  # weight of the replica's scores, to order the other experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the replica when it predicts.

    Attributes:
        activation_bits: bits of the inputs of each rounded weight: 4, 8, or 16 without rounding.
        unpacked: whether to unpack weights once, in float32, instead of on each use: several times the memory, but less
            time per token.
    """

    activation_bits: int = 16
    unpacked: bool = False

    def __post_init__(self) -> None:
        if self.activation_bits not in (4, 8, 16):
            raise UsageError(f"awq_replica: activation_bits is {self.activation_bits}, expected 4, 8 or 16")


class Predictor(moetool.training.predictor.Predictor):
    """Runs the replica in memory, packed as in its files, and keeps the KV cache of running requests.

    Scores are 1 for the experts chosen by the replica's router; its scores over all experts, scaled down, order the
    others. A request whose first tokens were not observed runs without them.
    """

    needs = frozenset({"experts", "token_id"})
    remembers = True
    made_of = "model"
    predicts_prompts = True

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = self.num_layers
        self.bits = options.activation_bits
        self._unpacked = options.unpacked
        self._replica: Any = None  # a LoadedModel, outside the state dict
        self._caches: dict[int, Any] = {}
        self._scores_LTE: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the replica's weights in memory, and of one unpacked expert."""
        from moetool.models.packed_memory import held_bytes, unpacking_bytes

        if self._replica is None:
            return 0
        return held_bytes(self._replica.model) + unpacking_bytes(self._replica.model, torch.float32)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Predictor":
        """Return a copy with its own requests, which shares the replica."""
        twin = Predictor(self.spec, self.options)
        twin.name, twin.card, twin.sha256 = self.name, copy.copy(self.card), self.sha256
        twin._replica = self._replica
        return twin.eval()

    def count(self, tokens: Tokens) -> None:
        """Raise UsageError: the replica is built from a model."""
        raise UsageError("awq_replica is made from a model: moetool train awq_replica MODEL --data … --out DIR")

    def open(self, folder: Path) -> None:
        """Load the replica. Raises: MismatchError: the files differ from its card."""
        from moetool.models.checkpoint import Checkpoint
        from moetool.models.loading import load_full, use_threads
        from moetool.models.packed_memory import load_packed

        checkpoint = Checkpoint(folder)
        if (found := checkpoint.revision) != self.card["weights"]["revision"]:
            raise MismatchError(
                f"{folder} holds another replica than its card says ({found[:12]}, expected "
                f"{self.card['weights']['revision'][:12]}); make it again with --overwrite"
            )
        for name, sha256 in self.card["weights"]["sha256"].items():
            if (found := durable.sha256_file(folder / name)) != sha256:
                raise MismatchError(
                    f"{folder / name} is damaged: its sha256 is {found[:12]}, expected {sha256[:12]}; make the replica "
                    f"again with --overwrite"
                )
        with checkpoint:
            self._replica = (load_full if self._unpacked else load_packed)(checkpoint, torch.float32)
        if self._unpacked:
            self._replica.model.set_experts_implementation("eager")
        use_threads(self._replica.model.config)

    def _known(self, token_id_S: Sequence[int]) -> Tensor:
        """Return token ids as a tensor. Raises: MismatchError: one is withheld, or the replica does not embed it."""
        if min(token_id_S, default=0) < 0:
            raise MismatchError(
                "awq_replica predicts from token ids, but some are withheld (-1), expected all of a request; use a "
                "trace from moetool capture"
            )
        if why := outside_vocabulary(token_id_S, self._replica.model.config.get_text_config().vocab_size):
            raise MismatchError(f"awq_replica cannot predict a request: {why}; use a trace of the replica's model")
        return torch.tensor(list(token_id_S))

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Return the card's match as the probability of chosen experts; the others share the rest evenly."""
        match = float(self.card["judged"]["match"]) if self.card else 1.0
        rest = min(1.0, self.top_k * (1 - match) / max(1, self.num_experts - self.top_k))
        return rest + (match - rest) * scores_TE.clamp(0, 1)

    @torch.inference_mode()
    def predict_prompt(self, token_id_S: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Score the prompt; new tokens get its mean. Raises: MismatchError: a token id is withheld."""
        ids_S = self._known(token_id_S)
        scores_LSE = torch.zeros(self.num_layers, len(ids_S), self.num_experts)
        with self._recorded(scores_LSE, torch.arange(len(ids_S))):
            self._replica.model.get_decoder()(input_ids=ids_S[None], use_cache=False)
        scores_SLE = scores_LSE.transpose(0, 1)
        return scores_SLE, scores_SLE.mean(dim=0)

    @torch.inference_mode()
    def observe(self, event: GateEvent) -> None:
        """Run the tokens of a forward at its beginning; a request is new at position 0."""
        from transformers import DynamicCache

        if event.layer:
            return
        info = event.forward
        assert info.token_id_T is not None, "the forward lacks token ids"
        ids_T = self._known(info.token_id_T)
        request_T, position_T = np.array(info.request_T), np.array(info.position_T)
        self._scores_LTE = torch.zeros(self.num_layers, len(ids_T), self.num_experts)
        for request in dict.fromkeys(info.request_T):
            mine = np.flatnonzero(request_T == request)
            cache = self._caches.pop(request, None)
            if cache is None or position_T[mine[0]] == 0:
                cache = DynamicCache(config=self._replica.model.config)
            self._caches[request] = cache
            positions_1S = torch.from_numpy(position_T[mine])[None]
            with self._recorded(self._scores_LTE, torch.from_numpy(mine)):
                self._replica.model.get_decoder()(
                    input_ids=ids_T[mine][None], position_ids=positions_1S, past_key_values=cache, use_cache=True
                )
        for request in [r for r in self._caches if r not in info.request_T][: max(0, len(self._caches) - _RUNNING)]:
            del self._caches[request]

    def scores(self, layer: int) -> np.ndarray:
        assert self._scores_LTE is not None, "nothing was observed"
        return self._scores_LTE[layer].numpy()

    @contextmanager
    def _recorded(self, scores_LTE: Tensor, where: Tensor) -> Iterator[None]:
        """Add the replica's gate scores to the rows `where` of the scores."""
        from moetool.base.families import find
        from moetool.models.router_hooks import read_logits, watch

        model = self._replica.model
        text = model.config.get_text_config()
        family = find(text.model_type)
        with ExitStack() as stack:
            for layer in self._replica.layers:
                rule = family.rule(text, layer.router)

                def routed(module: Any, args: Any, output: Any, layer: Any = layer, rule: Any = rule) -> None:
                    scores_TE = router_rules.scores(rule, read_logits(layer, output, family))
                    scores_LTE[layer.index, where] += _ORDER * scores_TE / scores_TE.amax(-1, keepdim=True)

                def chose(index_TK: Tensor, weights_TK: Tensor, layer: Any = layer) -> None:
                    chosen_TE = torch.zeros(len(where), self.num_experts).scatter_(1, index_TK, 1.0)
                    scores_LTE[layer.index, where] += chosen_TE

                stack.callback(layer.router.register_forward_hook(routed).remove)
                stack.callback(watch(layer, chose).remove)
            if self.bits < 16:
                from moetool.training.quantize.activations import rounded_activations

                stack.enter_context(rounded_activations(model, self._replica.layers, self.bits))
            yield


def make(
    model: str,
    data: Sequence[str],
    out: Path,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    on_note: Callable[[str], object] = lambda note: None,
) -> dict[str, Any]:
    """Build a replica of a model and save it.

    Args:
        model: `reference`, a folder or a hub name.
        data: embedded prompt sets and files, as for `moetool.prompts.gather.load`.
        options: options of `moetool.training.quantize.replica_layers.ReplicaOptions` and of `Options`; the data type is
            a server's unless set.
        seed: seed of the prompts' order and the held-out choice.
        on_note: called with each line on what was chosen.

    Returns:
        The card.

    Raises:
        UsageError: the text is too short, or an option is invalid; else as
            `moetool.training.quantize.replica.make_replica`.
        CapacityError: the memory is too small for the dense weights and two layers.
        MismatchError, MoetoolError: as `moetool.training.quantize.replica.make_replica`.
    """
    from moetool.base import durable
    from moetool.models.checkpoint import Checkpoint
    from moetool.models.loading import use_threads
    from moetool.prompts import gather as prompts
    from moetool.training.quantize.calibration import from_prompts
    from moetool.training.quantize.replica import CARD, choose, make_replica, require_replicable
    from moetool.training.quantize.replica_layers import ReplicaOptions

    own = [field.name for field in fields(Options)]
    predicting = config.parse(Options, {name: options[name] for name in own if name in options}, "awq_replica")
    making = config.parse(ReplicaOptions, {k: v for k, v in options.items() if k not in own}, "awq_replica")
    durable.require_absent(out, overwrite, CARD)
    checkpoint = Checkpoint.open(model)
    require_replicable(checkpoint, making)
    making = replace(making, length=min(making.length, checkpoint.max_context or making.length))
    making, choices = choose(checkpoint, making, set(options))
    texts = prompts.load(list(data))
    calibration = from_prompts(
        texts,
        checkpoint.tokenizer,
        checkpoint.vocab_size,
        length=making.length,
        max_tokens=making.max_tokens,
        seed=seed,
    )
    for line in aligned(choices):
        on_note(line)
    use_threads(checkpoint.config)
    facts = {"options": asdict(predicting), "model": model, "seed": seed}
    return make_replica(checkpoint, out, calibration, making, facts=facts, overwrite=overwrite, on_progress=on_progress)
