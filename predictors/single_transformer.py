"""One transformer layer that names the experts of all layers from the tokens of a prompt, before it runs.

Source: DIRECTOR § III, Finding 3 and Table I, the predictor that its cascade is measured against: "a single-layer
Transformer", which § V-A says "maps token embeddings to top-k expert choices". Widths, training and what of the
logits is learned are not described. Readings and deviations:

- No trace holds the embedding of each token, only their mean over an iteration. Token ids are read instead, through an
  embedding that is learned with the rest, for the most frequent ids of the training tokens; all other ids share one,
  which also stands in for a token that dropout hides. The predictor's file names those ids.
- The targets are the experts that were chosen, not the gates' logits, so that every trace with token ids will do. The
  loss is the binary cross-entropy of ExpertMLP (DuoServe-MoE Eq. 6), mean over tokens, layers and experts; how often
  an expert is chosen is counted and added to its logit.
- Attention is causal, as the model's own is, so that a chunk of a prompt is predicted as it is in the whole.
- It is trained on all tokens of a request. It predicts from the prompt alone: see `PromptPredictor` for what covers
  the tokens that a request goes on to make.
"""

from dataclasses import dataclass

from moetool.learning.prompt_routing import PromptOptions, PromptPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PromptOptions):
    """Options of the transformer layer."""


class Predictor(PromptPredictor):
    """One stage for all layers."""
