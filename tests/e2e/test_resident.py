"""The column `resident`: what the next router would say after a forward through resident experts alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from moetool.base.errors import UsageError
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import moe_layers
from moetool.models.loading import load_full
from moetool.prompts.gather import Prompt
from moetool.runtime.decoding import Batch
from moetool.runtime.experts.partial_forward import decoder_layers
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.recording.recorder import GateRecorder
from moetool.runtime.recording.resident_gates import ResidentForward, resident_counts
from moetool.runtime.request import SamplingParams
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import families
from tests.refusals import refused

TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said that"]
SHARE, NEW = 0.25, 4


def _prompts(*texts: str) -> list[Prompt]:
    return [Prompt(dataset="d", task="t", prompt_id=text, text=text) for text in texts]


def _options(**more: Any) -> CaptureOptions:
    return CaptureOptions(**{"max_new_tokens": NEW, "keep": ("topk", "logits", "resident"), "resident": SHARE, **more})


def _captured(full: Any, out: Path, prompts: list[Prompt], **more: Any) -> Trace:
    """A capture by a model that is in memory already."""
    capture("reference", prompts, out, _options(**more), RunSetup(open_model=lambda path, dtype, device: full))
    return Trace(out)


@pytest.fixture(scope="module")
def trace(full: Any, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return _captured(full, tmp_path_factory.mktemp("resident") / "trace", _prompts(*TEXTS))


def _requests(trace: Trace) -> Iterator[TokenBatch]:
    return trace.whole_requests(["weights", "logits", "resident"])


def _least_recent(num_experts: int, kept: int, events: list[np.ndarray]) -> list[set[int]]:
    """Experts resident before each event [T, K] of one layer, found from each expert's last use."""
    last = {expert: (-1, 0, -expert) for expert in range(num_experts)}
    resident = set(range(kept))
    found = []
    for time, index_TK in enumerate(events):
        found.append(set(resident))
        for expert in np.unique(index_TK).tolist():
            last[expert] = (time, int((index_TK == expert).sum()), -expert)
            resident.add(expert)
        resident = set(sorted(resident, key=last.__getitem__)[-kept:])
    return found


def test_it_is_what_a_forward_by_hand_gives(trace: Trace, full: Any) -> None:
    """Every layer of a prompt and of a new token, expert by expert, with the true keys and values of earlier tokens."""
    from transformers import DynamicCache

    model, layers = full.model, full.model.model.layers
    spec = trace.spec
    rows = next(iter(_requests(trace)))
    assert rows.resident_TW is not None
    said_TLE = rows.resident_TW.reshape(len(rows), spec.num_layers, -1).astype(np.float32)
    experts_TLK = rows.experts_TS.reshape(len(rows), spec.num_layers, -1).astype(int)
    forwards = [np.flatnonzero(rows.iteration_T == i) for i in range(NEW)]
    here_LF = [
        _least_recent(spec.num_experts, resident_counts((spec.num_experts,), SHARE)[0], [e[f] for f in forwards])
        for e in experts_TLK.transpose(1, 0, 2)
    ]
    assert not said_TLE[:, -1].any()  # nothing comes after the last layer
    for forward in (0, 2):
        here = forwards[forward]
        ids = torch.from_numpy(rows.token_id_T.astype(np.int64))[None]
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        hooks = [
            layer.post_attention_layernorm.register_forward_hook(
                lambda module, args, output, i=i, kept=kept: kept.__setitem__(i, (args[0][0], output[0]))
            )
            for i, layer in enumerate(layers)
        ]
        cache = DynamicCache(config=model.config)
        position = torch.from_numpy(here)[None]
        with torch.inference_mode():
            if forward:
                model(ids[:, : here[0]], past_key_values=cache, use_cache=True)
            kept.clear()
            before = _copied(cache, model.config)
            model(ids[:, here], past_key_values=cache, use_cache=True, position_ids=position)
            for hook in hooks:
                hook.remove()
            for i in range(1, len(layers)):
                residual_TD, normed_TD = kept[i - 1]
                partial_TD = residual_TD.clone()
                module = layers[i - 1].mlp.experts
                for t, token in enumerate(here):
                    weights_K = rows.weights_TS.reshape(len(rows), spec.num_layers, -1)[token, i - 1]  # type: ignore[union-attr]
                    for expert, weight in zip(experts_TLK[token, i - 1].tolist(), weights_K.tolist(), strict=True):
                        if expert in here_LF[i - 1][forward]:
                            gate, up = F.linear(normed_TD[t], module.gate_up_proj[expert]).chunk(2)
                            partial_TD[t] += weight * F.linear(F.silu(gate) * up, module.down_proj[expert])
                x = layers[i].input_layernorm(partial_TD[None])
                turned = model.model.rotary_emb(x, position)
                mask = torch.full((len(here), int(here[-1]) + 1), -torch.inf).triu(int(here[0]) + 1)[None, None]
                past = _copied(before, model.config)
                attended = layers[i].self_attn(
                    x, position_embeddings=turned, attention_mask=mask, past_key_values=past
                )[0]
                logits_TE = layers[i].mlp.gate.forward(
                    layers[i].post_attention_layernorm(partial_TD[None] + attended)[0]
                )
                logits_TE = logits_TE[0] if isinstance(logits_TE, tuple) else logits_TE
                np.testing.assert_allclose(said_TLE[here, i - 1], logits_TE, rtol=5e-3, atol=1e-2)


def _copied(cache: Any, config: Any) -> Any:
    from transformers import DynamicCache

    made = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if layer.keys is not None:
            made.update(layer.keys.clone(), layer.values.clone(), i)
    return made


def test_the_models_own_forward_stays_as_it_is(trace: Trace, full: Any, tmp_path: Path) -> None:
    """To the bit, in batches and long prompts cut in pieces too; and the rows of a batch are those of it alone."""
    prompts = _prompts(*TEXTS, "a long one " * 150)
    beside = _captured(full, tmp_path / "with", prompts, batch_size=4)
    plain = _captured(full, tmp_path / "without", prompts, batch_size=4, keep=("topk", "logits"))
    columns = ["weights", "logits"]
    for one, other in zip(beside.whole_requests(columns), plain.whole_requests(columns), strict=True):
        for name in ("token_id_T", "experts_TS", "weights_TS", "logits_TF"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    alone = _captured(full, tmp_path / "alone", prompts[1:2])
    (rows,) = _requests(alone)
    assert np.array_equal(rows.resident_TW, list(_requests(trace))[1].resident_TW)
    assert alone.resident == trace.resident == SHARE


def test_more_residents_say_more_and_later_tokens_nothing(trace: Trace, full: Any, tmp_path: Path) -> None:
    right = {}
    for share in (0.01, 1.0):
        made = _captured(full, tmp_path / str(share), _prompts(*TEXTS), resident=share)
        right[share] = _right(made)
    assert right[0.01] < _right(trace) < right[1.0] and right[1.0] > 0.99  # all of them: the truth, rounded
    (longer,) = _requests(_captured(full, tmp_path / "longer", _prompts(TEXTS[0] + " and then")))
    short = next(iter(_requests(trace)))
    assert short.resident_TW is not None and longer.resident_TW is not None
    prompt = (short.iteration_T == 0).sum() - 1  # its last token may be another one
    assert np.array_equal(short.token_id_T[:prompt], longer.token_id_T[:prompt])
    np.testing.assert_allclose(short.resident_TW[:prompt], longer.resident_TW[:prompt], atol=0.02)


def _right(trace: Trace) -> float:
    """Share of the next layer's experts that the column ranks first."""
    found = []
    for rows in _requests(trace):
        assert rows.resident_TW is not None
        said_TLE = rows.resident_TW.reshape(len(rows), trace.spec.num_layers, -1)[:, :-1]
        true_TLK = rows.experts_TS.reshape(len(rows), trace.spec.num_layers, -1)[:, 1:].astype(int)
        best_TLK = np.argsort(-said_TLE, axis=2, kind="stable")[:, :, : true_TLK.shape[2]]
        found.append((best_TLK[..., None] == true_TLK[:, :, None]).any(3).mean(2))
    return float(np.concatenate(found).mean())


def test_where_it_cannot_be_had_it_is_refused_by_name(lazy: Any, full: Any, tmp_path: Path) -> None:
    with refused(UsageError, "experts", "loaded", "needed"):
        GateRecorder(lazy.model, lazy.layers, ["topk", "resident"])
    for share in (0.0, 1.5):
        with refused(UsageError, "share"):
            replace(_options(), resident=share)
    doubled = load_full(full.checkpoint, torch.float32)
    doubled.model.model.layers[3].mlp.register_forward_hook(lambda module, args, output: output * 2)
    doubled.model.model.layers[3].register_forward_hook(lambda module, args, output: output * 1.5)
    with refused(UsageError, "layer 4", "qwen3_moe"):
        GateRecorder(doubled.model, doubled.layers, ["resident"])


USUAL = ("deepseek_v2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
UNUSUAL = {
    "jamba": "consists of",
    "gemma4_text": "consists of",
    "qwen3_next": "consists of",
    "longcat_flash": "consists of",
    "jetmoe": "consists of",
    "granitemoe": "has other logits in a partial forward",
}


@pytest.mark.follows("moetool.runtime.experts.partial_forward unsupported_layers")
def test_what_a_family_of_another_shape_can_keep(tmp_path: Path) -> None:
    families.save("granitemoe", tmp_path, residual_multiplier=0.25)
    loaded = load_full(Checkpoint.open(tmp_path), torch.float32)
    with refused(UsageError, "leave resident out of --keep"):
        GateRecorder(loaded.model, loaded.layers, ["topk", "resident"])
    GateRecorder(loaded.model, loaded.layers, ["topk"])


@pytest.mark.parametrize("family", [*USUAL, *UNUSUAL])
def test_families_of_the_usual_shape_and_others(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(families.config(family))
    if "consists of" in UNUSUAL.get(family, ""):
        with pytest.raises(UsageError, match=f"partial forward of {family}: .* {UNUSUAL[family]}"):
            decoder_layers(model, moe_layers(model))
        return
    families.save(family, tmp_path / "model")
    loaded = load_full(Checkpoint.open(tmp_path / "model"), torch.float32)
    said: list[torch.Tensor] = []
    if family in UNUSUAL:
        for layer in loaded.model.model.layers:
            layer.residual_multiplier = 0.25  # as its checkpoints have
        with pytest.raises(UsageError, match=f"partial forward of {family}: .* {UNUSUAL[family]}"):
            ResidentForward(loaded.model, loaded.layers, 0.5, said.append)
        return
    beside = ResidentForward(loaded.model, loaded.layers, 0.5, said.append)
    assert not said
    loaded.model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    assert [len(logits) for logits in said] == [6] * (len(loaded.layers) - 1)
    beside.close()


def test_latent_attention_and_prompts_in_pieces_stay_as_they_are(tmp_path: Path) -> None:
    families.save("deepseek_v2", tmp_path / "model")
    loaded = load_full(Checkpoint.open(tmp_path / "model"), torch.float32)
    found: list[list[TokenBatch]] = []
    for keep in (["logits"], ["logits", "resident"]):
        batcher = Batcher(loaded.model, max_requests=2, kv_tokens=256, max_batch_tokens=16)
        recorder = GateRecorder(loaded.model, loaded.layers, keep)
        batches: list[Batch] = []
        batcher.on_forward = batches.append
        for request in range(2):
            prompt = [(7 * i + request) % 50 + 3 for i in range(20 + 5 * request)]
            batcher.add(request, prompt, SamplingParams(max_tokens=4, ignore_eos=True))
        rows = []
        while not batcher.idle:
            batcher.step()
            rows.append(recorder.take(batches[-1])[0])
        recorder.close()
        batcher.close()
        found.append(rows)
    assert len(found[0]) == len(found[1]) > 4
    for plain, beside in zip(*found, strict=True):
        assert np.array_equal(plain.token_id_T, beside.token_id_T)
        assert np.array_equal(plain.logits_TF, beside.logits_TF)
        assert beside.resident_TW is not None and beside.resident_TW.any()
