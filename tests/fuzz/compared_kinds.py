"""Kinds of inputs that another program reads too: what moetool accepts is what that one reads.

A case is `case.json`: what was drawn, from which `read` makes the files again. The other readers are the libraries of
safetensors and GGUF, transformers' own configs and classes, its tokenizers and chat templates, and NumPy.
"""

import base64
import functools
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moetool.base.errors import MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.models.families.text_part import stands_alone
from moetool.models.files.location import locate
from moetool.models.loading import load_full
from moetool.models.tested_formats import BY_EXPERT, INFERRED_AND_RUN
from moetool.prompts.gather import Prompt, gather
from moetool.serving.detokenize import Vocabulary
from moetool.serving.messages_schema import MessagesRequest
from moetool.serving.prompt_tokens import chat_text
from moetool.serving.request_schema import ChatRequest
from moetool.serving.responses_schema import ResponsesRequest
from moetool.trace.foreign.importing import import_trace
from moetool.trace.foreign.routes import whole_requests
from moetool.trace.reader import Trace
from tests import families, foreign, gguf_models, gguf_oracle, quantized
from tests.greedy import Greedy, forward_logits, generated, served

Case = dict[str, Any]
GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
TOKENS = torch.tensor([[5, 9, 11, 3, 4, 20, 33, 7, 8, 6, 21]])


@dataclass(frozen=True)
class Compared:
    """A kind of input with a second reader.

    Attributes:
        cases: strategy of what is drawn.
        check: makes the input of a case in a folder and reads it twice. Raises: MoetoolError: moetool refuses it;
            AssertionError: moetool accepts it, and the other reader differs.
        examples: cases for a test that takes seconds.
    """

    cases: Callable[[], st.SearchStrategy[Case]]
    check: Callable[[Case, Path], None]
    examples: int = 20

    def read(self, folder: Path) -> None:
        """Check the case in a folder."""
        (folder / "made").mkdir()
        self.check(json.loads((folder / "case.json").read_text()), folder / "made")

    def files(self) -> st.SearchStrategy[dict[str, bytes]]:
        """Strategy of the files of cases."""
        return self.cases().map(lambda case: {"case.json": json.dumps(case).encode()})


@functools.cache
def _workshop() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moetool-fuzz-")


@functools.cache
def _saved(family: str) -> Path:
    """A tiny checkpoint of a family."""
    folder = Path(_workshop().name) / family
    families.save(family, folder)
    return folder


# -- pairs of config fields ------------------------------------------------------------------------------------------

_IRRELEVANT = re.compile(
    r"_.*|.*(dtype|token_id|dropout|initializer.*|attentions|hidden_states|label.*|router_logits|embeddings|coef)|"
    r"time_step_.*|transformers_version|return_dict|architectures|problem_type|model_type|use_cache|"
    r"chunk_size_feed_forward|"
    r"vocab_size"
)
_BY_CACHE = ("index_topk", "sliding_window")
"""Fields of attention that chooses tokens: which ones of equal scores, or of a window, depends on the cache."""
_CONFIGS = tuple(name for name in (*BY_EXPERT, *INFERRED_AND_RUN, *families.DENSE_LAYERS, "gpt_oss", "granitemoe"))


def _values(value: Any, others: Mapping[str, Any]) -> list[Any]:
    """Values to replace a field's by."""
    sizes = [n for n in others.values() if type(n) is int and 0 <= n <= 64]
    match value:
        case bool() | None:
            return [True, False, None, 0, 1, 2, 3, 8]
        case int():
            near = {0, 1, 2, 3, 5, 7, value + 1, value - 1, value // 2, 2 * value, *sizes}
            return sorted(n for n in near if n <= 256)
        case float():
            return [0.0, 0.5, 1.0, 3.0, 2 * value, -value]
        case list():
            return [[], value[:-1], value + value[-1:], value[::-1], 2 * value]
        case dict():
            return [None, *({k: v for k, v in value.items() if k != left_out} for left_out in value)]
    return [None, "", "x", "silu", "sigmoid", "softmax", "default"]


@functools.cache
def _config(family: str) -> dict[str, Any]:
    values: dict[str, Any] = families.config(family).to_dict()
    return values


@st.composite
def _pairs(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(sorted(set(_CONFIGS))))
    values = _config(family)
    names = [name for name in values if not _IRRELEVANT.fullmatch(name)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    return {
        "family": family,
        "changed": {name: draw(st.sampled_from(_values(values[name], values))) for name in chosen},
    }


def _check_config(case: Case, folder: Path) -> None:
    """transformers' own model of an accepted config runs, no token sees a later one, and we serve its tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.dumps({**_config(case["family"]), **case["changed"]})
    (folder / "config.json").write_text(raw)
    spec = Checkpoint(folder, weights=False).spec
    config = AutoConfig.from_pretrained(folder)
    if not stands_alone(config):
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")  # torch's grouped product takes only widths of 16 bytes
    found = _routes_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        tokens = TOKENS % config.vocab_size
        whole, part = (model(tokens[:, :count], use_cache=False).logits[0] for count in (11, 7))
    if found:
        assert found == dict(zip(spec.layer_ids_L, spec.top_k_L, strict=True)), "other layers or top-k"
    if torch.isfinite(whole).all():
        assert (whole[:7] - part).abs().max() <= 1e-2 * whole.abs().max(), "a token sees a later one"
        if found:  # else no expert is routed to
            model.save_pretrained(folder)
            (folder / "config.json").write_text(raw)
            differ = (forward_logits(folder, tokens) - whole).abs().max()
            assert differ <= 1e-3 * whole.abs().max(), f"logits differ by {float(differ):.3g}"
            linear = set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}
            if not linear:  # a cache without keys has no length in transformers
                prompt = tokens[0].tolist()
                made = served(folder, "lru", [prompt])
                greedy = _forwarded(model, prompt)
                if greedy.tokens != made and any(getattr(config, name, None) for name in _BY_CACHE):
                    greedy = generated(model, [prompt])
                greedy.require_same(made)


def _forwarded(model: Any, prompt: list[int], max_tokens: int = 6) -> Greedy:
    """The tokens of forwards without a cache; that of `generate` keeps too many tokens of a window of 1."""
    ids, gaps = list(prompt), []
    for _ in range(max_tokens):
        with torch.inference_mode():
            best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Greedy([ids[len(prompt) :]], [gaps])


def _routes_of(model: Any) -> dict[int, int]:
    """Experts of a token in each layer that runs its experts, filled by forwards."""
    found: dict[int, int] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        if len(args) > 1 and args[1].dtype == torch.int64:
            found[int(name.split(".layers.")[1].split(".")[0])] = args[1].shape[-1]

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args, name=name: note(name, args))
    return found


# -- counts of a config against tensors ------------------------------------------------------------------------------

_COUNTED = ("qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "glm4_moe", "nemotron_h", "deepseek_v4", "qwen3_next")
_COUNTS = re.compile(
    r"num_.*|n_.*|.*_size|.*_dim|.*_rank|first_k_dense_replace|moe_k|.*_topk|top_k.*|mlp_layer_types|layer_types|"
    r"mlp_only_layers|decoder_sparse_step|tie_word_embeddings|attention_bias|.*_bias|norm_topk_prob"
)


@st.composite
def _counts(draw: st.DrawFn) -> Case:
    """Changes to fields that count, and to tensors: dropped, transposed, cut, of another type, or of another number."""
    family = draw(st.sampled_from(_COUNTED))
    values = _config(family)
    names = [name for name in values if _COUNTS.fullmatch(name) and name not in ("pad_token_id",)]
    chosen = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    changed = {name: draw(st.sampled_from(_values(values[name], values))) for name in chosen}
    stored = sorted(load_file(_saved(family) / "model.safetensors"))
    kinds = ["drop", "transpose", "cut", "half", "renumber", "copy"]
    least = 0 if changed else 1
    edits = draw(st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from(stored)), min_size=least, max_size=2))
    return {"family": family, "changed": changed, "edits": edits, "whole": draw(st.booleans())}


def _edited(case: Case, folder: Path) -> None:
    """Write the checkpoint of a case."""
    source = _saved(case["family"])
    raw = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **case["changed"]}))
    tensors = load_file(source / "model.safetensors")
    for kind, name in case["edits"]:
        if name not in tensors:
            continue
        tensor = tensors[name]
        further = re.sub(r"\.(\d+)\.", lambda found: f".{int(found[1]) + 1}.", name, count=1)
        last = re.sub(r"(.*)\.(\d+)\.", lambda found: f"{found[1]}.{int(found[2]) + 1}.", name, count=1)
        match kind:
            case "drop":
                del tensors[name]
            case "transpose":
                tensors[name] = tensor.transpose(0, -1).contiguous()
            case "cut":
                tensors[name] = tensor[:-1].contiguous()
            case "half":
                tensors[name] = tensor.half()
            case "renumber":
                tensors[last] = tensors.pop(name)
            case "copy":
                tensors[further] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _check_counts(case: Case, folder: Path) -> None:
    """Accepted files have transformers' logits, with no tensor of the model missing or of another shape."""
    _edited(case, folder)
    if case["whole"]:
        ours = load_full(Checkpoint.open(folder), torch.float32).model
        ours.set_experts_implementation("eager")
        with torch.inference_mode():
            found = ours(TOKENS, use_cache=False).logits[0]
    else:
        found = forward_logits(folder, TOKENS)
    _require_logits(folder, found)


def _require_logits(folder: Path, found: torch.Tensor) -> None:
    """Raises: AssertionError: transformers refuses the checkpoint, misses a tensor, or has other logits."""
    from transformers import AutoModelForCausalLM

    theirs, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        assert not report[kind], f"accepted, but transformers reports {kind}: {sorted(map(str, report[kind]))[:2]}"
    theirs.set_experts_implementation("eager")
    with torch.inference_mode():
        expected = theirs(TOKENS, use_cache=False).logits[0]
    if torch.isfinite(expected).all():
        differ = (found - expected).abs().max()
        assert differ <= 1e-4 * expected.abs().max() + 1e-5, f"logits differ by {float(differ):.3g}"


# -- counts of a GGUF header against its tensors ---------------------------------------------------------------------

_HEADER_COUNTS = re.compile(
    r"block_count|expert_count|nextn_predict_layers|leading_dense_block_count|.*expert_shared_count|"
    r".*feed_forward_length|embedding_length|vocab_size|hash_layer_count|interleave_moe_layer_step|"
    r"attention\.(head_count(_kv)?|(key|value)_length.*|.*_lora_rank|indexer\.(head_count|key_length)|"
    r"output_group_count)|ssm\..*|kda\.head_dim|shortconv\.l_cache|moe_latent_size|hyper_connection\.count"
)
"""Values of a header that its tensors give too."""


@functools.cache
def _header(name: str) -> tuple[str, dict[str, int], list[str]]:
    """Architecture, counts and tensors of blocks of a golden file by the gguf package."""
    reader = gguf.GGUFReader(GOLDEN / f"{name}.gguf")
    architecture = reader.fields["general.architecture"].contents()
    values = {field.name.removeprefix(f"{architecture}."): field.contents() for field in reader.fields.values()}
    counts = {key: v for key, v in values.items() if _HEADER_COUNTS.fullmatch(key) and type(v) is int}
    blocks = [tensor.name for tensor in reader.tensors if tensor.name.startswith("blk.")]
    if "expert_gating_func" not in values:  # by this tensor llama.cpp and moetool know it
        blocks = [tensor for tensor in blocks if "exp_probs_b" not in tensor]
    # That a convolution has a bias is known by the bias alone, and there is one such block.
    kept = [name for name in blocks if "tid2eid" not in name and not name.endswith("ssm_conv1d.bias")]
    return architecture, {"nextn_predict_layers": 0, **counts}, kept


@functools.cache
def _dense_logits(name: str) -> torch.Tensor:
    """Logits of the model that a golden file was converted from."""
    model = gguf_oracle.build(name)
    with torch.inference_mode():
        logits: torch.Tensor = model(TOKENS, use_cache=False).logits[0]
    return logits


@st.composite
def _headers(draw: st.DrawFn) -> Case:
    """One or two other counts in a header, or a tensor left out or moved to another block."""
    name = draw(st.sampled_from(sorted(gguf_oracle.MODELS)))
    _, counts, tensors = _header(name)
    changed: dict[str, int | None] = {}
    for key in draw(st.lists(st.sampled_from(sorted(counts)), min_size=1, max_size=2, unique=True)):
        count = counts[key]
        near = sorted({0, 1, 2, count + 1, max(0, count - 1), count // 2, 2 * count, 2**31 - 1} - {count})
        changed[key] = draw(st.sampled_from([*near, None]))
        if "." in key:  # two of these may be another model
            changed = {key: changed[key]}
            break
    edit = draw(st.sampled_from(["", "", "drop", "move"]))
    moved = draw(st.sampled_from(tensors)) if edit else ""
    return {"name": name, "changed": changed if not edit else {}, "edit": edit, "tensor": moved}


def _check_header(case: Case, folder: Path) -> None:
    """Accepted files have the logits of the model that was converted."""
    name, moved = case["name"], case["tensor"]
    families.require_known(gguf_oracle.MODELS[name][0])
    architecture, _, _ = _header(name)
    values = {f"{architecture}.{key}": value for key, value in case["changed"].items()}
    tensors: dict[str, np.ndarray | None] = {}
    if case["edit"]:
        tensors[moved] = None
    if case["edit"] == "move":
        (tensor,) = (each for each in gguf.GGUFReader(GOLDEN / f"{name}.gguf").tensors if each.name == moved)
        _, number, leaf = moved.split(".", 2)
        tensors[f"blk.{int(number) + 1}.{leaf}"] = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
    path = gguf_models.rewritten(GOLDEN / f"{name}.gguf", folder / "m.gguf", values, tensors)
    found, expected = forward_logits(path, TOKENS), _dense_logits(name)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), "accepted, with the logits of another model"


# -- contents of directories -----------------------------------------------------------------------------------------

_TEXT = "Hello <|user|> 12\n\twörld<|endoftext|>"
_CONTENTS = ("pointer", "page", "error", "zeros", "hole", "half", "empty", "foreign", "mark", "absent", "directory")
_STRAYS = (
    *("model.safetensors", "model.safetensors.index.json", "consolidated.safetensors", "model.fp16.safetensors"),
    *("pytorch_model.bin", "adapter_config.json", "model-00001-of-00002.safetensors.incomplete", "README.md", "m.gguf"),
    *("added_tokens.json", "special_tokens_map.json", "vocab.json", "generation_config.json", "quantize_config.json"),
)


@functools.cache
def _whole(shards: int) -> Path:
    """A checkpoint with a tokenizer, in one or two weight files."""
    folder = Path(_workshop().name) / f"whole-{shards}"
    families.save("qwen3_moe", folder, vocab_size=4096)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(locate("reference") / file, folder)
    if shards > 1:
        quantized.shard(folder, shards)
    return folder


def _content(kind: str, name: str, data: bytes) -> bytes:
    """Contents in place of a file."""
    match kind:
        case "pointer":
            return b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4967215360\n"
        case "page":
            return b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
        case "error":
            return b'{"error":"Entry not found"}'
        case "zeros":
            return bytes(len(data))
        case "hole":
            return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        case "half":
            return data[: len(data) // 2]
        case "mark":
            return b"\xef\xbb\xbf" + data
        case "foreign":
            other = _saved("deepseek_v3") / name
            return other.read_bytes() if other.is_file() else (_saved("mixtral") / "model.safetensors").read_bytes()
    return b""


@st.composite
def _directories(draw: st.DrawFn) -> Case:
    """One or two files with other contents, or strays beside them."""
    shards = draw(st.sampled_from([1, 2]))
    names = sorted(file.name for file in _whole(shards).iterdir())
    kinds = st.tuples(st.sampled_from(names), st.sampled_from(_CONTENTS))
    changes = draw(st.lists(kinds, min_size=1, max_size=2, unique_by=lambda change: change[0]))
    strays = st.tuples(st.sampled_from(_STRAYS), st.sampled_from(_CONTENTS[:8]))
    if draw(st.booleans()):
        changes = [draw(strays), *changes[: draw(st.integers(0, 1))]]
    return {"shards": shards, "changes": changes}


def _check_directory(case: Case, folder: Path) -> None:
    """Transformers reads what is accepted; a refusal names a file that was changed."""
    from transformers import AutoTokenizer

    shutil.copytree(_whole(case["shards"]), folder, dirs_exist_ok=True)
    for name, kind in case["changes"]:
        path = folder / name
        data = path.read_bytes() if path.is_file() else (_whole(1) / "model.safetensors").read_bytes()
        path.unlink(missing_ok=True)
        if kind == "directory":
            path.mkdir()
        elif kind != "absent":
            path.write_bytes(_content(kind, name, data))
    try:
        found = forward_logits(folder, TOKENS)
    except MoetoolError as error:
        _require_named(case, error)
    else:
        _require_logits(folder, found)
    try:
        ids = Checkpoint.open(folder, weights=False).tokenizer.encode(_TEXT)
    except MoetoolError as error:
        _require_named(case, error)
        raise
    assert ids == AutoTokenizer.from_pretrained(folder).encode(_TEXT), "other tokens than transformers"


def _require_named(case: Case, error: MoetoolError) -> None:
    """Raises: AssertionError: an error names no file that was changed."""
    names = [name for name, _ in case["changes"]]
    names += ["config"] * ("config.json" in names) + ["weight files"] * any(n.endswith(".safetensors") for n in names)
    assert any(name in str(error) for name in names), f"names no file of {case['changes']}: {error}"


# -- special tokens --------------------------------------------------------------------------------------------------

_NAMES = (
    "<|x|>",
    "<tool>",
    "[INST]",
    " <s>",
    "<0x41>",
    "▁",
    "e",
    "ing",
    "\n",
    "<|user|>x",
    "Ġ",
    "é",
    "👩",
    "<|im_start|>",
)
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_PIECES = (*_NAMES, "Hello", " ", "  ", "\t", "12", "wörld", "你好", "a<|user|>", "<|endoftext|>", "\u0301", "<")


@st.composite
def _added_tokens(draw: st.DrawFn) -> Case:
    """Added tokens, text that may hold them, and tokens that may be parts of a character."""
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=4, unique=True))
    shown = _FLAGS if draw(st.booleans()) else _FLAGS[:1]
    flags, plain = st.fixed_dictionaries({flag: st.booleans() for flag in shown}), dict.fromkeys(_FLAGS, False)
    return {
        "added": [{"content": name, **plain, **draw(flags)} for name in names],
        "text": "".join(draw(st.lists(st.sampled_from(_PIECES), max_size=8))),
        "ids": draw(st.lists(st.integers(0, 4095 + len(names)), max_size=12)),
    }


def _check_tokens(case: Case, folder: Path) -> None:
    """Tokens, chats and streamed text are those of the tokenizers library, also from a GGUF file."""
    from tokenizers import AddedToken, Tokenizer

    source = locate("reference")
    backend = Tokenizer.from_file(str(source / "tokenizer.json"))
    for token in case["added"]:
        options = {flag: token[flag] for flag in _FLAGS if flag != "special"}
        make = backend.add_special_tokens if token["special"] else backend.add_tokens
        make([AddedToken(token["content"], special=token["special"], **options)])
    for file in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / file, folder)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Checkpoint.open(folder, weights=False).tokenizer
    text, ids = case["text"], [id for id in case["ids"] if id < backend.get_vocab_size()]
    assert tokenizer(text)["input_ids"] == backend.encode(text).ids, "other tokens of a text"
    prompt = Prompt(dataset="d", task="t", prompt_id="1", text=text or "a", messages=_user(text))
    chat = tokenizer.apply_chat_template(list(_user(text)), add_generation_prompt=True, return_dict=False)
    assert prompt.token_ids(tokenizer, 2**20) == chat, "other tokens of a chat"
    stream = Vocabulary(tokenizer).detokenizer()
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == backend.decode(ids, skip_special_tokens=True), "other text of tokens"
    if not any(token[flag] for token in case["added"] for flag in _FLAGS[1:]):  # GGUF files have no such flags
        path = gguf_models.spelled(GOLDEN / "qwen3moe.gguf", folder / "m.gguf", folder)
        found = Checkpoint.open(path, weights=False).tokenizer(text)["input_ids"]
        assert found == backend.encode(text).ids, "other tokens of a text by a GGUF file"


def _user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


# -- histories of agents ---------------------------------------------------------------------------------------------

_JSON_CALL = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
_TEMPLATES = {
    "hermes": _JSON_CALL,
    "qwen3-coder": (
        "{% if m.tool_calls %}{% for call in m.tool_calls %}<call><function={{ call.function.name }}>"
        "{% for k, v in call.function.arguments|items %}<parameter={{ k }}>"
        "{{ v if v is string else v | tojson }}</parameter>{% endfor %}</function></call>{% endfor %}{% endif %}"
    ),
    "glm": (
        "{% for call in m.tool_calls or [] %}{% set f = call.function %}<call>{{ f.name }}"
        "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</call>{% endfor %}"
    ),
    "gpt-oss": (
        "{% if m.tool_calls %}{% set tool_call = m.tool_calls[0].function %}<call>{{ tool_call.name }}"
        "<|message|>{{ tool_call.arguments|tojson }}</call>{% endif %}"
    ),
    "mistral": (
        "{% for call in m.tool_calls or [] %}{% if call.id|length != 9 %}{{ raise_exception('ids') }}{% endif %}"
        '<call>{{ call.function | tojson }}, "id": "{{ call.id }}"</call>{% endfor %}'
        "{% if m.role == 'tool' and m.tool_call_id|length != 9 %}{{ raise_exception('ids') }}{% endif %}"
    ),
    "deepseek": (
        "{% for tool in m.tool_calls or [] %}{{ '<call>' + tool['function']['name'] + '```json\\n' + "
        "tool['function']['arguments'] + '```</call>' }}{% endfor %}"
    ),
    "functionary": (
        "{% for tool_call in m.tool_calls or [] %}<call>{{ tool_call['function']['name'] + '\\n' + "
        "tool_call['function']['arguments'] }}</call>{% endfor %}"
    ),
}
"""The part of published templates that shows the calls of a message `m`, shortened."""
_ARGUMENTS = (
    "",
    " \n",
    "null",
    "{}",
    None,
    '{"key": "@"}',
    '{"key": {"in": ["@"]}, "n": 1.5}',
    '{"k": null, "b": "@"}',
)


@st.composite
def _histories(draw: st.DrawFn) -> Case:
    """A conversation with calls; every name, argument, result and text is another one."""
    count = 0

    def mark(kind: str) -> str:
        nonlocal count
        count += 1
        return f"{kind}{count:03}z"

    def texts(kind: str) -> Any:
        text = mark(kind)
        return draw(st.sampled_from([text, [{"type": "text", "text": text}]]))

    messages: list[Case] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": texts("system")})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": texts("user")})
        for _ in range(draw(st.integers(0, 2))):
            calls, results = [], []
            for _ in range(draw(st.integers(1, 3))):
                id = draw(st.sampled_from([mark("call_"), f"{mark('c')}abcd", f"toolu_{mark('0')}"]))
                arguments = draw(st.sampled_from(_ARGUMENTS))
                function = {"name": mark("function"), "arguments": arguments and arguments.replace("@", mark("value"))}
                if arguments is None and draw(st.booleans()):
                    del function["arguments"]
                calls.append({"id": id, "type": "function", "function": function})
                results.append({"role": "tool", "tool_call_id": id, "content": texts("result")})
            said = {"role": "assistant", "tool_calls": calls}
            content = draw(st.sampled_from(["absent", None, "", texts("answer")]))
            messages += [said if content == "absent" else said | {"content": content}]
            messages += draw(st.permutations(results))
    return {"template": draw(st.sampled_from(sorted(_TEMPLATES))), "messages": messages}


def _check_history(case: Case, folder: Path) -> None:
    """Serve and capture have the same text; it shows everything once, and each result behind its call.

    So do the texts of the same history in the protocols of Anthropic's Messages and OpenAI's Responses.
    """
    whole = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + _TEMPLATES[case["template"]] + "{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        "{# 'tool' #}"
    )
    tokenizer = _tokenizer()
    tokenizer.chat_template = whole
    body = ChatRequest.model_validate({"model": "m", "messages": case["messages"]})
    engine: Any = SimpleNamespace(tokenizer=tokenizer, model_name="m")
    text = chat_text(engine, body, body.messages)
    line = json.dumps({"messages": case["messages"]})
    (folder / "p.jsonl").write_text(line + "\n")
    (prompt,) = gather([str(folder / "p.jsonl")]).prompts
    served = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert prompt.token_ids(tokenizer, 2**20) == served, "serve and capture have other tokens"
    marks = re.findall(r"[a-z_]+\d{3}z", re.sub(r'"(id|tool_call_id)": "[^"]*"', "", line))
    others = [MessagesRequest.model_validate(_as_messages(case["messages"])).as_chat()]
    others.append(ResponsesRequest.model_validate(_as_responses(case["messages"])).as_chat())
    texts = [text, *(chat_text(engine, other, other.messages) for other in others)]
    wrong = [mark for mark in marks if any(each.count(mark) != 1 for each in texts)]
    assert not wrong, f"not shown once: {wrong[:4]}"
    for message in case["messages"]:
        for call in message.get("tool_calls", ()):
            result = next(m for m in case["messages"] if m.get("tool_call_id") == call["id"])
            (shown,) = re.findall(r"result\d{3}z", json.dumps(result))
            for each in texts:
                assert each.index(call["function"]["name"]) < each.index(shown), "a result before its call"
    roles = [message["role"] for message in case["messages"]]
    if ("user", "user") not in itertools.pairwise(roles):  # which the other protocols join
        assert texts == [text] * 3, "other texts of the same history"


def _as_messages(messages: list[Case]) -> Case:
    """A history in Anthropic's protocol."""
    made: Case = {"model": "m", "max_tokens": 1, "messages": []}
    for message in messages:
        content, role = message.get("content"), message["role"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
        if role in ("system", "developer"):
            made["system"] = blocks
            continue
        if role == "tool":
            role, blocks = "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            values = json.loads((function.get("arguments") or "").strip() or "null") or {}
            blocks = [*blocks, {"type": "tool_use", "id": call["id"], "name": function["name"], "input": values}]
        made["messages"].append({"role": role, "content": blocks})
    return made


def _as_responses(messages: list[Case]) -> Case:
    """A history in the protocol of OpenAI's Responses."""
    items: list[Case] = []
    for message in messages:
        content, role = message.get("content"), message["role"]
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
        elif content:
            items.append({"type": "message", "role": role, "content": content})
        calls = message.get("tool_calls", ())
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return {"model": "m", "input": items}


@functools.cache
def _tokenizer() -> Any:
    return Checkpoint.open("reference").tokenizer


# -- answers of engines ----------------------------------------------------------------------------------------------

_FAULTS = (
    *("error", "no_choices", "null", "no_rows", "cut_base64", "not_base64", "cut_rows", "one_row_more", "other_top_k"),
    *(
        "other_layers",
        "expert_8",
        "negative",
        "twice",
        "zero_layer",
        "float",
        "fewer_tokens",
        "more_tokens",
        "no_usage",
    ),
    *("text", "list", "half_line", "same_id", "blank_line"),
)
_HARMLESS = ("no_usage", "blank_line")


@st.composite
def _answers(draw: st.DrawFn) -> Case:
    """Many answers of an engine, one of them with a fault."""
    return {
        "format": draw(st.sampled_from(["vllm_routed_experts", "sglang_routed_experts"])),
        "count": draw(st.sampled_from([1, 2, 30, 1000])),
        "place": draw(st.floats(0, 1, exclude_max=True)),
        "fault": draw(st.sampled_from(["none", *_FAULTS])),
        "seed": draw(st.integers(0, 2**16)),
        "by_list": draw(st.booleans()),
        "openai": draw(st.booleans()),
    }


def _faulty(case: Case, record: Case, rows_THK: np.ndarray) -> Any:
    """An answer with the fault of a case."""
    vllm = case["format"].startswith("vllm")
    holder = record["choices"][0] if vllm else record.get("sglext") or record["meta_info"]
    usage = record.get("usage") or record["meta_info"]
    rows = rows_THK.astype(np.uint8 if vllm else np.int32)
    match case["fault"]:
        case "error":
            return {"error": {"message": "out of memory", "code": 500}}
        case "no_choices":
            return {"id": "x", "choices": [], "usage": {}} if vllm else {"text": "", "meta_info": None}
        case "null":
            holder["routed_experts"] = None
        case "no_rows":
            rows = rows[:0]
        case "cut_base64":
            holder["routed_experts"] = holder["routed_experts"][:-5]
        case "not_base64":
            holder["routed_experts"] = "*" + holder["routed_experts"][1:]
        case "cut_rows":
            rows = rows[:-2]
        case "one_row_more":
            rows = np.concatenate([rows, rows[-1:]])
        case "other_top_k":  # SGLang's bytes lack their shape: a 0 here would pass for a layer without experts
            column = int(rows[0, 1, 0] == 0)
            rows = rows[..., column : column + 1]
        case "other_layers":
            rows = rows[:, :-1]
        case "expert_8":
            rows = rows.copy()
            rows[1, 2, 0] = foreign.EXPERTS
        case "negative" if not vllm:
            rows = rows.copy()
            rows[1, 2, 0] = -2
        case "twice":
            rows = rows.copy()
            rows[1, 2, 1] = rows[1, 2, 0]
        case "zero_layer":
            rows = rows.copy()
            rows[:, 2] = 0
        case "float" if vllm:
            rows = rows.astype(np.float32)
        case "fewer_tokens":
            usage["prompt_tokens"] = 0
        case "more_tokens":
            usage["completion_tokens"] += 50
        case "no_usage":
            del usage["prompt_tokens"]
        case "text":
            return "a text"
        case "list":
            return [record]
    if case["fault"] in ("no_rows", "cut_rows", "one_row_more", "other_top_k", "other_layers", "expert_8") or (
        case["fault"] in ("negative", "twice", "zero_layer", "float")
    ):
        data = foreign.npy(rows) if vllm else base64.b64encode(rows.tobytes()).decode()
        holder["routed_experts"] = data
    return record


def _check_answers(case: Case, folder: Path) -> None:
    """All answers are imported with the rows that NumPy reads, or the faulty one is named."""
    draw = np.random.default_rng(case["seed"])
    place = int(case["place"] * case["count"])
    lines, expected = [], {}
    for number in range(case["count"]):
        prompt, new = (int(n) for n in draw.integers(1, 5, 2))
        rows = np.zeros((prompt + new, foreign.HIDDEN, foreign.TOP_K), np.int64)
        for layer in range(1, foreign.HIDDEN):
            rows[:, layer] = draw.permuted(np.tile(np.arange(foreign.EXPERTS), (len(rows), 1)), axis=1)[:, :2]
        counts = {"prompt_tokens": prompt, "completion_tokens": new + 1}
        record: Any
        if case["format"].startswith("vllm"):
            choice = {"index": 0, "text": "…", "routed_experts": foreign.npy(rows.astype(np.uint8))}
            record = {"id": f"r{number}", "choices": [choice], "usage": counts}
        else:
            text = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
            record = {"text": "…", "meta_info": {"id": f"r{number}", **counts, "routed_experts": text}}
            if case.get("openai"):  # SGLang's other API
                choices = [{"index": 0, "message": {"content": "…"}}]
                record = {"id": f"r{number}", "choices": choices, "usage": counts, "sglext": {"routed_experts": text}}
        expected[f"r{number}"] = rows[:, 1:]
        if number == place:
            record = _faulty(case, record, rows)
        lines.append(json.dumps(record))
    if case["fault"] == "half_line":
        lines[place] = lines[place][: len(lines[place]) // 2]
    if case["fault"] == "same_id":
        lines.append(lines[place])
    if case["fault"] == "blank_line":
        lines.insert(place, "")
    whole = "[" + ",\n".join(filter(None, lines)) + "]" if case["by_list"] else "\n".join(lines) + "\n"
    (folder / "r.jsonl").write_text(whole)
    said = {"first_k_dense": 1, "num_experts": foreign.EXPERTS, "expert_bytes": 1000}
    said |= {"top_k": foreign.TOP_K, "num_hidden_layers": foreign.HIDDEN}
    try:
        made = import_trace([folder / "r.jsonl"], case["format"], folder / "t", settings=said)
    except MoetoolError as error:
        assert case["fault"] not in ("none", *_HARMLESS), f"refused without a fault: {error}"
        named = f"line {place + 1}\\b|object {place}\\b|r{place}\\b"
        assert case["fault"] == "half_line" or re.search(named, str(error)), f"does not name answer {place}: {error}"
        raise
    vllm, fault = case["format"].startswith("vllm"), case["fault"]
    if fault == ("negative" if vllm else "float") or (fault == "list" and case["count"] == 1):
        fault = "none"
    if fault == "cut_rows":  # as if asked for from a later token, which is said
        assert any(f"of 1 of {case['count']:,} answer" in note and f"r{place}," in note for note in made.notes), (
            made.notes
        )
        expected[f"r{place}"] = expected[f"r{place}"][:-2]
        fault = "none"
    assert fault in ("none", *_HARMLESS), f"accepted with the fault {fault}"
    trace = Trace(folder / "t")
    found = {row["prompt_id"].rpartition("/")[2]: rows for row, rows in whole_requests(trace)}
    assert found.keys() == expected.keys()
    for name, rows in found.items():
        assert np.array_equal(rows.experts_TS.reshape(expected[name].shape), expected[name]), name


TARGETS = {
    "config_pairs": Compared(_pairs, _check_config),
    "checkpoint_counts": Compared(_counts, _check_counts),
    "gguf_counts": Compared(_headers, _check_header),
    "directories": Compared(_directories, _check_directory),
    "special_tokens": Compared(_added_tokens, _check_tokens, examples=60),
    "agent_histories": Compared(_histories, _check_history, examples=60),
    "engine_answers": Compared(_answers, _check_answers, examples=60),
}
