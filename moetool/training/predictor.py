"""The contract of expert predictors, and their saving and loading.

Counting, searching and learned predictors share the class `Predictor`. A file in predictors/ defines a frozen dataclass
`Options` and a subclass `Predictor`. Parameters and buffers hold everything learned or counted, so the state dict is
the whole predictor.

`needs` names the trace columns that it reads. In training, `count` gets all tokens (`moetool.training.tokens.Tokens`)
with these columns, and `loss` a batch. During a run or a replay, `observe` gets the event of each layer with the same
fields, and `scores(layer)` answers for any layer within `lookahead`. The default `observe` collects the forward's
events into `Tokens` of its first layers, and `scores` passes them to `layer_scores`. Most predictors therefore define
`count`, `layer_scores` and possibly `loss`. A predictor with state across forwards sets `remembers` and defines
`observe` and `scores` itself.

On disk a predictor is a folder:

    card.json               options, training data and scores, with the sha256 of the weights
    predictor.safetensors   the state dict
    README.md               the card in Markdown
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from moetool import __version__
from moetool.base import durable, plugins
from moetool.base.config import parse
from moetool.base.errors import MismatchError, UsageError, first_line, unknown_name
from moetool.base.types import GateEvent, ModelSpec
from moetool.training.fit_options import FitOptions
from moetool.training.predictor_card import CARD, SCHEMA_VERSION, build_within, count_elements, read_card
from moetool.training.tokens import FIELDS, Tokens

WEIGHTS = "predictor.safetensors"
_NO_SIZE = (MismatchError, MemoryError, RuntimeError, ArithmeticError, TypeError, ValueError)
"""Errors of a build whose options have impossible sizes."""


class Predictor(nn.Module):
    """Scores the experts of coming layers from the observed part of the current forward.

    Only `observe` sets state of a forward or of running requests, so a prediction never sees a later token or layer.

    Class attributes:
        needs: trace columns for training and prediction: `experts`, and any of `moetool.training.tokens.FIELDS`;
        options may change it per instance.
        looks_at: by trace column, the option that enables its use; training enables it if the trace has the column and
        the option is not given.
        learned: whether it has parameters for gradient descent; counting predictors only use `count`.
        remembers: whether it carries state from one forward of a request to the next. `loss` then gets whole requests,
        unless `prepare` numbered their tokens, and prediction uses `observe` and `scores` only.
        incremental: whether it computes as layers arrive. Evaluation then uses `observe` and `scores`, since
        `layer_scores` would start over for each layer.
        one_layer: whether `loss` covers one random layer per token, so that a pass takes every token once per layer.
        Others learn all layers of a token at once.
        made_of: `trace` or `model`. For `model`, its module has a `make` that writes card and weights, and `open` reads
        them.
        predicts_prompts: whether `predict_prompt` predicts a request's experts from its prompt, before it runs.
        scores_are: `shares` of a token's choices by expert, or `logits` of an expert being chosen; see `probabilities`.

    Attributes:
        lookahead: maximum number of layers ahead of the last observed one.
        num_layers, num_experts, top_k: L, E and K, the same in every MoE layer.
        name, card, sha256: plugin name, card, and sha256 of the card's file, which holds the sha256 of the weights.
            Empty for a predictor that was not loaded.

    Raises:
        UsageError: the model has fewer than two MoE layers, or layers of different widths.
    """

    needs: frozenset[str] = frozenset({"experts"})
    looks_at: ClassVar[Mapping[str, str]] = {}
    learned: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    incremental: ClassVar[bool] = False
    one_layer: ClassVar[bool] = False
    made_of: ClassVar[str] = "trace"
    predicts_prompts: ClassVar[bool] = False
    scores_are: ClassVar[str] = "shares"
    lookahead: int = 1

    def __init__(self, spec: ModelSpec, options: Any) -> None:
        super().__init__()
        if spec.num_layers < 2:
            raise UsageError(f"{spec.name} has {spec.num_layers} MoE layer; predicting the next one needs at least two")
        shapes = sorted(set(zip(spec.num_experts_L, spec.top_k_L, strict=True)))
        if len(shapes) > 1:
            found = ", ".join(f"{k} of {e}" for e, k in shapes)
            raise UsageError(
                f"the MoE layers of {spec.name} choose {found} experts; predictors expect the same in every layer, "
                f"so use a policy without one (moetool serve --policy lru)"
            )
        self.spec = spec
        self.options = options
        self.num_layers = spec.num_layers
        self.num_experts, self.top_k = shapes[0]
        self.name = ""
        self.card: dict[str, Any] = {}
        self.sha256 = ""
        self._path: dict[str, np.ndarray] = {}  # fields of Tokens, with room for every layer
        self._num_observed = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def reach(self, ahead: int) -> int:
        """Return its lookahead if gates are known `ahead` layers ahead."""
        return min(self.lookahead, ahead) if "ahead" in self.needs else self.lookahead

    def validate(self) -> None:
        """Raise ValueError for invalid loaded values, such as weights that are not finite."""
        for name, tensor in self.state_dict().items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} has values that are not finite")

    @abstractmethod
    def count(self, tokens: Tokens) -> None:
        """Collect the statistics of the training tokens, before any gradient step.

        Args:
            tokens: all training tokens with all layers and their requests, stored small (see `Tokens`).

        Effects: replaces the statistics of an earlier call.
        """

    def open(self, folder: Path) -> None:
        """Load weights in a predictor's own format; only for predictors made from a model."""
        raise TypeError(f"{type(self).__module__} has no weight files of its own format")

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        """Score the experts of MoE layer `layer`.

        Args:
            tokens: routing of each token in the MoE layers 0..P-1, with P <= layer.
            layer: 1..L-1 with layer - P < lookahead.

        Returns:
            float32 [T, E]; higher is likelier; comparable within a row.
        """
        raise TypeError(f"{type(self).__module__} predicts by observe and scores only")

    def prepare(self, tokens: Tokens) -> Tokens:
        """Prepare the tokens of a part, in the order of forwards, for `loss`; called once (default: unchanged)."""
        return tokens

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the mean training loss; only for `learned` predictors.

        Args:
            tokens: a batch of N tokens with all layers.
            layer_N: layer 1..L-1 of each token, int64, for predictors that learn one layer per token.
        """
        raise TypeError(f"{type(self).__module__} is not trained by gradient descent")

    def probabilities(self, scores_TE: Tensor) -> Tensor:
        """Return the probability of each expert to be among a token's K, by its scores."""
        if self.scores_are == "logits":
            return scores_TE.sigmoid()
        share_TE = scores_TE.clamp(min=0)
        return (self.top_k * share_TE / share_TE.sum(dim=-1, keepdim=True).clamp(min=1e-9)).clamp(max=1)

    def predict_prompt(self, token_id_S: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Score a pending request from its prompt alone.

        Returns:
            scores_SLE of the prompt's tokens, and score_LE of each new token.

        Raises:
            MismatchError: a required token id is withheld.
        """
        raise TypeError(f"{type(self).__module__} makes no predictions from prompts")

    @torch.inference_mode()
    def workload(self, token_id_S: Sequence[int], new_tokens: int = 0) -> np.ndarray:
        """Return the expected tokens of a pending request for each expert of each layer.

        Args:
            token_id_S: tokens of its prompt.
            new_tokens: expected number of new tokens; each adds the mean of a prompt token.

        Returns:
            load_LE float64; each layer sums to top-k times all tokens.

        Raises:
            UsageError: the prompt is empty.
            MismatchError: a required token id is withheld.
        """
        if not len(token_id_S):
            raise UsageError("the prompt of a pending request has no tokens, expected at least one")
        share_SLE = self.probabilities(self.predict_prompt(token_id_S)[0].double())
        load_LE = (self.top_k * share_SLE / share_SLE.sum(dim=2, keepdim=True).clamp(min=1e-9)).sum(dim=0)
        return (load_LE * (1 + new_tokens / len(token_id_S))).numpy()

    @torch.inference_mode()
    def continue_path(self, experts_TK: np.ndarray) -> Iterator[np.ndarray]:
        """Predict the later layers of tokens from their first one, continuing from its own predictions.

        A layer within reach of the first is scored from it; a farther one from predicted layers.

        Args:
            experts_TK: experts of each token in the first MoE layer.

        Yields:
            share_TE float64 of each next layer: the expected choice of each expert, at most 1; a token's sum to top-k.
        """
        path_TPK = torch.from_numpy(experts_TK.astype(np.int64))[:, None]
        for layer in range(1, self.num_layers):
            known = path_TPK[:, :1] if self.lookahead >= layer else path_TPK
            scores_TE = self.layer_scores(Tokens(experts_TPK=known), layer).double()
            chosen_TK = scores_TE.topk(self.top_k, dim=1).indices
            share_TE = torch.softmax(scores_TE, dim=1).numpy() if bool((scores_TE < 0).any()) else scores_TE.numpy()
            share_TE = share_TE / np.maximum(share_TE.sum(axis=1, keepdims=True), 1e-12) * self.top_k
            yield np.minimum(share_TE, 1.0)
            path_TPK = torch.cat([path_TPK, chosen_TK[:, None]], dim=1)

    def observe(self, event: GateEvent) -> None:
        """Observe the event of the next layer of the current forward; layer 0 begins a new forward."""
        given = {
            "experts_TPK": np.asarray(event.experts_TK, dtype=np.int64),
            "weights_TPK": event.weights_TK,
            "scores_TPE": event.scores_TE,
            "hidden_TPD": event.hidden_TD,
            "ahead_TPAE": None if event.ahead_ATE is None else event.ahead_ATE.transpose(1, 0, 2),
            "resident_TPE": event.resident_TE,
        }
        columns = {}
        for name in {"experts_TPK", *(FIELDS[name] for name in self.needs & FIELDS.keys())} & given.keys():
            column = given[name]
            assert column is not None, f"the event lacks {name}"
            columns[name] = column
        if event.layer == 0:
            self._path = {
                name: np.zeros((len(column), self.num_layers, *column.shape[1:]), column.dtype)
                for name, column in columns.items()
            }
            if "embeddings" in self.needs:
                assert event.forward.embedding_TD is not None, "the forward lacks embeddings"
                self._path["embedding_TD"] = event.forward.embedding_TD
            if "token_id" in self.needs:
                assert event.forward.token_id_T is not None, "the forward lacks token ids"
                self._path["token_id_T"] = np.array(event.forward.token_id_T, np.int64)
        else:
            assert event.layer == self._num_observed, "events of a forward come layer by layer"
        for name, column in columns.items():
            place = self._path[name][:, event.layer]
            if name == "ahead_TPAE":
                place = place[:, : column.shape[1]]  # near the last layer there are fewer
            place[:] = column
        self._num_observed = event.layer + 1

    @torch.inference_mode()
    def scores(self, layer: int) -> np.ndarray:
        """Score MoE layer `layer` for every token of the observed forward. Returns: float32 [T, E]."""
        assert layer > 0 and layer - self._num_observed < self.lookahead, "too few layers were observed"
        known = Tokens(**{name: torch.from_numpy(column) for name, column in self._path.items()})
        return self.layer_scores(known.before(min(layer, self._num_observed)), layer).numpy()


def build(name: str, spec: ModelSpec, options: Mapping[str, Any] | None = None) -> Predictor:
    """Create an untrained predictor.

    Args:
        name: a file of predictors/, or a dotted module.
        options: values for the fields of its `Options`; the rest keep their defaults.

    Raises:
        UsageError: there is no such predictor or option, or a value is invalid.
    """
    module = plugins.load("predictor", name)
    options = dict(options or {})
    known = [field.name for field in fields(module.Options)]
    for option in options:
        if option not in known:
            fitting = (f"fit.{field.name}" for field in fields(FitOptions))
            raise unknown_name(f"option of {name}", option, [*known, *fitting])
    predictor: Predictor = module.Predictor(spec, parse(module.Options, options, name))
    predictor.name = name
    return predictor


def save(predictor: Predictor, folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the weights and the card of a predictor.

    Args:
        folder: an empty folder; a `durable.staged_directory`, so that a killed run leaves no predictor.
        facts: the card's other entries: trace, requests, fit.

    Effects: the card is written last; without it `load_predictor` refuses the folder.

    Returns:
        The card.
    """
    weights = folder / WEIGHTS
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in predictor.state_dict().items()}
    safetensors.torch.save_file(state, weights)
    card = {
        "kind": "predictor",
        "schema_version": SCHEMA_VERSION,
        "moetool_version": __version__,
        "predictor": predictor.name,
        "options": asdict(predictor.options),
        "spec": predictor.spec.to_json(),
        "parameters": sum(parameter.numel() for parameter in predictor.parameters()),
        "weights": {"bytes": weights.stat().st_size, "sha256": durable.sha256_file(weights)},
        **facts,
    }
    text = json.dumps(card, indent=1) + "\n"
    durable.write_text(folder / CARD, text)
    return json.loads(text)


def load_predictor(path: str | Path, options: Mapping[str, Mapping[str, Any]] | None = None) -> Predictor:
    """Load a predictor that `moetool train` wrote, ready to predict on the CPU.

    Args:
        options: options by predictor name, instead of the trained ones; only those that do not change its weights.

    Returns:
        The predictor in eval mode, with its `name`, `card` and `sha256`.

    Raises:
        UsageError: there is no such folder.
        MismatchError: it is not a predictor of this schema version, is damaged, or its plugin is not installed.
    """
    path = Path(path)
    again = f"train again: moetool train PREDICTOR --trace DIR --out {path} --overwrite"
    card = read_card(path, again)
    weights = path / WEIGHTS
    own_form = isinstance(card["weights"]["sha256"], dict)  # several files, which `open` knows
    try:
        elements = 0 if own_form else count_elements(weights)
    except FileNotFoundError:
        raise MismatchError(f"{weights} is missing; {again}") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise MismatchError(f"{weights} is damaged ({first_line(error)}); {again}") from None
    if not own_form and (sha256 := durable.sha256_file(weights)) != card["weights"]["sha256"]:
        raise MismatchError(
            f"{weights} is damaged: its sha256 is {sha256[:12]}, expected {card['weights']['sha256'][:12]}; {again}"
        )
    spec = ModelSpec.from_json(card["spec"])
    try:
        plugins.load("predictor", card["predictor"])
    except UsageError as error:
        raise MismatchError(
            f"{path} cannot be built by what is installed here ({error}); install what it needs, or {again}"
        ) from None

    def made(given: Mapping[str, Any]) -> Predictor:
        try:
            return build_within(lambda: build(card["predictor"], spec, given), elements)
        except _NO_SIZE as error:
            raise MismatchError(f"{path / CARD} is damaged ({first_line(error)}); {again}") from None

    try:
        predictor = made(card["options"])
    except UsageError as error:
        raise MismatchError(f"{path / CARD} does not fit this version ({error}); {again}") from None
    if own := (options or {}).get(predictor.name):
        if not isinstance(own, Mapping):
            raise UsageError(
                f"{predictor.name} is {own!r}, expected options by name, as in {predictor.name}.name=value"
            )
        predictor = made({**card["options"], **own})
    try:
        if own_form:
            predictor.card = card
            predictor.open(path)
        else:
            predictor.load_state_dict(safetensors.torch.load_file(weights))
        predictor.validate()
    except (RuntimeError, TypeError, ValueError, OSError, safetensors.SafetensorError) as error:  # torch on sizes
        reason = str(error).splitlines()[-1].strip()
        raise MismatchError(f"{weights} does not fit this version of {predictor.name} ({reason}); {again}") from None
    predictor.card = card
    predictor.sha256 = durable.sha256_file(path / CARD)
    return predictor.eval().requires_grad_(False)
