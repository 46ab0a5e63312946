"""Single transformer: one transformer layer that predicts a prompt's experts in all layers, before it runs.

Source: DIRECTOR § III, Finding 3 and Table I, the baseline of its cascade: "a single-layer Transformer", which § V-A
says "maps token embeddings to top-k expert choices". Widths, training and targets are not described. Readings and
deviations:

- Traces hold only mean embeddings over an iteration. Token ids are read instead, through a learned embedding for the
  most frequent training ids. All other ids share one, which also replaces tokens hidden by dropout. The predictor's
  file holds those ids.
- The targets are the chosen experts, not the gates' logits, so that any trace with token ids suffices. The loss is the
  binary cross-entropy of ExpertMLP (DuoServe-MoE Eq. 6), mean over tokens, layers and experts; the logit of each
  expert's frequency is added.
- Attention is causal, as in the model, so a chunk's prediction equals that within the whole prompt.
- It is trained on all tokens of a request and predicts from the prompt alone; see `PromptPredictor` for new tokens.
"""

from dataclasses import dataclass

from moetool.training.prompt_routing import PromptOptions, PromptPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PromptOptions):
    """Options of the transformer layer."""


class Predictor(PromptPredictor):
    """One stage for all layers."""
